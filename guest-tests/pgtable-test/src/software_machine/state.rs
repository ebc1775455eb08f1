// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! State shared by the vCPUs and the host's thread.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use granule_stage2::{
    Access, Ipa, PhysAddr,
    epoch::EpochReclaim,
    fault::{Host, Mmu, Page},
    pool::TablePool,
};

use super::{
    arch::CacheMaintenance,
    config::{PAGE, START},
    counters::{Count, NAMES},
    host_memory::HostMemory,
};
use granule_types::record::EventCounts;

/// State of the machine.
#[derive(Debug)]
pub(super) struct MachineState {
    pub(super) memory: HostMemory,
    pub(super) cache: CacheMaintenance,
    pub(super) pool: TablePool<Box<[AtomicU64]>>,
    pub(super) reclaim: EpochReclaim,
    pub(super) mmu: Mmu<parking_lot::RawRwLock>,
    /// Size of the region.
    pub(super) size: u64,
    pub(super) backing_page: u64,
    pub(super) logging: AtomicBool,
    /// Dirty bitmap: one bit for each page.
    pub(super) dirty: Box<[AtomicU64]>,
    pub(super) sequence: AtomicU64,
    /// Number of freed tables: a walk during which it changes may have read a reused table.
    pub(super) frees: AtomicU64,
    pub(super) counts: [AtomicU64; NAMES.len()],
}

impl MachineState {
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

    /// Returns the offset of a host address in the memory.
    pub(super) fn offset(&self, phys: u64) -> usize {
        usize::try_from(phys.wrapping_sub(self.memory.address())).unwrap_or(usize::MAX)
    }
}

impl Host for MachineState {
    fn page(&self, ipa: Ipa, _: Access) -> Option<Page> {
        let offset = ipa.0.checked_sub(START).filter(|at| *at < self.size)?;
        let base = offset & !(self.backing_page - 1);
        Some(Page {
            ipa: Ipa(START + base),
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
        let first = (ipa - Ipa(START)) / PAGE;
        for page in first..first + size / PAGE {
            if let Some(word) = usize::try_from(page / 64)
                .ok()
                .and_then(|at| self.dirty.get(at))
            {
                word.fetch_or(1 << (page % 64), Ordering::Relaxed);
            }
        }
    }
}
