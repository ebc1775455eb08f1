// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Load of PID 1 on the page cache, whose accesses go through the linear map: a file in memory is
//! written, read in order and at random, and many small files are created and removed.

use std::{
    fs::{self, File},
    io::{self, Read as _, Write as _},
    os::unix::fs::FileExt as _,
    path::Path,
};

use granule_types::mark;
use rand_xoshiro::{
    SplitMix64,
    rand_core::{Rng as _, SeedableRng as _},
};

/// Names of the steps, in the order of their marks.
pub const STEPS: [&str; 4] = ["write", "sequential read", "random read", "metadata"];

const FILE_SIZE: u64 = 64 << 20;
const CHUNK: usize = 64 << 10;
const PAGE: usize = 4096;
const RANDOM_READS: u64 = 16384;
const SMALL_FILES: u32 = 1024;
const SEED: u64 = 1;

/// Runs the load in a directory in memory, each step behind its mark.
///
/// # Errors
/// A file cannot be written or read.
pub fn run(directory: &Path) -> io::Result<()> {
    let path = directory.join("page-cache");
    let mut buffer = vec![0x5a; CHUNK];
    mark::begin_step(1);
    let mut file = File::create(&path)?;
    for _ in 0..FILE_SIZE / CHUNK as u64 {
        file.write_all(&buffer)?;
    }
    mark::begin_step(2);
    let mut file = File::open(&path)?;
    while file.read(&mut buffer)? > 0 {}
    mark::begin_step(3);
    let mut generator = SplitMix64::seed_from_u64(SEED);
    let page = &mut buffer[..PAGE];
    for _ in 0..RANDOM_READS {
        let number = generator.next_u64() % (FILE_SIZE / PAGE as u64);
        file.read_exact_at(page, number * PAGE as u64)?;
    }
    mark::begin_step(4);
    let small = |number: u32| directory.join(format!("small-{number}"));
    for number in 0..SMALL_FILES {
        fs::write(small(number), b"granule")?;
    }
    for number in 0..SMALL_FILES {
        fs::metadata(small(number))?;
        fs::remove_file(small(number))?;
    }
    mark::end_phase();
    fs::remove_file(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_leaves_no_file() {
        let directory = tempfile::tempdir().unwrap();

        run(directory.path()).unwrap();

        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
