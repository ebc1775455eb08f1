// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Types shared by Granule's crates: units, addresses, memory backings, guest modes, test phases
//! and their marks, and the records of `granule.result/1`.

pub mod backing;
pub mod guest_mode;
pub mod host;
pub mod phase;
pub mod record;
pub mod units;

pub use phase::mark;
use rand_xoshiro::{
    SplitMix64,
    rand_core::{Rng as _, SeedableRng as _},
};

/// Returns the first output of `SplitMix64` with this seed: a value whose bits all depend on all
/// bits of `seed`. It never changes between versions of this crate.
pub fn mix(seed: u64) -> u64 {
    SplitMix64::seed_from_u64(seed).next_u64()
}

#[cfg(feature = "testing")]
pub mod testing {
    //! Reports of skipped tests, which Rust's test harness cannot express and counts as passed.

    use std::{
        env,
        fmt::Display,
        fs::OpenOptions,
        io::{self, Write as _},
        panic::Location,
        thread,
    };

    /// Environment variable with the file to which [`skip`] appends one line for each skipped test.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_those_of_the_reference_implementation() {
        // The first two outputs for the seed 1234567; the state advances by the golden gamma.
        let gamma = 0x9e37_79b9_7f4a_7c15_u64;
        assert_eq!(mix(1_234_567), 6_457_827_717_110_365_317);
        assert_eq!(mix(1_234_567_u64.wrapping_add(gamma)), 3_203_168_211_198_807_973);
    }
}
