// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The job of one boot and its result: files and frames between the lab and PID 1.
//!
//! The serial console is the one channel of every kernel and every emulator, and the kernel's
//! messages share it. PID 1 sends its files at the end, in frames that detect a lost or inserted
//! byte:
//!
//! ```text
//! @@granule begin results 1234 <SHA-256 in hexadecimal>
//! … 1234 bytes …
//! @@granule end results
//! ```
//!
//! The terminal inserts a carriage return before each line feed; the receiver drops all carriage
//! returns and the sender sends none. PID 1 lowers the console log level while it sends; a message
//! that appears nevertheless breaks the checksum.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use granule_types::units::Nanoseconds;
use rand_xoshiro::{
    SplitMix64,
    rand_core::{Rng as _, SeedableRng as _},
};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{host::expect::Exchange, shell::sha256};

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
        required: u64,
        available: u64,
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

const BEGIN: &str = "@@granule begin ";
const END: &str = "@@granule end ";

/// Payloads of the frames, by name.
pub type Frames = BTreeMap<String, Vec<u8>>;

/// Error returned when a console log has a damaged frame.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FrameError {
    #[error("malformed frame header '{0}': run again; if it recurs, see the console")]
    Header(String),
    #[error("the console log ends in frame '{name}', {missing} bytes early: the host crashed")]
    Truncated { name: String, missing: usize },
    #[error("frame '{0}' is damaged: a kernel message interrupted it, see the console")]
    Damaged(String),
}

/// Sends one frame of text, without carriage returns.
pub fn send(to: &mut impl Write, name: &str, payload: &[u8]) -> io::Result<()> {
    let payload = String::from_utf8_lossy(payload).replace('\r', "");
    let (length, sum) = (payload.len(), sha256(payload.as_bytes()));
    write!(to, "\n{BEGIN}{name} {length} {sum}\n{payload}\n{END}{name}\n")?;
    to.flush()
}

/// Returns all frames of a console log.
pub fn receive(console: &[u8]) -> Result<Frames, FrameError> {
    let text: Vec<u8> = console.iter().copied().filter(|b| *b != b'\r').collect();
    let mut frames = Frames::new();
    let mut rest = text.as_slice();
    while let Some(at) = find_line(rest, BEGIN.as_bytes()) {
        let line_end = rest[at..].iter().position(|b| *b == b'\n').map_or(rest.len(), |n| at + n);
        let header = String::from_utf8_lossy(&rest[at + BEGIN.len()..line_end]).into_owned();
        let malformed = || FrameError::Header(header.clone());
        let mut words = header.split(' ');
        let (Some(name), Some(length), Some(sum), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(malformed());
        };
        let length: usize = length.parse().map_err(|_| malformed())?;
        let body = rest.get(line_end + 1..).unwrap_or_default();
        let Some(payload) = body.get(..length) else {
            return Err(FrameError::Truncated {
                name: name.to_owned(),
                missing: length - body.len(),
            });
        };
        let tail = format!("\n{END}{name}\n");
        if sha256(payload) != sum || !body[length..].starts_with(tail.as_bytes()) {
            return Err(FrameError::Damaged(name.to_owned()));
        }
        frames.insert(name.to_owned(), payload.to_vec());
        rest = &body[length..];
    }
    Ok(frames)
}

/// Returns the offset of the first line that starts with `prefix`.
fn find_line(text: &[u8], prefix: &[u8]) -> Option<usize> {
    (0..text.len())
        .filter(|at| *at == 0 || text[at - 1] == b'\n')
        .find(|at| text[*at..].starts_with(prefix))
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

    fn console(frames: &[(&str, &str)]) -> Vec<u8> {
        let mut sent = b"[    0.0] Booting Linux\r\n".to_vec();
        for (name, payload) in frames {
            send(&mut sent, name, payload.as_bytes()).unwrap();
        }
        String::from_utf8(sent).unwrap().replace('\n', "\r\n").into_bytes()
    }

    #[test]
    fn frames_are_received_as_sent() {
        let console = console(&[("results", "{}\n{}\n"), ("stdout", ""), ("x", "no newline")]);

        let frames = receive(&console).unwrap();

        assert_eq!(frames["results"], b"{}\n{}\n");
        assert_eq!(frames["stdout"], b"");
        assert_eq!(frames["x"], b"no newline");
    }

    #[test]
    fn a_payload_may_look_like_a_frame() {
        let console = console(&[("stdout", "@@granule begin results 3 abc\nfoo\n")]);

        assert_eq!(receive(&console).unwrap().len(), 1);
    }

    #[test]
    fn a_truncated_console_log_is_an_error() {
        let whole = console(&[("results", "{\"a\":1}\n{\"b\":2}\n")]);
        let begins = whole.windows(8).position(|w| w == b"@@granul").unwrap() + BEGIN.len();

        for cut in begins..whole.len() - 2 {
            assert!(receive(&whole[..cut]).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn a_kernel_message_inside_a_frame_is_an_error() {
        let text = String::from_utf8(console(&[("results", "{\"a\":1}\n{\"b\":2}\n")])).unwrap();
        let broken = text.replace("{\"b\"", "[    1.0] BUG: x\r\n{\"b\"");

        assert_eq!(receive(broken.as_bytes()), Err(FrameError::Damaged("results".to_owned())));
    }

    #[test]
    fn a_console_log_without_frames_is_empty() {
        assert_eq!(receive(b"Kernel panic - not syncing\r\n"), Ok(Frames::new()));
    }
}
