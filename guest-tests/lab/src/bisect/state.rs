// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The file `bisect.json` in the run directory of a bisection, from which `--resume` continues.

use std::{fs, path::Path};

use serde::{Deserialize, Serialize};

use crate::{
    LabError,
    command::CommandError,
    shell::{Shell, partial_path, sha256},
};

const FILE: &str = "bisect.json";
const SCHEMA: &str = "granule.bisect/1";

/// Settings and figures of a bisection, in `bisect.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    schema: String,
    /// Hash of all settings that affect figures.
    settings: String,
    pub measured: Vec<MeasuredCommit>,
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
    /// Returns the state before the first measurement. `settings` contains everything that affects
    /// figures.
    pub fn new(settings: &str) -> Self {
        Self {
            schema: SCHEMA.to_owned(),
            settings: sha256(settings.as_bytes()),
            measured: Vec::new(),
        }
    }

    /// Reads the state of an interrupted bisection, which must have the settings of this one.
    pub fn resume(&self, run_directory: &Path) -> Result<Self, LabError> {
        let directory = run_directory.display();
        let text = fs::read_to_string(run_directory.join(FILE)).map_err(|error| {
            LabError::Unusable(format!(
                "{directory} has no bisection to resume ({error}): set --out to its run directory, \
                 or omit --resume"
            ))
        })?;
        let found: Self = serde_json::from_str(&text)?;
        if (&found.settings, &found.schema) != (&self.settings, &self.schema) {
            return Err(LabError::Unusable(format!(
                "the bisection in {directory} has another GOOD, metric, load or build: set the same \
                 options, or another directory with --out"
            )));
        }
        Ok(found)
    }

    pub fn write(&self, shell: Shell, run_directory: &Path) -> Result<(), LabError> {
        let path = run_directory.join(FILE);
        let partial = partial_path(&path);
        shell.write(&partial, serde_json::to_string_pretty(self)?)?;
        shell.rename(&partial, &path).map_err(|error: CommandError| error.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bisection_is_resumed_with_its_settings_only() {
        let directory = tempfile::tempdir().unwrap();
        let mut state = State::new("one");
        let missing = state.resume(directory.path()).unwrap_err();
        state.measured.push(MeasuredCommit {
            commit: "0123".to_owned(),
            subject: "x".to_owned(),
            image_sha256: None,
            figure: Some(7),
        });
        state.write(Shell::new(false), directory.path()).unwrap();

        let same = State::new("one").resume(directory.path()).unwrap();
        let other = State::new("two").resume(directory.path()).unwrap_err();

        assert_eq!(same, state);
        assert!(missing.to_string().contains("no bisection to resume"), "{missing}");
        assert!(other.to_string().contains("another directory with --out"), "{other}");
    }
}
