// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The destination of a migration: a copy of the region, and its comparison with the source.

use super::error::{HarnessError, host_error};
use crate::{
    machine::{MigrationOps, Region},
    task::{RandomWalk, Task},
};
use granule_types::units::GuestAddress;

/// Memory of the destination.
pub(super) struct MigrationDestination {
    region: Region,
    bytes: Vec<u8>,
    /// For each page the last round whose dirty bitmap contained it; 0 for none.
    logged_in: Vec<u32>,
    /// Buffer of one page.
    scratch: Vec<u8>,
}

impl MigrationDestination {
    /// Allocates and populates memory for a region, so that copying takes no page faults.
    pub(super) fn new(region: Region) -> Self {
        Self {
            region,
            bytes: vec![0xa5; index(region.size.0)],
            logged_in: vec![0; index(region.size.0 / region.host_page.0)],
            scratch: vec![0; index(region.host_page.0)],
        }
    }

    /// Returns a bitmap of all pages.
    pub(super) fn all_pages(&self) -> Vec<u64> {
        vec![u64::MAX; self.logged_in.len().div_ceil(64)]
    }

    /// Notes the pages of a round's dirty bitmap and returns their number.
    pub(super) fn note(&mut self, log: &[u64], round: u32) -> u64 {
        let mut count = 0;
        for page in pages_in(log, self.logged_in.len()) {
            self.logged_in[page] = round;
            count += 1;
        }
        count
    }

    /// Copies the pages of a bitmap from the source.
    pub(super) fn copy_pages(
        &mut self,
        source: &dyn MigrationOps,
        log: &[u64],
    ) -> Result<(), HarnessError> {
        let size = self.scratch.len();
        for page in pages_in(log, self.logged_in.len()) {
            let at = page * size;
            let address = GuestAddress(self.region.start.0 + at as u64);
            read(source, address, &mut self.bytes[at..at + size])?;
        }
        Ok(())
    }

    /// Checks that source and destination are equal and hold what the vCPUs wrote. `tasks` are the
    /// vCPUs' tasks; `writes` are each vCPU's writes at the end of every round and of the stop.
    pub(super) fn check(
        mut self,
        source: &dyn MigrationOps,
        tasks: &[Task],
        writes: &[Vec<u64>],
    ) -> Result<(), HarnessError> {
        self.check_equal(source, writes)?;
        let none = Vec::new();
        for (vcpu, task) in tasks.iter().enumerate() {
            let count = writes.last().unwrap_or(&none).get(vcpu).copied();
            self.check_writes(task, count.unwrap_or(0))?;
        }
        Ok(())
    }

    fn check_equal(
        &mut self,
        source: &dyn MigrationOps,
        writes: &[Vec<u64>],
    ) -> Result<(), HarnessError> {
        let mut pages = 0;
        let mut first = None;
        let size = self.scratch.len();
        for (page, copied) in self.bytes.chunks_exact(size).enumerate() {
            let start = GuestAddress(self.region.start.0 + (page * size) as u64);
            read(source, start, &mut self.scratch)?;
            if self.scratch == copied {
                continue;
            }
            pages += 1;
            let words = copied.chunks_exact(8).zip(self.scratch.chunks_exact(8));
            let differs = |(copied, source)| copied != source;
            let word = words.clone().position(differs).unwrap_or(0);
            first.get_or_insert((page, word, value(copied, word), value(&self.scratch, word)));
        }
        let Some((page, word, copied, source)) = first else {
            return Ok(());
        };
        // Each vCPU writes its own word of a page, and stores the number of its write there.
        let before = |ends: &&Vec<u64>| ends.get(word).is_some_and(|&end| end < source);
        let round = writes.iter().take_while(before).count() + 1;
        Err(HarnessError::LostWrite {
            pages,
            address: GuestAddress(self.region.start.0 + (page * size + word * 8) as u64),
            source_holds: source,
            copied,
            round: u32::try_from(round).unwrap_or(u32::MAX),
            logged_in: self.logged_in[page],
        })
    }

    /// Returns the number of pages that dirty bitmaps contained although no vCPU wrote them;
    /// `writes` are each vCPU's writes at the end.
    pub(super) fn unwritten_pages_logged(&self, tasks: &[Task], writes: &[u64]) -> u64 {
        let mut unwritten: Vec<_> = self.logged_in.iter().map(|&round| round != 0).collect();
        for (task, &count) in tasks.iter().zip(writes) {
            for page in RandomWalk::new(task.seed, task.count).take(index(count)) {
                unwritten[index(page)] = false;
            }
        }
        unwritten.into_iter().filter(|&page| page).count() as u64
    }

    /// Checks that the last write of a vCPU to each page is present.
    fn check_writes(&self, task: &Task, writes: u64) -> Result<(), HarnessError> {
        let mut last = vec![0; self.logged_in.len()];
        for (write, page) in (1..=writes).zip(RandomWalk::new(task.seed, task.count)) {
            last[index(page)] = write;
        }
        let word = index((task.start.0 - self.region.start.0) / 8);
        let pages = self.bytes.chunks_exact(self.scratch.len());
        for (page, (bytes, expected)) in pages.zip(last).enumerate() {
            let found = value(bytes, word);
            if expected != 0 && found != expected {
                return Err(HarnessError::Contents {
                    address: GuestAddress(task.start.0 + page as u64 * task.stride.0),
                    expected,
                    found,
                });
            }
        }
        Ok(())
    }
}

fn read(
    source: &dyn MigrationOps,
    address: GuestAddress,
    into: &mut [u8],
) -> Result<(), HarnessError> {
    let done = source.read(address, into);
    done.map_err(host_error("reading the region"))
}

/// Returns a word of a page.
fn value(page: &[u8], word: usize) -> u64 {
    let bytes = page.chunks_exact(8).nth(word);
    let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
    u64::from_le_bytes(bytes.unwrap_or_default())
}

/// Returns the pages of a bitmap that are below `pages`.
fn pages_in(log: &[u64], pages: usize) -> impl Iterator<Item = usize> {
    let words = log.iter().enumerate();
    words
        .flat_map(|(at, &word)| {
            let rest = |left: &u64| Some(left & left.wrapping_sub(1));
            let left = std::iter::successors(Some(word), rest).take_while(|&left| left != 0);
            left.map(move |left| at * 64 + left.trailing_zeros() as usize)
        })
        .take_while(move |&page| page < pages)
}

fn index(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
