// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The platform in real time: anonymous memory of this process, and cache maintenance by the CPU.

use std::{
    arch::asm,
    collections::BTreeMap,
    io,
    sync::atomic::{AtomicU64, Ordering},
};

use granule_stage2::{Access, Ipa, MapError, PhysAddr, Stage2, fault::Page, operations::Dsb};
use rustix::mm::{Advice, madvise};
use vm_memory::{MmapRegion, VolatileMemory, mmap::MmapRegionError};

use super::{
    START, SoftwareMachineConfig, SoftwareMachineError,
    machine::{EngineMachine, TimedPlatform, index},
    operations::{CpuOperations, Initiator, MachineState, Platform, PlatformEvent},
    vcpu::SoftwareVcpu,
};
use crate::{clock, machine::Vcpu};
use granule_types::{
    record::Host,
    units::{Bytes, HostVirtAddr, Nanoseconds},
};

/// Host address of the region in stage 2, a multiple of 1G.
const PRIVATE: u64 = 1 << 44;

/// Memory and caches of this process.
#[derive(Debug)]
pub struct RealTime {
    memory: MmapRegion,
    cache: CacheMaintenance,
}

impl RealTime {
    /// Maps and populates memory.
    fn new(size: usize) -> io::Result<Self> {
        let memory = MmapRegion::new(size).map_err(|error| match error {
            MmapRegionError::Mmap(error) => error,
            other => io::Error::other(other),
        })?;
        let platform = Self { memory, cache: CacheMaintenance::of_this_cpu() };
        platform.restore()?;
        Ok(platform)
    }

    fn advise(&self, advice: Advice) -> io::Result<()> {
        let (start, size) = (self.memory.as_ptr(), self.memory.size());
        // SAFETY: the range is the whole mapping, which only this value uses; the advice populates
        // it or discards its contents.
        unsafe { madvise(start.cast(), size, advice) }.map_err(io::Error::from)
    }

    /// Returns the word at a host address.
    ///
    /// # Panics
    /// The address is outside the memory: the tables that lead there are wrong.
    fn word(&self, phys: PhysAddr) -> &AtomicU64 {
        let word = self.memory.get_atomic_ref(index(phys.0.wrapping_sub(PRIVATE)));
        word.unwrap_or_else(|error| panic!("{phys} is outside the memory: {error}"))
    }

    /// Returns address and length of a range in this process, truncated to the memory.
    fn range(&self, phys: PhysAddr, size: u64) -> (*const u8, usize) {
        let offset = index(phys.0.wrapping_sub(PRIVATE)).min(self.memory.size());
        let size = index(size).min(self.memory.size() - offset);
        (self.memory.as_ptr().wrapping_add(offset), size)
    }
}

impl Platform for RealTime {
    type Lock = parking_lot::RawRwLock;

    fn line(&self) -> u64 {
        self.cache.data_line as u64
    }

    fn perform(&self, _: Initiator, event: PlatformEvent) {
        match event {
            PlatformEvent::Dsb(Dsb::Ish) => self.cache.wait(),
            PlatformEvent::CleanInvalidate(phys, size) => {
                let (start, size) = self.range(phys, size);
                // SAFETY: the range is within the memory, which is mapped.
                unsafe { self.cache.clean_invalidate(start, size) };
            }
            PlatformEvent::InvalidateInstructions(Some((phys, size))) => {
                let (start, size) = self.range(phys, size);
                // SAFETY: the range is within the memory, which is mapped.
                unsafe { self.cache.invalidate_instructions(start, size) };
            }
            // The host may have fewer CPUs than vCPUs.
            PlatformEvent::Pause | PlatformEvent::Retry => std::thread::yield_now(),
            _ => {}
        }
    }

    fn page(ops: &CpuOperations<Self>, offset: u64, _: Access) -> Page {
        let size = ops.state.backing_page;
        let base = offset & !(size - 1);
        Page { ipa: Ipa(START + base), phys: PhysAddr(PRIVATE + base), size, writable: true }
    }

    fn load(&self, phys: PhysAddr) -> u64 {
        self.word(phys).load(Ordering::Relaxed)
    }

    fn store(&self, phys: PhysAddr, value: u64) {
        self.word(phys).store(value, Ordering::Relaxed);
    }

    fn touch(&self, phys: PhysAddr) {
        self.load(phys);
    }
}

impl TimedPlatform for RealTime {
    const ENGINE: &'static str = "model";

    fn host_address(&self) -> Option<HostVirtAddr> {
        Some(HostVirtAddr(self.memory.as_ptr().addr() as u64))
    }

    /// Returns the page size that the fault path sees, not that of this process's memory.
    fn resident(state: &MachineState<Self>) -> BTreeMap<u64, u64> {
        [(state.backing_page, state.size)].into()
    }

    fn read(state: &MachineState<Self>, offset: u64) -> u64 {
        state.platform.load(PhysAddr(PRIVATE + offset))
    }

    fn timed<T>(&self, act: impl FnOnce() -> T) -> (T, Nanoseconds) {
        let start = clock::now();
        let result = act();
        (result, clock::between(start, clock::now()))
    }

    fn recover_blocks(ops: &CpuOperations<Self>, table: &mut Stage2) -> Result<(), MapError> {
        table.recover_blocks(ops, Ipa(START), ops.state.size, ops.state.backing_page)
    }

    fn discard(&self) -> io::Result<()> {
        self.advise(Advice::LinuxDontNeed)
    }

    /// Populates every page.
    fn restore(&self) -> io::Result<()> {
        match self.advise(Advice::LinuxPopulateWrite) {
            // Linux before 5.14 has no such advice.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                for offset in (PRIVATE..).step_by(4096).take(self.memory.size() / 4096) {
                    self.word(PhysAddr(offset)).fetch_or(0, Ordering::Relaxed);
                }
                Ok(())
            }
            result => result,
        }
    }

    fn take_vcpus(vcpus: &mut Vec<SoftwareVcpu<Self>>) -> Vec<Box<dyn Vcpu>> {
        assert!(!vcpus.is_empty(), "the vCPUs are handed out once");
        vcpus.drain(..).map(|vcpu| Box::new(vcpu) as Box<dyn Vcpu>).collect()
    }
}

/// A machine in real time, whose vCPUs are threads.
pub type SoftwareMachine = EngineMachine<RealTime>;

impl SoftwareMachine {
    /// Creates the machine and populates its memory.
    ///
    /// # Errors
    /// The configuration is not supported, or the host provides no memory.
    pub fn new(config: &SoftwareMachineConfig) -> Result<Self, SoftwareMachineError> {
        config.check()?;
        let policy = config.parse_policy()?;
        let size = config.size()?;
        let platform = RealTime::new(index(size))
            .map_err(|source| SoftwareMachineError::Memory(Bytes(size), source))?;
        let host = Host::of_this_machine().map_err(SoftwareMachineError::Host)?;
        // Times are real, even in an emulated host.
        Self::on(platform, config, policy, Host { emulator: None, ..host })
    }
}

/// Cache maintenance by instructions of this CPU from user space.
///
/// arm64: `DC CIVAC` and `IC IVAU`, which Linux permits (`SCTLR_EL1.UCI`). x86_64: `CLFLUSHOPT`, or
/// `CLFLUSH` on CPUs without it; instruction caches are coherent.
#[derive(Debug, Clone, Copy)]
pub(super) struct CacheMaintenance {
    /// Size of a line of the data cache, in bytes.
    pub(super) data_line: usize,
    #[cfg(target_arch = "aarch64")]
    instruction_line: usize,
    /// `true` if the CPU has `CLFLUSHOPT`.
    #[cfg(target_arch = "x86_64")]
    unordered: bool,
}

#[cfg(target_arch = "aarch64")]
impl CacheMaintenance {
    /// Reads the line sizes of this CPU.
    pub(super) fn of_this_cpu() -> Self {
        let ctr: u64;
        // SAFETY: CTR_EL0 can be read by user space.
        unsafe { asm!("mrs {}, ctr_el0", out(reg) ctr, options(nomem, nostack, preserves_flags)) };
        // Log2 of the words in the smallest line (Arm manual D19.2, CTR_EL0: DminLine, IminLine).
        Self { data_line: 4 << (ctr >> 16 & 0xf), instruction_line: 4 << (ctr & 0xf) }
    }

    /// Cleans and invalidates a range to PoC, without waiting for completion.
    ///
    /// # Safety
    /// The range is mapped in this process.
    pub(super) unsafe fn clean_invalidate(&self, start: *const u8, size: usize) {
        for at in lines(start, size, self.data_line) {
            // SAFETY: the caller promises that the line is mapped; its contents stay.
            unsafe { asm!("dc civac, {}", in(reg) at, options(nostack, preserves_flags)) };
        }
    }

    /// Waits until all earlier maintenance is complete.
    pub(super) fn wait(&self) {
        // SAFETY: a barrier accesses no memory.
        unsafe { asm!("dsb ish", options(nostack, preserves_flags)) };
    }

    /// Invalidates a range in the instruction caches, without waiting for completion.
    ///
    /// # Safety
    /// The range is mapped in this process.
    pub(super) unsafe fn invalidate_instructions(&self, start: *const u8, size: usize) {
        for at in lines(start, size, self.instruction_line) {
            // SAFETY: the caller promises that the line is mapped.
            unsafe { asm!("ic ivau, {}", in(reg) at, options(nostack, preserves_flags)) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl CacheMaintenance {
    /// Reads the features and the line size of this CPU (Intel SDM, volume 2, CPUID).
    pub(super) fn of_this_cpu() -> Self {
        use std::arch::x86_64::__cpuid_count;
        // Leaf 7, EBX bit 23: CLFLUSHOPT.
        let most = __cpuid_count(0, 0).eax;
        let unordered = most >= 7 && __cpuid_count(7, 0).ebx >> 23 & 1 != 0;
        // Leaf 1, EBX bits 15:8: the line size of CLFLUSH, in units of 8 bytes.
        let line = (__cpuid_count(1, 0).ebx >> 8 & 0xff) * 8;
        Self { unordered, data_line: usize::try_from(line).unwrap_or(64).max(16) }
    }

    /// Cleans and invalidates a range, without waiting for completion.
    ///
    /// # Safety
    /// The range is mapped in this process.
    pub(super) unsafe fn clean_invalidate(&self, start: *const u8, size: usize) {
        for at in lines(start, size, self.data_line) {
            if self.unordered {
                // SAFETY: the caller promises that the range is mapped, and no line crosses a page;
                // the line's contents stay.
                unsafe { asm!("clflushopt [{}]", in(reg) at, options(nostack, preserves_flags)) };
            } else {
                // SAFETY: as above.
                unsafe { asm!("clflush [{}]", in(reg) at, options(nostack, preserves_flags)) };
            }
        }
    }

    /// Waits until all earlier maintenance is complete.
    pub(super) fn wait(&self) {
        // SAFETY: a fence accesses no memory.
        unsafe { asm!("mfence", options(nostack, preserves_flags)) };
    }

    /// Does nothing: instruction caches are coherent.
    ///
    /// # Safety
    /// None here; on other architectures the range must be mapped.
    pub(super) unsafe fn invalidate_instructions(&self, _start: *const u8, _size: usize) {}
}

/// Returns the lines of a range.
fn lines(start: *const u8, size: usize, line: usize) -> impl Iterator<Item = *const u8> {
    let first = start.wrapping_sub(start.addr() % line);
    let end = start.wrapping_add(size);
    (0..).map(move |index: usize| first.wrapping_add(index * line)).take_while(move |at| *at < end)
}
