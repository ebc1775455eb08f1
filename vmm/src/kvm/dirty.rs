// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Dirty logging of one slot: which pages the guest has written.
//!
//! With plain logging the kernel write-protects the slot when logging begins, and reading the log
//! clears it and protects anew what it held. With manual clearing reading changes nothing;
//! clearing is a call of its own and protects what it clears. With all pages set initially,
//! switching on protects nothing: the first clearing does, and is part of switching on here, as
//! the log says nothing before it. With [rings](super::dirty_ring) there is nothing to read by the kernel's
//! call: what was harvested from them is the log.

use std::sync::Arc;

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_INITIALLY_SET,
    KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, kvm_enable_cap,
};
use kvm_ioctls::VmFd;
use serde::Serialize;

use super::{KvmError, dirty_ring::DirtyRings, ioctls::VmExt, memslot::Memslot};

/// How the kernel is told to log dirty pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DirtyMode {
    /// Reading the log clears it and write-protects the region again (`KVM_GET_DIRTY_LOG` alone).
    #[default]
    Plain,
    /// Reading the log leaves it; clearing is a call of its own (`KVM_CLEAR_DIRTY_LOG`).
    Manual,
    /// As [`DirtyMode::Manual`], and switching on marks every page dirty instead of
    /// write-protecting the region (`KVM_DIRTY_LOG_INITIALLY_SET`).
    #[serde(rename = "initially-set")]
    ManualInitiallySet,
    /// Each vCPU writes what it dirties into a ring (`KVM_CAP_DIRTY_LOG_RING_ACQ_REL`).
    Ring,
}

/// The state of a slot's log.
#[derive(Debug)]
pub struct DirtyLog {
    mode: DirtyMode,
    rings: Option<Arc<DirtyRings>>,
    /// Everything read from the log since logging began; `None` while it is off.
    seen: Option<Vec<u64>>,
}

impl DirtyLog {
    /// Tells `vm` how dirty pages are to be logged, before any logging. `rings` are the VM's, where
    /// it has some: they were enabled when it was new.
    ///
    /// # Errors
    /// The kernel cannot log in this way.
    pub fn new(
        vm: &VmFd,
        mode: DirtyMode,
        rings: Option<Arc<DirtyRings>>,
    ) -> Result<Self, KvmError> {
        let flags = match mode {
            DirtyMode::Plain => 0,
            DirtyMode::Ring if rings.is_none() => return Err(KvmError::NoRing),
            DirtyMode::Ring => 0,
            DirtyMode::Manual => KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
            DirtyMode::ManualInitiallySet => {
                KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET
            }
        };
        if flags != 0 {
            let offered = vm.check_extension_raw(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.into());
            let offered = u32::try_from(offered).unwrap_or(0);
            if flags & !offered != 0 {
                return Err(KvmError::DirtyMode {
                    initially_set: mode == DirtyMode::ManualInitiallySet,
                    offered,
                });
            }
            let mut cap = kvm_enable_cap {
                cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
                ..kvm_enable_cap::default()
            };
            cap.args[0] = flags.into();
            vm.enable_capability(&cap).map_err(|error| {
                KvmError::call("enabling manual clearing of the dirty log", error)
            })?;
        }
        Ok(Self {
            mode,
            rings,
            seen: None,
        })
    }

    /// Switches logging of `slot` on or off.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn switch(&mut self, vm: &VmFd, slot: &Memslot, on: bool) -> Result<(), KvmError> {
        slot.set_logging(vm, on)?;
        if let Some(rings) = &self.rings {
            // What an earlier logging left.
            rings.take(slot.number())?;
        }
        self.seen = on.then(Vec::new);
        if on && self.mode == DirtyMode::ManualInitiallySet {
            self.clear(vm, slot)?;
        }
        Ok(())
    }

    /// The pages written since logging began or was last cleared, one bit each, lowest first.
    ///
    /// # Errors
    /// The kernel refuses, or logging is off.
    pub fn read(&mut self, vm: &VmFd, slot: &Memslot) -> Result<Vec<u64>, KvmError> {
        let Some(seen) = self.seen.as_mut() else {
            return Err(KvmError::NotLogging);
        };
        let size = usize::try_from(slot.ram().size().0).unwrap_or(usize::MAX);
        let log = match &self.rings {
            Some(rings) => {
                let base = usize::try_from(slot.ram().plan().base_page().0).unwrap_or(usize::MAX);
                let mut log = rings.take(slot.number())?;
                log.resize((size / base).div_ceil(64), 0);
                log
            }
            None => vm.get_dirty_log(slot.number(), size).map_err(|error| {
                KvmError::call("reading the dirty log (KVM_GET_DIRTY_LOG)", error)
            })?,
        };
        merge(seen, &log);
        Ok(seen.clone())
    }

    /// Forgets what was written so far; writes are logged again from here on.
    ///
    /// # Errors
    /// The kernel refuses, or logging is off.
    pub fn clear(&mut self, vm: &VmFd, slot: &Memslot) -> Result<(), KvmError> {
        self.collect(vm, slot).map(drop)
    }

    /// Reads what was written so far and forgets it: every later write is in the next log.
    ///
    /// # Errors
    /// The kernel refuses, or logging is off.
    pub fn collect(&mut self, vm: &VmFd, slot: &Memslot) -> Result<Vec<u64>, KvmError> {
        let mut dirty = self.read(vm, slot)?;
        if matches!(self.mode, DirtyMode::Manual | DirtyMode::ManualInitiallySet) {
            let ram = slot.ram();
            let mut pages = ram.size().0 / ram.plan().base_page().0;
            let mut first = 0;
            // The call counts pages in 32 bits; whole words keep its rule on multiples of 64.
            while pages > 0 {
                let now = u32::try_from(pages).unwrap_or(1 << 31);
                let words = usize::try_from(first / 64).unwrap_or(usize::MAX);
                vm.clear_dirty_log(slot.number(), first, now, &mut dirty[words..])
                    .map_err(|error| {
                        KvmError::call("clearing the dirty log (KVM_CLEAR_DIRTY_LOG)", error)
                    })?;
                first += u64::from(now);
                pages -= u64::from(now);
            }
        }
        self.seen = Some(Vec::new());
        Ok(dirty)
    }
}

/// Adds the bits of `log` to `seen`.
fn merge(seen: &mut Vec<u64>, log: &[u64]) {
    if seen.len() < log.len() {
        seen.resize(log.len(), 0);
    }
    for (word, new) in seen.iter_mut().zip(log) {
        *word |= new;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_add_up() {
        let mut seen = Vec::new();

        merge(&mut seen, &[0b01, 0]);
        merge(&mut seen, &[0b10, 1 << 63]);

        assert_eq!(seen, [0b11, 1 << 63]);
    }
}
