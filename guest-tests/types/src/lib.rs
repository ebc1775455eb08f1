// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Types shared by Granule's crates: units, addresses, memory backings, guest modes, test phases
//! and their marks, and the records of `granule.result/1`.

pub mod backing;
pub mod cpu_list;
pub mod guest_mode;
pub mod host;
pub mod phase;
pub mod record;
pub mod units;

use std::error::Error;

pub use phase::mark;
use rand_xoshiro::{
    SplitMix64,
    rand_core::{Rng as _, SeedableRng as _},
};

/// Returns an error and its causes as one line.
pub fn error_text(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

/// Replaces with `?` every character that a terminal, a table or a test runner interprets: control
/// characters, line separators and bidirectional formatting characters.
pub fn make_printable(text: &str) -> String {
    let is_active =
        |c: char| c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    text.replace(is_active, "?")
}

/// Returns the first output of the generator `SplitMix64` with this seed, each bit of which depends
/// on all bits of `seed`. All versions of this crate return the same value for a seed.
pub fn splitmix64(seed: u64) -> u64 {
    SplitMix64::seed_from_u64(seed).next_u64()
}

#[cfg(feature = "testing")]
pub mod testing {
    //! Reports of skipped tests, which Rust's test harness counts as passed.

    use std::{
        env,
        fmt::Display,
        fs::OpenOptions,
        io::{self, Write as _},
        panic::Location,
        thread,
    };

    /// Environment variable that names the file to which [`skip`] appends a line.
    pub const SKIP_LOG_VARIABLE: &str = "GRANULE_SKIP_LOG";

    /// Prints `SKIP <test>: <reason>` to standard error for the current test, which skips all or
    /// part of its work, and appends the line to the file that [`SKIP_LOG_VARIABLE`] names.
    ///
    /// The line bypasses the harness's output capture, so it shows without `--nocapture`.
    ///
    /// # Panics
    /// The file cannot be written, so the skip would not be counted.
    #[track_caller]
    pub fn skip(reason: impl Display) {
        let thread = thread::current();
        // With a single test thread, Rust's harness runs tests on the main thread.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_equal_the_reference_implementation() {
        // The reference generator adds the golden gamma to its state for each output.
        let gamma = 0x9e37_79b9_7f4a_7c15_u64;
        assert_eq!(splitmix64(1_234_567), 6_457_827_717_110_365_317);
        assert_eq!(splitmix64(1_234_567_u64.wrapping_add(gamma)), 3_203_168_211_198_807_973);
    }
}
