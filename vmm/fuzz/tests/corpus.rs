// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Every target on its stored corpus, and for a few seconds on changes of it that begin from a fixed
//! seed. `GRANULE_FUZZ_SECONDS` says how many for each target, `GRANULE_FUZZ_SEED` where they begin.

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use granule_fuzz::{TARGETS, Target};

/// More than this is no small corpus any more.
const LARGEST: u64 = 64 << 10;

fn folder(target: &Target) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(target.name)
}

fn corpus(target: &Target) -> Vec<Vec<u8>> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder(target))
        .unwrap_or_else(|error| panic!("{}: {error}", folder(target).display()))
        .map(|entry| entry.expect("a file").path())
        .collect();
    files.sort();
    let read = |path: &PathBuf| fs::read(path).expect("a file that can be read");
    files.iter().map(read).collect()
}

/// A number from the environment.
fn number(name: &str, otherwise: u64) -> u64 {
    env::var(name).map_or(otherwise, |text| text.parse().expect("a number"))
}

/// Marsaglia's xorshift: the order must be the same everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % limit.max(1) as u64).unwrap_or(0)
    }

    fn byte(&mut self) -> u8 {
        u8::try_from(self.below(256)).unwrap_or(0)
    }

    /// A changed copy of one of the inputs.
    fn change(&mut self, inputs: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = inputs[self.below(inputs.len())].clone();
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len() + 1);
            match self.below(6) {
                0 => bytes.insert(at, self.byte()),
                1 if at < bytes.len() => {
                    bytes.remove(at);
                }
                2 => bytes.truncate(at),
                3 => {
                    let other = &inputs[self.below(inputs.len())];
                    let from = self.below(other.len() + 1);
                    bytes.truncate(at);
                    bytes.extend(&other[from..]);
                }
                _ if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                _ => bytes.push(self.byte()),
            }
        }
        bytes
    }
}

#[test]
fn corpora_are_small() {
    for target in TARGETS {
        let bytes: usize = corpus(target).iter().map(Vec::len).sum();
        assert!(bytes > 0, "{} has no corpus", target.name);
        assert!(bytes as u64 <= LARGEST, "{}: {bytes} bytes", target.name);
    }
}

#[test]
fn nothing_that_was_found_and_no_change_of_it_does_harm() {
    let patience = Duration::from_secs(number("GRANULE_FUZZ_SECONDS", 2));
    for target in TARGETS {
        let inputs = corpus(target);
        inputs.iter().for_each(|input| (target.run)(input));
        let mut random = Random(number("GRANULE_FUZZ_SEED", 1));
        let (start, mut runs) = (Instant::now(), 0u64);
        while start.elapsed() < patience {
            (target.run)(&random.change(&inputs));
            runs += 1;
        }
        println!("{}: {} files and {runs} changes", target.name, inputs.len());
        assert!(runs > 0, "{}: no input was changed", target.name);
    }
}
