// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What one boot of the emulated host is to do, and what it says about how that went: the files
//! and frames between the lab and its PID 1.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::dialogue::Turn;
use granule_types::units::Nanoseconds;

/// Where the job lies in the initramfs.
pub const JOB_PATH: &str = "/job.json";
/// Where the facts about the host lie in the initramfs (see [`granule_types::record::Host`]).
pub const FACTS_PATH: &str = "/facts.json";
/// Where the test puts its results in the emulated host.
pub const RESULTS_PATH: &str = "/tmp/results.jsonl";
/// Where a foreign test lies in the initramfs.
pub const FOREIGN_PATH: &str = "/test";

/// The frame that holds the [`Ending`].
pub const ENDING_FRAME: &str = "ending";
/// The frame that holds the file at [`RESULTS_PATH`].
pub const RESULTS_FRAME: &str = "results";
/// The frame that holds the emulated host's [`Host`](granule_types::record::Host).
pub const HOST_FRAME: &str = "host";
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
    /// Files below `/sys` and what is written to them.
    pub settings: BTreeMap<String, String>,
    /// What makes another interleaving; see [`Walk`]. 0 changes nothing.
    pub seed: u64,
    /// Whether the test knows nothing of marks, so that PID 1 gives them around it.
    pub foreign: bool,
    /// What is typed on the test's standard input, and when; where it is empty the test has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dialogue: Vec<Turn>,
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

/// How PID 1 goes over the CPUs before the test, to make the interleaving that belongs to a seed.
///
/// It runs on every CPU once, in an order of the seed's, spinning for a while of the seed's on each.
/// The scheduler then puts new threads on the CPUs that became idle last first
/// (`find_idlest_group_cpu()`), so vCPUs land on other CPUs and take their turns in another order;
/// and the timer's ticks fall elsewhere.
#[derive(Debug, Clone)]
pub struct Walk {
    state: u64,
    left: Vec<usize>,
}

impl Walk {
    /// The walk over these CPUs that belongs to a seed.
    pub fn new(seed: u64, cpus: &[usize]) -> Self {
        Self {
            state: seed,
            left: cpus.to_vec(),
        }
    }

    /// SplitMix64: neighbouring seeds have nothing in common.
    fn draw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

/// A CPU and for how many turns to spin there, up to 2^18.
impl Iterator for Walk {
    type Item = (usize, u64);

    fn next(&mut self) -> Option<Self::Item> {
        let choices = self.left.len() as u64;
        if choices == 0 {
            return None;
        }
        let chosen = usize::try_from(self.draw() % choices).unwrap_or(0);
        let turns = self.draw() >> (64 - 18);
        Some((self.left.swap_remove(chosen), turns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_read_as_it_was_written() {
        let job = Job {
            argv: vec!["/init".to_owned(), "bench".to_owned()],
            pools: [(2 << 20, 34)].into(),
            settings: [("/sys/x".to_owned(), "0".to_owned())].into(),
            seed: 5,
            foreign: true,
            dialogue: vec![Turn::new("login: ", "root")],
            deadline_seconds: 60,
        };

        let text = serde_json::to_string(&job).unwrap();

        assert_eq!(serde_json::from_str::<Job>(&text).unwrap(), job);
    }

    #[test]
    fn a_walk_visits_every_cpu_once_in_an_order_of_the_seeds() {
        let all: Vec<usize> = (0..32).step_by(2).collect();
        let order = |seed| -> Vec<usize> { Walk::new(seed, &all).map(|(cpu, _)| cpu).collect() };
        let orders: std::collections::BTreeSet<_> = (1..32).map(order).collect();

        let mut cpus = order(7);
        cpus.sort_unstable();

        assert_eq!(cpus, all);
        assert_eq!(order(7), order(7));
        assert_eq!(orders.len(), 31);
        assert!(Walk::new(7, &all).all(|(_, turns)| turns < 1 << 18));
    }
}
