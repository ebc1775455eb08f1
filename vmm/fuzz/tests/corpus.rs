// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs each target on its stored corpus, and for two seconds on mutations of it from a fixed seed.

use std::{
    fs::File,
    io::Read as _,
    path::Path,
    time::{Duration, Instant},
};

use flate2::read::GzDecoder;
use granule_fuzz::{FuzzTarget, TARGETS};
use rand_core::{Rng as _, SeedableRng as _};
use rand_xoshiro::Xoshiro256StarStar;

const MAX_CORPUS_SIZE: usize = 128 << 10;

/// Returns the inputs in the archive of a target.
fn read_corpus(target: &FuzzTarget) -> Vec<Vec<u8>> {
    let name = format!("corpus/{}.tar.gz", target.name);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    let file = File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut archive = tar::Archive::new(GzDecoder::new(file));
    let entries = archive.entries().expect("an archive");
    let read = |mut entry: tar::Entry<'_, _>| {
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).map(|_| bytes)
    };
    entries.map(|entry| entry.and_then(read).expect("a whole entry")).collect()
}

/// Generator of mutations, whose sequence depends only on the seed.
struct Mutator(Xoshiro256StarStar);

impl Mutator {
    fn random_below(&mut self, limit: usize) -> usize {
        usize::try_from(self.0.next_u64() % limit.max(1) as u64).unwrap_or(0)
    }

    fn random_byte(&mut self) -> u8 {
        u8::try_from(self.random_below(256)).unwrap_or(0)
    }

    fn mutate(&mut self, inputs: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = inputs[self.random_below(inputs.len())].clone();
        for _ in 0..=self.random_below(4) {
            let offset = self.random_below(bytes.len() + 1);
            match self.random_below(6) {
                0 => bytes.insert(offset, self.random_byte()),
                1 if offset < bytes.len() => {
                    bytes.remove(offset);
                }
                2 => bytes.truncate(offset),
                3 => {
                    let other = &inputs[self.random_below(inputs.len())];
                    let start = self.random_below(other.len() + 1);
                    bytes.truncate(offset);
                    bytes.extend(&other[start..]);
                }
                _ if offset < bytes.len() => bytes[offset] ^= 1 << self.random_below(8),
                _ => bytes.push(self.random_byte()),
            }
        }
        bytes
    }
}

#[test]
fn targets_accept_their_corpus_and_its_mutations() {
    for target in TARGETS {
        let inputs = read_corpus(target);
        let size: usize = inputs.iter().map(Vec::len).sum();
        assert!((1..=MAX_CORPUS_SIZE).contains(&size), "{}: {size} bytes", target.name);
        inputs.iter().for_each(|input| (target.run)(input));
        let mut mutator = Mutator(Xoshiro256StarStar::seed_from_u64(1));
        let (start, mut runs) = (Instant::now(), 0u64);
        while start.elapsed() < Duration::from_secs(2) {
            (target.run)(&mutator.mutate(&inputs));
            runs += 1;
        }
        assert!(runs > 0, "{}: no mutation was run", target.name);
        println!("{}: {} inputs and {runs} mutations", target.name, inputs.len());
    }
}
