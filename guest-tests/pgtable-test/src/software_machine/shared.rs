// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What vCPUs, the host's side and the machine share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use granule_stage2::{
    Access, Ipa, PhysAddr,
    epoch::EpochReclaim,
    fault::{Host, Mmu, Page},
    pool::TablePool,
};

use super::memory::Memory;
use crate::arch::cache::Cleaner;
use granule_types::record::EventCounts;

/// What is counted, by the name in results.
#[derive(Debug, Clone, Copy)]
pub(super) enum Count {
    Faults,
    Retries,
    CleanedLines,
    InvalidatedLines,
    InvalidatedAll,
    TlbiAddress,
    TlbiAll,
    Tables,
    TopUps,
}

pub(super) const NAMES: [&str; 9] = [
    "model_faults",
    "model_retries",
    "model_dc_lines",
    "model_ic_lines",
    "model_ic_all",
    "model_tlbi_ipa",
    "model_tlbi_all",
    "model_tables",
    "model_topups",
];

/// The machine's state.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) memory: Memory,
    pub(super) cleaner: Cleaner,
    pub(super) pool: TablePool<Box<[AtomicU64]>>,
    pub(super) reclaim: EpochReclaim,
    pub(super) mmu: Mmu<parking_lot::RawRwLock>,
    /// Guest address of the region.
    pub(super) start: u64,
    pub(super) size: u64,
    pub(super) backing_page: u64,
    pub(super) logging: AtomicBool,
    /// A bit a page.
    pub(super) dirty: Box<[AtomicU64]>,
    pub(super) sequence: AtomicU64,
    /// Tables that were freed: a walk that saw this change may have read another table.
    pub(super) frees: AtomicU64,
    pub(super) counts: [AtomicU64; NAMES.len()],
}

impl Shared {
    pub(super) fn count(&self, what: Count, by: u64) {
        self.counts[what as usize].fetch_add(by, Ordering::Relaxed);
    }

    pub(super) fn events(&self) -> EventCounts {
        NAMES
            .iter()
            .zip(&self.counts)
            .map(|(name, count)| ((*name).to_owned(), count.load(Ordering::Relaxed)))
            .collect()
    }

    /// A host address as an offset into the memory.
    pub(super) fn offset(&self, phys: u64) -> usize {
        usize::try_from(phys.wrapping_sub(self.memory.address())).unwrap_or(usize::MAX)
    }
}

impl Host for Shared {
    fn page(&self, ipa: Ipa, _: Access) -> Option<Page> {
        let offset = ipa.0.checked_sub(self.start).filter(|at| *at < self.size)?;
        let base = offset & !(self.backing_page - 1);
        Some(Page {
            ipa: Ipa(self.start + base),
            phys: PhysAddr(self.memory.address() + base),
            size: self.backing_page,
            writable: true,
        })
    }

    fn logging(&self, _: Ipa) -> bool {
        self.logging.load(Ordering::Acquire)
    }

    fn sequence(&self) -> u64 {
        self.sequence.load(Ordering::Acquire)
    }

    fn mark_dirty(&self, ipa: Ipa, size: u64) {
        if !self.logging.load(Ordering::Acquire) {
            return;
        }
        let first = (ipa - Ipa(self.start)) / 4096;
        for page in first..first + size / 4096 {
            if let Some(word) = usize::try_from(page / 64)
                .ok()
                .and_then(|at| self.dirty.get(at))
            {
                word.fetch_or(1 << (page % 64), Ordering::Relaxed);
            }
        }
    }
}
