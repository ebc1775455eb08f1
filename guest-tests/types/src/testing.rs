// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reports of skipped tests, which Rust's test harness cannot express and counts as passed.

use std::{
    env,
    fmt::Display,
    fs::OpenOptions,
    io::{self, Write as _},
    panic::Location,
    thread,
};

/// Names the file to which [`skip`] appends one line for each skipped test.
pub const SKIP_LOG_VARIABLE: &str = "GRANULE_SKIP_LOG";

/// Reports that the current test is skipped, wholly or in part, for `reason`: a line
/// `SKIP <test>: <reason>` on standard error and in the file that [`SKIP_LOG_VARIABLE`] names.
///
/// The line bypasses the harness's capture of output, so it shows without `--nocapture`.
///
/// # Panics
/// The file cannot be written: a skip that is not counted must not pass.
#[track_caller]
pub fn skip(reason: impl Display) {
    let thread = thread::current();
    // With one test thread the harness runs tests on its main thread.
    let test = match thread.name() {
        Some(name) if name != "main" => name.to_owned(),
        _ => Location::caller().to_string(),
    };
    let line = format!("SKIP {test}: {reason}\n");
    let _ = io::stderr().write_all(line.as_bytes());
    if let Some(path) = env::var_os(SKIP_LOG_VARIABLE) {
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .and_then(|mut log| log.write_all(line.as_bytes()))
            .unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
    }
}
