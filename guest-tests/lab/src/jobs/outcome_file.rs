// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The file `outcome.json` of a job, which is written last: the job ended, with these inputs.
//!
//! Results are read from the job's other files. A failure is recorded with its message, because it
//! may depend on the machine.

use std::{fs, path::Path};

use serde::{Deserialize, Serialize};

use crate::{command::CommandError, error::with_causes, jobs::outcome::JobError, shell::Shell};

const FILE: &str = "outcome.json";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutcomeFile {
    /// SHA-256 of everything that the results depend on.
    pub inputs: String,
    /// `None` if the boot completed.
    pub failure: Option<Failure>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Failure {
    /// The host ended without a report of PID 1.
    NoReport(String),
    Error(String),
    /// The job was skipped, because its kernel does not boot.
    Skipped,
}

impl OutcomeFile {
    /// Returns the record of a result.
    pub fn of_result<T>(inputs: String, result: &Result<T, JobError>) -> Self {
        let failure = result.as_ref().err().map(|error| match error.is_failed_boot() {
            true => Failure::NoReport(with_causes(error)),
            false => Failure::Error(with_causes(error)),
        });
        Self { inputs, failure }
    }

    /// Reads the record of a job; `None` if the job did not end.
    pub fn read(directory: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(directory.join(FILE)).ok()?).ok()
    }

    pub fn exists(directory: &Path) -> bool {
        directory.join(FILE).is_file()
    }

    pub fn write(&self, directory: &Path) -> Result<(), CommandError> {
        let path = directory.join(FILE);
        let failed = |error: serde_json::Error| CommandError::file("write", &path, error.into());
        let text = serde_json::to_string(self).map_err(failed)?;
        Shell::new(false).replace(&path, text + "\n")
    }

    /// Moves the files of an ended job to `directory`, unless another attempt with the same inputs has
    /// ended there. Command line and messages then name this directory.
    pub fn publish(attempt: &Path, directory: &Path) -> Result<(), CommandError> {
        let inputs = |directory| Self::read(directory).map(|outcome| outcome.inputs);
        let has_ended = || inputs(directory).is_some_and(|ended| Some(ended) == inputs(attempt));
        for file in [FILE, "command"] {
            let path = attempt.join(file);
            // A skipped job has no command.
            let Ok(text) = fs::read_to_string(&path) else { continue };
            let [from, to] = [attempt, directory].map(|path| path.display().to_string());
            Shell::new(false).write(&path, text.replace(&from, &to))?;
        }
        if !has_ended() {
            Shell::new(false).remove_dir(directory)?;
        }
        match fs::rename(attempt, directory) {
            Err(_) if has_ended() => Shell::new(false).remove_dir(attempt),
            result => result.map_err(|error| CommandError::file("rename", attempt, error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(parent: &Path, name: &str, inputs: &str) -> std::path::PathBuf {
        let directory = parent.join(name);
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("command"), format!("qemu {}/x", directory.display())).unwrap();
        let outcome = OutcomeFile { inputs: inputs.to_owned(), failure: None };
        outcome.write(&directory).unwrap();
        directory
    }

    #[test]
    fn the_first_attempt_that_ends_is_published() {
        let parent = tempfile::tempdir().unwrap();
        let attempts = [".1", ".2"].map(|name| attempt(parent.path(), name, "same"));
        let [first, second] = attempts;
        let job = parent.path().join("job");
        fs::create_dir(&job).unwrap();
        fs::write(job.join("console.log"), "interrupted").unwrap();

        OutcomeFile::publish(&first, &job).unwrap();
        OutcomeFile::publish(&second, &job).unwrap();

        assert_eq!(OutcomeFile::read(&job).unwrap().inputs, "same");
        let command = fs::read_to_string(job.join("command")).unwrap();
        assert_eq!(command, format!("qemu {}/x", job.display()));
        assert!(!job.join("console.log").exists() && !second.exists());
    }

    #[test]
    fn an_attempt_with_other_inputs_replaces_the_outcome() {
        let parent = tempfile::tempdir().unwrap();
        let job = parent.path().join("job");
        for inputs in ["earlier", "later"] {
            let attempt = attempt(parent.path(), ".1", inputs);

            OutcomeFile::publish(&attempt, &job).unwrap();

            assert_eq!(OutcomeFile::read(&job).unwrap().inputs, inputs);
        }
    }

    #[test]
    fn a_job_without_a_readable_record_did_not_end() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join(FILE), "{\"inputs\":\"1").unwrap();

        assert_eq!(OutcomeFile::read(directory.path()), None);
    }
}
