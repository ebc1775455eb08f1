// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! State that the vCPUs and the host's thread share, and host memory for the engine's fault path.
//!
//! A table that shared walkers of the engine may use waits in `reclaim` until their walks end. A
//! vCPU walks like hardware, without a lock, while any table may be freed and reused. So every free
//! increments `freed_table_count`, and a vCPU repeats a walk during which it changed.

use std::{
    fmt,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use granule_stage2::{
    Access, Ipa,
    epoch::EpochReclaim,
    fault::{HostMemory, HostPage, Mmu},
    pool::TablePool,
};
use parking_lot::RawRwLock;

use super::{PAGE_SIZE, REGION_START, memory::TestMemory, to_usize};
use granule_types::record::EventCounts;

/// Event that the machine counts.
#[derive(Debug, Clone, Copy)]
pub enum CountedEvent {
    Faults,
    Retries,
    DataCacheLines,
    InstructionCacheLines,
    InstructionCacheAll,
    TlbiAddress,
    TlbiAll,
    TableAllocations,
    MemcacheTopUps,
}

/// Names of the counts in results, in the order of [`CountedEvent`].
const COUNT_NAMES: [&str; 9] = [
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

pub struct MachineState {
    pub memory: TestMemory,
    pub pool: TablePool<Box<[AtomicU64]>>,
    pub reclaim: EpochReclaim,
    pub mmu: Mmu<RawRwLock>,
    pub backing_page_size: u64,
    pub is_logging: AtomicBool,
    /// Dirty bitmap: one bit for each page.
    pub dirty_bitmap: Box<[AtomicU64]>,
    /// Number of invalidations of host pages, as KVM's `mmu_invalidate_seq`.
    pub invalidation_sequence: AtomicU64,
    pub freed_table_count: AtomicU64,
    pub counts: [AtomicU64; COUNT_NAMES.len()],
}

impl MachineState {
    pub fn count(&self, event: CountedEvent, n: u64) {
        self.counts[event as usize].fetch_add(n, Ordering::Relaxed);
    }

    pub fn events(&self) -> EventCounts {
        let counts = COUNT_NAMES.iter().zip(&self.counts);
        counts.map(|(name, count)| ((*name).to_owned(), count.load(Ordering::Relaxed))).collect()
    }
}

impl fmt::Debug for MachineState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MachineState").field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl HostMemory for MachineState {
    fn look_up_page(&self, ipa: Ipa, _: Access) -> Option<HostPage> {
        let offset = ipa.0.checked_sub(REGION_START).filter(|at| *at < self.memory.size())?;
        let base = offset & !(self.backing_page_size - 1);
        Some(HostPage {
            ipa: Ipa(REGION_START + base),
            phys: TestMemory::output_address(base),
            size: self.backing_page_size,
            is_writable: true,
        })
    }

    fn is_logging(&self, _: Ipa) -> bool {
        self.is_logging.load(Ordering::Acquire)
    }

    fn invalidation_sequence(&self) -> u64 {
        self.invalidation_sequence.load(Ordering::Acquire)
    }

    fn mark_dirty(&self, ipa: Ipa, size: u64) {
        if !self.is_logging(ipa) {
            return;
        }
        let first = (ipa - Ipa(REGION_START)) / PAGE_SIZE;
        for page in first..first + size / PAGE_SIZE {
            if let Some(word) = self.dirty_bitmap.get(to_usize(page / 64)) {
                word.fetch_or(1 << (page % 64), Ordering::Relaxed);
            }
        }
    }
}
