// SPDX-License-Identifier: GPL-2.0-or-later
//! The state of each 4K page of physical memory.
//!
//! A store of the machine costs one look-up here; only the first store to a page, and stores to
//! tables and watched words, are processed further. A page takes one word of eight bytes:
//!
//! ```text
//! 63                    16 15          8 7       0
//! | DSBs of the writer    | writer + 1  | flags  |
//! ```

use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering},
};

use granule_stage2::PhysAddr;

/// Size of the pages whose state is kept.
pub const PAGE_SIZE: u64 = 4096;

/// Pages of a chunk: 1 GiB.
const CHUNK_PAGES: u64 = 1 << 18;
/// Chunks: 1 TiB.
const CHUNKS: usize = 1 << 10;

/// Property of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum PageFlag {
    /// The page is part of a stage-2 table.
    Table = 1,
    /// The page has a watched word.
    Watched = 2,
    /// The host has written the page since the last data cache operation on it.
    Written = 4,
}

const FLAGS: u64 = 0xff;
const WRITER_SHIFT: u32 = 8;
const EPOCH_SHIFT: u32 = 16;

/// A CPU that stores, and the number of its barriers that have completed stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Writer {
    /// The CPU.
    pub cpu: u8,
    /// Number of its barriers.
    pub epoch: u64,
}

impl Writer {
    const fn bits(self) -> u64 {
        (self.cpu as u64 + 1) << WRITER_SHIFT | self.epoch << EPOCH_SHIFT
    }
}

/// The state of all pages. Memory for it is allocated with the first access to a chunk.
#[derive(Debug)]
pub struct Pages(Box<[OnceLock<Box<[AtomicU64]>>]>);

impl Default for Pages {
    fn default() -> Self {
        Self((0..CHUNKS).map(|_| OnceLock::new()).collect())
    }
}

impl Pages {
    fn state(&self, phys: PhysAddr) -> Option<&AtomicU64> {
        let page = phys.0 / PAGE_SIZE;
        let chunk = self.0.get(usize::try_from(page / CHUNK_PAGES).ok()?)?;
        let chunk = chunk.get_or_init(|| (0..CHUNK_PAGES).map(|_| AtomicU64::new(0)).collect());
        chunk.get(usize::try_from(page % CHUNK_PAGES).ok()?)
    }

    /// Records a store; returns whether it needs an event.
    #[inline]
    pub fn record_store(&self, phys: PhysAddr, writer: Writer) -> bool {
        let Some(state) = self.state(phys) else { return false };
        let before = state.load(Ordering::Relaxed);
        let after = before & FLAGS | writer.bits();
        if before != after {
            state.store(after, Ordering::Relaxed);
        }
        let needs_event = PageFlag::Table as u64 | PageFlag::Watched as u64;
        before & needs_event != 0 || before & PageFlag::Written as u64 == 0
    }

    /// Returns whether the page has a flag.
    pub fn has(&self, phys: PhysAddr, flag: PageFlag) -> bool {
        self.state(phys).is_some_and(|state| state.load(Ordering::Relaxed) & flag as u64 != 0)
    }

    /// Sets or clears a flag of a page; returns its previous value.
    pub fn set(&self, phys: PhysAddr, flag: PageFlag, value: bool) -> bool {
        let Some(state) = self.state(phys) else { return false };
        let before = if value {
            state.fetch_or(flag as u64, Ordering::Relaxed)
        } else {
            state.fetch_and(!(flag as u64), Ordering::Relaxed)
        };
        before & flag as u64 != 0
    }

    /// Returns the CPU that stored to the page last, if it has executed no barrier since; `epoch`
    /// returns the number of barriers of a CPU.
    pub fn unordered_writer(&self, phys: PhysAddr, epoch: impl Fn(u8) -> u64) -> Option<u8> {
        let state = self.state(phys)?.load(Ordering::Relaxed);
        let cpu = u8::try_from((state >> WRITER_SHIFT) & 0xff).ok()?.checked_sub(1)?;
        let current = Writer { cpu, epoch: epoch(cpu) };
        (state & !FLAGS == current.bits()).then_some(cpu)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: PhysAddr = PhysAddr(0x1_2345_6000);

    #[test]
    fn the_first_store_to_a_page_and_stores_to_flagged_pages_need_an_event() {
        let pages = Pages::default();
        let writer = Writer { cpu: 3, epoch: 9 };

        assert!(pages.record_store(PAGE, writer));
        assert!(!pages.set(PAGE + 8, PageFlag::Written, true));
        assert!(!pages.record_store(PAGE + 4095, writer));
        assert!(pages.record_store(PAGE + 4096, writer), "another page");
        for flag in [PageFlag::Table, PageFlag::Watched] {
            pages.set(PAGE, flag, true);
            assert!(pages.record_store(PAGE, writer) && pages.has(PAGE, flag));
            assert!(pages.set(PAGE, flag, false));
        }
        assert!(pages.set(PAGE, PageFlag::Written, false));
        assert!(pages.record_store(PAGE, writer));
    }

    #[test]
    fn a_writer_is_unordered_until_its_own_barrier() {
        let pages = Pages::default();
        let unordered =
            |epochs: [u64; 2]| pages.unordered_writer(PAGE, |cpu| epochs[usize::from(cpu)]);
        assert_eq!(unordered([0, 0]), None);

        pages.record_store(PAGE, Writer { cpu: 0, epoch: 0 });
        pages.record_store(PAGE, Writer { cpu: 1, epoch: 7 });

        assert_eq!(unordered([0, 7]), Some(1));
        assert_eq!(unordered([5, 7]), Some(1), "the barrier of another CPU");
        assert_eq!(unordered([5, 8]), None);
    }

    #[test]
    fn addresses_beyond_the_map_are_no_memory() {
        let pages = Pages::default();

        assert!(!pages.record_store(PhysAddr(1 << 41), Writer { cpu: 0, epoch: 0 }));
    }
}
