// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where a migration's pages are copied to, and what must hold there in the end.

use super::{error::HarnessError, host_error};
use crate::{
    guest::random_walk::RandomWalk as Places,
    machine::{Live, Region, Task},
};
use granule_types::units::GuestAddress;

/// The other side's memory.
pub(super) struct Destination {
    region: Region,
    bytes: Vec<u8>,
    /// For each page the round whose log named it last; 0 where none did.
    logged_in: Vec<u32>,
    /// One page.
    scratch: Vec<u8>,
}

impl Destination {
    /// Memory for a region, every page of it there already: copying takes no faults of the host's.
    pub(super) fn new(region: Region) -> Self {
        Self {
            region,
            bytes: vec![0xa5; index(region.size.0)],
            logged_in: vec![0; index(region.size.0 / region.host_page.0)],
            scratch: vec![0; index(region.host_page.0)],
        }
    }

    /// A log that names every page.
    pub(super) fn everything(&self) -> Vec<u64> {
        vec![u64::MAX; self.logged_in.len().div_ceil(64)]
    }

    /// Takes note of which pages a round's log names, and gives how many.
    pub(super) fn note(&mut self, log: &[u64], round: u32) -> u64 {
        let mut count = 0;
        for page in named(log, self.logged_in.len()) {
            self.logged_in[page] = round;
            count += 1;
        }
        count
    }

    /// Copies the pages that a log names.
    pub(super) fn pages(&mut self, source: &dyn Live, log: &[u64]) -> Result<(), HarnessError> {
        let size = self.scratch.len();
        for page in named(log, self.logged_in.len()) {
            let at = page * size;
            let address = GuestAddress(self.region.start.0 + at as u64);
            read(source, address, &mut self.bytes[at..at + size])?;
        }
        Ok(())
    }

    /// Both sides are equal, and hold what the vCPUs wrote: `tasks` are theirs, `writes` how often
    /// each had written at the end of every round and of the stop.
    pub(super) fn check(
        mut self,
        source: &dyn Live,
        tasks: &[Task],
        writes: &[Vec<u64>],
    ) -> Result<(), HarnessError> {
        self.is_equal(source, writes)?;
        let none = Vec::new();
        for (vcpu, task) in tasks.iter().enumerate() {
            let count = writes.last().unwrap_or(&none).get(vcpu).copied();
            self.holds(task, count.unwrap_or(0))?;
        }
        Ok(())
    }

    fn is_equal(&mut self, source: &dyn Live, writes: &[Vec<u64>]) -> Result<(), HarnessError> {
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
        // The word is its vCPU's own, and what it holds is the number of that vCPU's write.
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

    /// How many pages logs named that no vCPU wrote, of `writes` writes each in the end.
    pub(super) fn named_in_vain(&self, tasks: &[Task], writes: &[u64]) -> u64 {
        let mut in_vain: Vec<_> = self.logged_in.iter().map(|&round| round != 0).collect();
        for (task, &count) in tasks.iter().zip(writes) {
            for place in Places::new(task.seed, task.count).take(index(count)) {
                in_vain[index(place)] = false;
            }
        }
        in_vain.into_iter().filter(|&page| page).count() as u64
    }

    /// The last write of a vCPU to every page is there.
    fn holds(&self, task: &Task, writes: u64) -> Result<(), HarnessError> {
        let mut last = vec![0; self.logged_in.len()];
        for (write, place) in (1..=writes).zip(Places::new(task.seed, task.count)) {
            last[index(place)] = write;
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

fn read(source: &dyn Live, address: GuestAddress, into: &mut [u8]) -> Result<(), HarnessError> {
    let done = source.read(address, into);
    done.map_err(host_error("reading the region"))
}

/// A word of a page.
fn value(page: &[u8], word: usize) -> u64 {
    let bytes = page.chunks_exact(8).nth(word);
    let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
    u64::from_le_bytes(bytes.unwrap_or_default())
}

/// The pages that a log names, of those there are.
fn named(log: &[u64], pages: usize) -> impl Iterator<Item = usize> {
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
