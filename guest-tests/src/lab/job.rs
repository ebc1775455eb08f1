// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What one boot of the emulated host is to do, and what it says about how that went: the files
//! and frames between the lab and its PID 1.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::units::Nanoseconds;

/// Where the job lies in the initramfs.
pub const JOB_PATH: &str = "/job.json";
/// Where the facts about the host lie in the initramfs (see [`crate::results::Host`]).
pub const FACTS_PATH: &str = "/facts.json";
/// Where the test puts its results in the emulated host.
pub const RESULTS_PATH: &str = "/tmp/results.jsonl";
/// Where a foreign test lies in the initramfs.
pub const FOREIGN_PATH: &str = "/test";

/// The frame that holds the [`Ending`].
pub const ENDING_FRAME: &str = "ending";
/// The frame that holds the file at [`RESULTS_PATH`].
pub const RESULTS_FRAME: &str = "results";
/// The frame that holds what the test wrote to its standard output.
pub const STDOUT_FRAME: &str = "stdout";
/// The frame that holds what the test wrote to its standard error.
pub const STDERR_FRAME: &str = "stderr";

/// What to do after the boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// Huge pages to reserve: how many of each size, in bytes.
    pub pools: BTreeMap<u64, u64>,
    /// Turns of a busy wait before the test begins: what makes another interleaving. Their number
    /// also decides how many processes come and go before it.
    pub spins: u64,
    /// Whether the test knows nothing of marks, so that PID 1 gives them around it.
    pub foreign: bool,
    /// After how many (virtual) seconds the test is killed.
    pub deadline_seconds: u64,
}

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ending {
    /// The test ended by itself.
    Exited {
        /// Its exit code.
        code: i32,
        /// From its start to its end.
        ns: Nanoseconds,
    },
    /// A signal ended it.
    Killed {
        /// Which.
        signal: i32,
    },
    /// It did not end in time.
    Deadline {
        /// The time it was given.
        seconds: u64,
    },
    /// The host gave fewer huge pages than the job needs.
    ShortPool {
        /// The page size in bytes.
        page: u64,
        /// How many were asked for.
        wanted: u64,
        /// How many there are.
        got: u64,
    },
    /// PID 1 could not do its part.
    Init {
        /// What went wrong.
        error: String,
    },
}

/// Turns of the busy wait for a seed: none for seed 0, else up to 2^22, spread by a fixed mixing
/// (the finalizer of SplitMix64), so that neighbouring seeds have nothing in common.
pub const fn spins(seed: u64) -> u64 {
    if seed == 0 {
        return 0;
    }
    let mut mixed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ (mixed >> 31)) & ((1 << 22) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_read_as_it_was_written() {
        let job = Job {
            argv: vec!["/init".to_owned(), "bench".to_owned()],
            pools: [(2 << 20, 34)].into(),
            spins: 5,
            foreign: true,
            deadline_seconds: 60,
        };

        let text = serde_json::to_string(&job).unwrap();

        assert_eq!(serde_json::from_str::<Job>(&text).unwrap(), job);
    }

    #[test]
    fn seeds_wait_differently_and_seed_0_not_at_all() {
        let waits: std::collections::BTreeSet<u64> = (0..64).map(spins).collect();

        assert_eq!(spins(0), 0);
        assert_eq!(waits.len(), 64);
    }
}
