// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The file `bisect.json` in the run directory of a bisection, from which `--resume` continues.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::options::BisectOptions;
use crate::{command::CommandError, error::LabError, shell::Shell};

const FILE: &str = "bisect.json";
const SCHEMA: &str = "granule.bisect/2";

/// Options and figures of a bisection, in `bisect.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct State {
    schema: String,
    /// Directory of relative paths in `options`.
    working_directory: PathBuf,
    pub options: BisectOptions,
    /// Hash of the programs and files on which figures depend.
    inputs: String,
    pub measured: Vec<MeasuredCommit>,
    /// Names of counts that are not 0.
    pub occurring: BTreeSet<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredCommit {
    pub commit: String,
    pub subject: String,
    /// SHA-256 of the image; `None` if it could not be built.
    pub image_sha256: Option<String>,
    /// `None` if the commit is skipped.
    pub figure: Option<u64>,
}

impl State {
    /// Returns the state before the first measurement.
    pub fn new(options: BisectOptions, inputs: String) -> Result<Self, LabError> {
        Ok(Self {
            schema: SCHEMA.to_owned(),
            working_directory: env::current_dir()?,
            options,
            inputs,
            measured: Vec::new(),
            occurring: BTreeSet::new(),
        })
    }

    /// Reads the state of an interrupted bisection, without its skipped commits, and changes to its
    /// working directory.
    pub fn open(run_directory: &Path) -> Result<Self, LabError> {
        let path = run_directory.join(FILE);
        let unusable = |reason: String| {
            LabError::Unusable(format!(
                "{} has no bisection to resume: {reason}; set --out to its run directory, or omit \
                 --resume",
                run_directory.display()
            ))
        };
        let text = fs::read_to_string(&path).map_err(|error| unusable(error.to_string()))?;
        let mut state: Self =
            serde_json::from_str(&text).map_err(|error| unusable(error.to_string()))?;
        if state.schema != SCHEMA {
            return Err(unusable(format!("its schema is {}, not {SCHEMA}", state.schema)));
        }
        state.measured.retain(|measured| measured.figure.is_some());
        env::set_current_dir(&state.working_directory).map_err(|error| {
            CommandError::file("change to the directory", &state.working_directory, error)
        })?;
        Ok(state)
    }

    /// Refuses to continue with other programs or files.
    pub fn check_inputs(&self, inputs: &str, run_directory: &Path) -> Result<(), LabError> {
        if self.inputs == inputs {
            return Ok(());
        }
        Err(LabError::Unusable(format!(
            "--resume: the compiler, the emulator, granule, its plugin or a configuration fragment \
             changed since the bisection in {} began: start another one in another directory",
            run_directory.display()
        )))
    }

    pub fn write(&self, shell: Shell, run_directory: &Path) -> Result<(), LabError> {
        let text = serde_json::to_string_pretty(self)?;
        Ok(shell.replace(&run_directory.join(FILE), text)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resumed_bisection_has_its_figures_and_tries_skipped_commits_again() {
        let directory = tempfile::tempdir().unwrap();
        let missing = State::open(directory.path()).unwrap_err().to_string();
        let mut state = State::new(BisectOptions::defaults(), "one".to_owned()).unwrap();
        for (commit, figure) in [("01", Some(7)), ("02", None)] {
            state.measured.push(MeasuredCommit {
                commit: commit.to_owned(),
                subject: "x".to_owned(),
                image_sha256: None,
                figure,
            });
        }
        state.write(Shell::new(false), directory.path()).unwrap();

        let resumed = State::open(directory.path()).unwrap();

        assert_eq!(resumed.measured, state.measured[..1]);
        assert!(resumed.check_inputs("one", directory.path()).is_ok());
        let other = resumed.check_inputs("two", directory.path()).unwrap_err().to_string();
        assert!(missing.contains("no bisection to resume"), "{missing}");
        assert!(other.contains("the compiler, the emulator"), "{other}");
    }
}
