// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The memory under test: anonymous memory of this process.
//!
//! Stage 2 maps it at [`HOST_START`], independent of its address in this process. All accesses and
//! cache maintenance take output addresses of stage 2.

use std::{
    io,
    sync::atomic::{AtomicU64, Ordering},
};

use granule_stage2::PhysAddr;
use rustix::mm::{Advice, madvise};
use vm_memory::{MmapRegion, VolatileMemory, mmap::MmapRegionError};

use super::{PAGE, cache::CacheMaintenance, index};
use granule_types::units::HostVirtAddr;

/// Output address of the memory in stage 2, a multiple of 1G.
const HOST_START: u64 = 1 << 44;

/// The memory under test and the caches in front of it.
#[derive(Debug)]
pub struct TestMemory {
    mapping: MmapRegion,
    pub cache: CacheMaintenance,
}

impl TestMemory {
    /// Maps and populates memory.
    pub fn new(size: u64) -> io::Result<Self> {
        let mapping = MmapRegion::new(index(size)).map_err(|error| match error {
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

    /// Returns the address in this process.
    pub fn host_address(&self) -> HostVirtAddr {
        HostVirtAddr(self.mapping.as_ptr().addr() as u64)
    }

    /// Returns the output address in stage 2 of an offset.
    pub const fn phys(offset: u64) -> PhysAddr {
        PhysAddr(HOST_START + offset)
    }

    fn advise(&self, advice: Advice) -> io::Result<()> {
        let (start, size) = (self.mapping.as_ptr(), self.mapping.size());
        // SAFETY: the range is the whole mapping, which only this value uses; the advice populates
        // it or discards its contents.
        unsafe { madvise(start.cast(), size, advice) }.map_err(io::Error::from)
    }

    /// Discards the contents.
    pub fn discard(&self) -> io::Result<()> {
        self.advise(Advice::LinuxDontNeed)
    }

    /// Populates every page.
    pub fn populate(&self) -> io::Result<()> {
        match self.advise(Advice::LinuxPopulateWrite) {
            // Linux before 5.14 has no such advice.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                for page in 0..self.size() / PAGE {
                    self.word(Self::phys(page * PAGE)).fetch_or(0, Ordering::Relaxed);
                }
                Ok(())
            }
            result => result,
        }
    }

    /// Returns the word at an address.
    ///
    /// # Panics
    /// The address is outside the memory: a stage-2 entry is wrong.
    fn word(&self, phys: PhysAddr) -> &AtomicU64 {
        let word = self.mapping.get_atomic_ref(index(phys.0.wrapping_sub(HOST_START)));
        word.unwrap_or_else(|error| panic!("{phys} is outside the memory: {error}"))
    }

    /// Reads 8 bytes.
    pub fn load(&self, phys: PhysAddr) -> u64 {
        self.word(phys).load(Ordering::Relaxed)
    }

    /// Writes 8 bytes.
    pub fn store(&self, phys: PhysAddr, value: u64) {
        self.word(phys).store(value, Ordering::Relaxed);
    }

    /// Returns address and length of a range in this process, truncated to the memory.
    fn range(&self, phys: PhysAddr, size: u64) -> (*const u8, usize) {
        let offset = index(phys.0.wrapping_sub(HOST_START)).min(self.mapping.size());
        let size = index(size).min(self.mapping.size() - offset);
        (self.mapping.as_ptr().wrapping_add(offset), size)
    }

    /// Cleans and invalidates a range to PoC, without waiting for completion.
    pub fn clean_invalidate(&self, phys: PhysAddr, size: u64) {
        let (start, size) = self.range(phys, size);
        // SAFETY: the range is within the memory, which is mapped.
        unsafe { self.cache.clean_invalidate(start, size) };
    }

    /// Invalidates a range in the instruction caches, without waiting for completion.
    pub fn invalidate_instructions(&self, phys: PhysAddr, size: u64) {
        let (start, size) = self.range(phys, size);
        // SAFETY: the range is within the memory, which is mapped.
        unsafe { self.cache.invalidate_instructions(start, size) };
    }
}
