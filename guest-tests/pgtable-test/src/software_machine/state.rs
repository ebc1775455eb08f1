// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state that the vCPUs and the host's thread share, and the host's part of a fault.
//!
//! Engine and vCPUs handle freed tables differently. A table that shared walkers of the engine may
//! use waits in `reclaim` until they end. A vCPU walks as hardware does, without a lock, while any
//! table may be freed and reused: every free increments `frees`, and a vCPU repeats a walk during
//! which `frees` changed.

use std::{
    fmt,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use granule_stage2::{
    Access, Ipa,
    epoch::EpochReclaim,
    fault::{Host, Mmu, Page},
    pool::TablePool,
};
use parking_lot::RawRwLock;

use super::{PAGE, START, index, memory::TestMemory};
use granule_types::record::EventCounts;

/// A counted event.
#[derive(Debug, Clone, Copy)]
pub enum CountedEvent {
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

/// Names of the counts in results, in the order of [`CountedEvent`].
const NAMES: [&str; 9] = [
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

/// State of a machine.
pub struct MachineState {
    pub memory: TestMemory,
    pub pool: TablePool<Box<[AtomicU64]>>,
    pub reclaim: EpochReclaim,
    pub mmu: Mmu<RawRwLock>,
    /// Page size of the backing.
    pub backing_page: u64,
    pub logging: AtomicBool,
    /// Dirty bitmap: one bit for each page.
    pub dirty: Box<[AtomicU64]>,
    /// Number of invalidations of host pages, as `mmu_invalidate_seq`.
    pub sequence: AtomicU64,
    /// Number of freed tables: a walk during which it changes may have read a reused table.
    pub frees: AtomicU64,
    pub counts: [AtomicU64; NAMES.len()],
}

impl MachineState {
    pub fn count(&self, what: CountedEvent, by: u64) {
        self.counts[what as usize].fetch_add(by, Ordering::Relaxed);
    }

    pub fn events(&self) -> EventCounts {
        let counts = NAMES.iter().zip(&self.counts);
        counts.map(|(name, count)| ((*name).to_owned(), count.load(Ordering::Relaxed))).collect()
    }
}

impl fmt::Debug for MachineState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MachineState").field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl Host for MachineState {
    fn page(&self, ipa: Ipa, _: Access) -> Option<Page> {
        let offset = ipa.0.checked_sub(START).filter(|at| *at < self.memory.size())?;
        let base = offset & !(self.backing_page - 1);
        Some(Page {
            ipa: Ipa(START + base),
            phys: TestMemory::phys(base),
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
        if !self.logging(ipa) {
            return;
        }
        let first = (ipa - Ipa(START)) / PAGE;
        for page in first..first + size / PAGE {
            if let Some(word) = self.dirty.get(index(page / 64)) {
                word.fetch_or(1 << (page % 64), Ordering::Relaxed);
            }
        }
    }
}
