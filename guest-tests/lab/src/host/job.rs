// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The job of one boot and its result: files and frames between the lab and PID 1.

use std::collections::BTreeMap;

use granule_types::units::Nanoseconds;
use rand_xoshiro::{
    SplitMix64,
    rand_core::{Rng as _, SeedableRng as _},
};
use serde::{Deserialize, Serialize};

use crate::host::expect::Exchange;

/// Path of the job in the initramfs.
pub const JOB_PATH: &str = "/job.json";
/// Path of the facts about the host in the initramfs (see [`granule_types::record::Host`]).
pub const FACTS_PATH: &str = "/facts.json";
/// Path of the test's results in the emulated host.
pub const RESULTS_PATH: &str = "/tmp/results.jsonl";
/// Path of a foreign test in the initramfs.
pub const FOREIGN_PATH: &str = "/test";

/// Frame with the [`Ending`].
pub const ENDING_FRAME: &str = "ending";
/// Frame with the file at [`RESULTS_PATH`].
pub const RESULTS_FRAME: &str = "results";
/// Frame with the [`Host`](granule_types::record::Host).
pub const HOST_FRAME: &str = "host";
/// Frame with the standard output of the test.
pub const STDOUT_FRAME: &str = "stdout";
/// Frame with the standard error of the test.
pub const STDERR_FRAME: &str = "stderr";

/// Job of one boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Huge pages to reserve: page size in bytes, and number.
    pub pools: BTreeMap<u64, u64>,
    /// Files below `/sys` and the values to write to them.
    pub settings: BTreeMap<String, String>,
    /// Seed of the schedule; see [`Walk`]. 0 changes nothing.
    pub seed: u64,
    /// The test is foreign: it executes no marks, so PID 1 executes them around it.
    pub foreign: bool,
    /// Script on the console of the test. Without it, the test has no standard input.
    #[serde(default, rename = "dialogue", skip_serializing_if = "Vec::is_empty")]
    pub expect: Vec<Exchange>,
    /// Virtual seconds after which the test is killed.
    pub deadline_seconds: u64,
}

/// Ending of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ending {
    /// The test exited.
    Exited {
        code: i32,
        /// Duration of the test.
        ns: Nanoseconds,
    },
    /// A signal killed the test.
    Killed { signal: i32 },
    /// The test exceeded its deadline.
    Deadline { seconds: u64 },
    /// The host has fewer huge pages than the job requires.
    ShortPool {
        /// Page size in bytes.
        page: u64,
        wanted: u64,
        got: u64,
    },
    /// PID 1 failed.
    Init { error: String },
}

/// Walk of PID 1 over the CPUs before the test, which determines the schedule of a seed.
///
/// PID 1 runs on every CPU once, in an order and for a number of turns that depend on the seed. The
/// scheduler prefers the CPU that became idle last for a new thread (`find_idlest_group_cpu()`), so
/// the vCPUs run on other CPUs and in another order, and the ticks occur at other times.
#[derive(Debug, Clone)]
pub struct Walk {
    generator: SplitMix64,
    remaining: Vec<usize>,
}

impl Walk {
    /// Returns the walk of a seed.
    pub fn new(seed: u64, cpus: &[usize]) -> Self {
        Self { generator: SplitMix64::seed_from_u64(seed), remaining: cpus.to_vec() }
    }
}

/// A CPU and the number of turns to spin there, below 2^18.
impl Iterator for Walk {
    type Item = (usize, u64);

    fn next(&mut self) -> Option<Self::Item> {
        let choices = self.remaining.len() as u64;
        if choices == 0 {
            return None;
        }
        let chosen = usize::try_from(self.generator.next_u64() % choices).unwrap_or(0);
        let turns = self.generator.next_u64() >> (64 - 18);
        Some((self.remaining.swap_remove(chosen), turns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_survives_serialization() {
        let job = Job {
            argv: vec!["/init".to_owned(), "bench".to_owned()],
            pools: [(2 << 20, 34)].into(),
            settings: [("/sys/x".to_owned(), "0".to_owned())].into(),
            seed: 5,
            foreign: true,
            expect: vec![Exchange::new("login: ", "root")],
            deadline_seconds: 60,
        };

        let text = serde_json::to_string(&job).unwrap();

        assert_eq!(serde_json::from_str::<Job>(&text).unwrap(), job);
    }

    #[test]
    fn a_walk_visits_every_cpu_once_in_an_order_that_the_seed_determines() {
        let all: Vec<usize> = (0..32).step_by(2).collect();
        let order = |seed| -> Vec<usize> { Walk::new(seed, &all).map(|(cpu, _)| cpu).collect() };
        let orders: std::collections::BTreeSet<_> = (1..32).map(order).collect();

        let mut cpus = order(7);
        cpus.sort_unstable();

        assert_eq!(cpus, all);
        assert_eq!(order(7), order(7));
        assert_eq!(orders.len(), 31);
        let first = Walk::new(7, &[0, 2, 4, 6]).collect::<Vec<_>>();
        assert_eq!(
            first,
            [(6, 4400), (0, 152_811), (4, 65_386), (2, 86_003)],
            "recorded results depend on this sequence"
        );
        assert!(Walk::new(7, &all).all(|(_, turns)| turns < 1 << 18));
    }
}
