// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Prints and writes reports.

use std::io::{self, Write};

use crate::{error::LabError, jobs::run_directory::RunDirectory};

/// Status of a completed run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunStatus {
    /// No failure.
    Passed,
    /// A job failed, a phase regressed, or the results of a selftest differ.
    Failed,
}

/// Prints to standard output.
pub fn print(text: &str) -> Result<(), LabError> {
    match io::stdout().write_all(text.as_bytes()) {
        // A reader may close the pipe early (`| head`).
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.map_err(LabError::Output),
    }
}

/// Prints and writes a report, and writes it as HTML.
pub fn publish(run_directory: &RunDirectory, report: &str, html: &str) -> Result<(), LabError> {
    run_directory.write_report(report)?;
    print(report)?;
    publish_html(run_directory, html)
}

/// Writes the HTML report and prints its path.
pub fn publish_html(run_directory: &RunDirectory, html: &str) -> Result<(), LabError> {
    let path = run_directory.write_html(None, html)?;
    eprintln!("lab: HTML report: {}", path.display());
    Ok(())
}
