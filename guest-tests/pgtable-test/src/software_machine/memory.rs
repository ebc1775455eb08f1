// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The memory under test: anonymous memory of this process.
//!
//! Stage 2 maps the memory at [`OUTPUT_START`], independent of its address in this process. All
//! accesses and CMOs take output addresses of stage 2.

use std::{
    io,
    sync::atomic::{AtomicU64, Ordering},
};

use granule_stage2::PhysAddr;
use rustix::mm::{Advice, madvise};
use vm_memory::{MmapRegion, VolatileMemory, mmap::MmapRegionError};

use super::{PAGE_SIZE, cache::CacheMaintenance, to_usize};
use granule_types::units::HostVirtAddr;

/// Output address of the memory in stage 2, aligned to 1G.
const OUTPUT_START: u64 = 1 << 44;

/// The memory under test, and its cache maintenance.
#[derive(Debug)]
pub struct TestMemory {
    mapping: MmapRegion,
    pub cache: CacheMaintenance,
}

impl TestMemory {
    /// Maps and populates memory.
    pub fn new(size: u64) -> io::Result<Self> {
        let mapping = MmapRegion::new(to_usize(size)).map_err(|error| match error {
            MmapRegionError::Mmap(error) => error,
            other => io::Error::other(other),
        })?;
        let memory = Self { mapping, cache: CacheMaintenance::of_this_cpu() };
        memory.populate()?;
        Ok(memory)
    }

    pub fn size(&self) -> u64 {
        self.mapping.size() as u64
    }

    /// Returns the memory's address in this process.
    pub fn host_address(&self) -> HostVirtAddr {
        HostVirtAddr(self.mapping.as_ptr().addr() as u64)
    }

    /// Returns the stage-2 output address of an offset in the memory.
    pub const fn output_address(offset: u64) -> PhysAddr {
        PhysAddr(OUTPUT_START + offset)
    }

    fn madvise(&self, advice: Advice) -> io::Result<()> {
        let (start, size) = (self.mapping.as_ptr(), self.mapping.size());
        // SAFETY: only this value uses the mapping; the advice populates the mapping or discards
        // its contents.
        unsafe { madvise(start.cast(), size, advice) }.map_err(io::Error::from)
    }

    pub fn discard(&self) -> io::Result<()> {
        self.madvise(Advice::LinuxDontNeed)
    }

    pub fn populate(&self) -> io::Result<()> {
        match self.madvise(Advice::LinuxPopulateWrite) {
            // Linux supports the advice since 5.14.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                for page in 0..self.size() / PAGE_SIZE {
                    self.word(Self::output_address(page * PAGE_SIZE))
                        .fetch_or(0, Ordering::Relaxed);
                }
                Ok(())
            }
            result => result,
        }
    }

    /// Returns the word at an output address.
    ///
    /// # Panics
    /// The address is outside the memory, so a stage-2 entry is wrong.
    fn word(&self, phys: PhysAddr) -> &AtomicU64 {
        let word = self.mapping.get_atomic_ref(to_usize(phys.0.wrapping_sub(OUTPUT_START)));
        word.unwrap_or_else(|error| panic!("{phys} is outside the memory: {error}"))
    }

    pub fn load(&self, phys: PhysAddr) -> u64 {
        self.word(phys).load(Ordering::Relaxed)
    }

    pub fn store(&self, phys: PhysAddr, value: u64) {
        self.word(phys).store(value, Ordering::Relaxed);
    }

    /// Returns a range as address and length in this process, truncated to the memory.
    fn host_range(&self, phys: PhysAddr, size: u64) -> (*const u8, usize) {
        let offset = to_usize(phys.0.wrapping_sub(OUTPUT_START)).min(self.mapping.size());
        let size = to_usize(size).min(self.mapping.size() - offset);
        (self.mapping.as_ptr().wrapping_add(offset), size)
    }

    /// Cleans and invalidates a range to PoC, without waiting for completion.
    pub fn clean_invalidate(&self, phys: PhysAddr, size: u64) {
        let (start, size) = self.host_range(phys, size);
        // SAFETY: the range is within the memory, which is mapped.
        unsafe { self.cache.clean_invalidate(start, size) };
    }

    /// Invalidates a range in the instruction caches, without waiting for completion.
    pub fn invalidate_icache(&self, phys: PhysAddr, size: u64) {
        let (start, size) = self.host_range(phys, size);
        // SAFETY: the range is within the memory, which is mapped.
        unsafe { self.cache.invalidate_icache(start, size) };
    }
}
