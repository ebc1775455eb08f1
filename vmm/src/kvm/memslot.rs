// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memslots: guest-physical ranges backed by memory of this process, and their dirty logs.

use std::sync::Arc;

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_INITIALLY_SET,
    KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region,
};
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};

use super::{
    KvmError,
    dirty_ring::{DirtyRings, OutsideWrites},
    ioctls::{clear_dirty_log, enable_capability},
};
use crate::memory::GuestRam;

/// A memslot, which keeps its memory mapped. Close the VM's file descriptor before dropping it.
#[derive(Debug)]
pub struct Memslot {
    number: u32,
    ram: Arc<GuestRam>,
}

impl Memslot {
    /// Registers `ram` as memslot `number` of `vm`.
    ///
    /// # Errors
    /// The memslot overlaps another one or exceeds the VM's address width.
    pub fn new(vm: &VmFd, number: u32, ram: Arc<GuestRam>) -> Result<Self, KvmError> {
        let slot = Self { number, ram };
        slot.set_region(vm, 0)?;
        Ok(slot)
    }

    /// Returns the memory behind the memslot.
    pub const fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    fn set_region(&self, vm: &VmFd, flags: u32) -> Result<(), KvmError> {
        let region = kvm_userspace_memory_region {
            slot: self.number,
            flags,
            guest_phys_addr: self.ram.start().0,
            memory_size: self.ram.size().0,
            userspace_addr: self.ram.host_address().0,
        };
        // SAFETY: the range is a mapping of this process that `ram` keeps alive; this process reads
        // guest writes through volatile accesses only.
        unsafe { vm.set_user_memory_region(region) }
            .map_err(|error| KvmError::call("KVM_SET_USER_MEMORY_REGION", error))
    }
}

/// Dirty logging mode of KVM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DirtyMode {
    /// Log that `KVM_GET_DIRTY_LOG` clears: the call write-protects the reported pages again. The
    /// start of logging write-protects the memslot.
    #[default]
    Plain,
    /// Log that only `KVM_CLEAR_DIRTY_LOG` clears, which write-protects the pages again.
    Manual,
    /// [`DirtyMode::Manual`] whose start marks every page dirty instead of write-protecting the
    /// memslot (`KVM_DIRTY_LOG_INITIALLY_SET`).
    #[serde(rename = "initially-set")]
    ManualInitiallySet,
    /// [Ring](super::dirty_ring) of dirty pages for each vCPU; the harvested pages are the log.
    Ring,
    /// [`DirtyMode::Ring`] without `KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP`: memslots have no bitmap.
    RingOnly,
}

impl DirtyMode {
    /// Enables the dirty rings of the mode, if it has any. `vm` must not have vCPUs or memslots yet.
    ///
    /// # Errors
    /// The kernel has no dirty rings.
    pub fn enable_rings(self, vm: &VmFd) -> Result<Option<Arc<DirtyRings>>, KvmError> {
        let writes = match self {
            Self::Plain | Self::Manual | Self::ManualInitiallySet => return Ok(None),
            Self::Ring => OutsideWrites::InBitmap,
            Self::RingOnly => OutsideWrites::Unlogged,
        };
        DirtyRings::enable(vm, writes).map(|rings| Some(Arc::new(rings)))
    }
}

/// The dirty log of a memslot.
#[derive(Debug)]
pub struct DirtyLog {
    mode: DirtyMode,
    rings: Option<Arc<DirtyRings>>,
    /// Pages read from the log since it was last cleared; `None` while logging is off.
    dirty_bitmap: Option<Vec<u64>>,
}

impl DirtyLog {
    /// Sets the dirty logging mode of `vm`; call it before logging starts. `rings` are the VM's
    /// dirty rings, which must have been enabled before its vCPUs were created.
    ///
    /// # Errors
    /// The kernel does not support the mode.
    pub fn new(
        vm: &VmFd,
        mode: DirtyMode,
        rings: Option<Arc<DirtyRings>>,
    ) -> Result<Self, KvmError> {
        let flags = match mode {
            DirtyMode::Ring | DirtyMode::RingOnly if rings.is_none() => {
                return Err(KvmError::no_dirty_rings());
            }
            DirtyMode::Plain | DirtyMode::Ring | DirtyMode::RingOnly => 0,
            DirtyMode::Manual => KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
            DirtyMode::ManualInitiallySet => {
                KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET
            }
        };
        if flags != 0 {
            let supported = vm.check_extension_raw(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.into());
            let supported = u32::try_from(supported).unwrap_or(0);
            if flags & !supported != 0 {
                let initially = match mode {
                    DirtyMode::ManualInitiallySet => " and all pages set initially",
                    _ => "",
                };
                return Err(KvmError::Unsupported(format!(
                    "this host's KVM does not support dirty logging with manual \
                     clearing{initially} (KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 returns \
                     {supported:#x}): use plain dirty logging"
                )));
            }
            let cap = KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2;
            enable_capability(vm, cap, flags.into()).map_err(|error| {
                KvmError::call("KVM_ENABLE_CAP (KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2)", error)
            })?;
        }
        Ok(Self { mode, rings, dirty_bitmap: None })
    }

    /// Starts or stops dirty logging of `slot`. The start of [`DirtyMode::ManualInitiallySet`] includes
    /// a first clear of the whole log.
    pub fn set_enabled(&mut self, vm: &VmFd, slot: &Memslot, on: bool) -> Result<(), KvmError> {
        slot.set_region(vm, if on { KVM_MEM_LOG_DIRTY_PAGES } else { 0 })?;
        if let Some(rings) = &self.rings {
            // Pages harvested during an earlier logging session are discarded.
            rings.take_bitmap(slot.number)?;
        }
        self.dirty_bitmap = on.then(Vec::new);
        if on && self.mode == DirtyMode::ManualInitiallySet {
            // This first clear write-protects the memslot.
            self.read_and_clear(vm, slot)?;
        }
        Ok(())
    }

    /// Returns the pages written since logging started or the log was last cleared, one bit each,
    /// lowest first. Logging must be on.
    pub fn read(&mut self, vm: &VmFd, slot: &Memslot) -> Result<Vec<u64>, KvmError> {
        let Some(dirty) = self.dirty_bitmap.as_mut() else {
            return Err(KvmError::NotLogging);
        };
        let size = usize::try_from(slot.ram().size().0).unwrap_or(usize::MAX);
        let log = match &self.rings {
            Some(rings) => {
                let base =
                    usize::try_from(slot.ram().plan().base_page_size().0).unwrap_or(usize::MAX);
                let mut log = rings.take_bitmap(slot.number)?;
                log.resize((size / base).div_ceil(64), 0);
                log
            }
            None => vm
                .get_dirty_log(slot.number, size)
                .map_err(|error| KvmError::call("KVM_GET_DIRTY_LOG", error))?,
        };
        merge_bitmaps(dirty, &log);
        Ok(dirty.clone())
    }

    /// Returns the log and clears it. Later writes appear in the next log. Logging must be on.
    pub fn read_and_clear(&mut self, vm: &VmFd, slot: &Memslot) -> Result<Vec<u64>, KvmError> {
        let mut dirty = self.read(vm, slot)?;
        if matches!(self.mode, DirtyMode::Manual | DirtyMode::ManualInitiallySet) {
            let ram = slot.ram();
            let mut pages = ram.size().0 / ram.plan().base_page_size().0;
            let mut first = 0;
            // `num_pages` has 32 bits and is a multiple of 64, except at the end of the memslot.
            while pages > 0 {
                let now = u32::try_from(pages).unwrap_or(1 << 31);
                let words = usize::try_from(first / 64).unwrap_or(usize::MAX);
                clear_dirty_log(vm, slot.number, first, now, &mut dirty[words..])
                    .map_err(|error| KvmError::call("KVM_CLEAR_DIRTY_LOG", error))?;
                first += u64::from(now);
                pages -= u64::from(now);
            }
        }
        self.dirty_bitmap = Some(Vec::new());
        Ok(dirty)
    }
}

/// Adds the bits of `log` to `dirty`.
fn merge_bitmaps(dirty: &mut Vec<u64>, log: &[u64]) {
    if dirty.len() < log.len() {
        dirty.resize(log.len(), 0);
    }
    for (word, new) in dirty.iter_mut().zip(log) {
        *word |= new;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merge_bitmaps_keeps_the_bits_of_both_logs() {
        let mut dirty = Vec::new();

        merge_bitmaps(&mut dirty, &[0b01, 0]);
        merge_bitmaps(&mut dirty, &[0b10, 1 << 63]);

        assert_eq!(dirty, [0b11, 1 << 63]);
    }
}
