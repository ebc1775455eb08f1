// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rules of TLB invalidations, CMOs and switches of the VMID.

use alloc::format;

use crate::{
    address::PhysAddr,
    check::{checker::Checker, rule::Rule, stale_entry::Change},
    operations::{Tlbi, Vmid},
};

impl Checker {
    pub(in crate::check) fn switch_vmid(&mut self, cpu: usize, vmid: Vmid) {
        if self.cpus[cpu].needs_isb {
            self.report(Rule::VmidNotRestored, "switched twice without an ISB");
        }
        self.cpus[cpu].vmid = vmid;
        self.cpus[cpu].needs_isb = true;
    }

    pub(in crate::check) fn invalidate(&mut self, cpu: usize, kind: Tlbi) {
        let vmid = self.cpus[cpu].vmid;
        if self.cpus[cpu].needs_isb || vmid != self.setup.vmid {
            let detail = format!("VMID {}: {kind:?}", vmid.0);
            return self.report(Rule::VmidNotCurrent, detail);
        }
        if let Tlbi::Range { size, .. } = kind
            && !crate::range::is_encodable(size >> self.setup.geometry.granule().shift())
        {
            self.report(Rule::RangeNotEncodable, format!("{size:#x} bytes"));
        }
        // While one entry of a contiguous run remains, a CPU may fetch the whole run again. A TLB
        // need not hold the run as one entry, so each page needs its own invalidation.
        for stale in &mut self.tlbs.stale {
            let entry = &stale.entry;
            stale.run_remains = entry.change == Change::Removed
                && entry.was.is_contiguous()
                && self.tables.run_remains(entry.place.entry, entry.place.level);
        }
        let (effect, is_wrong_level) = self.tlbs.invalidate(cpu, kind);
        self.effect = effect;
        if is_wrong_level {
            self.report(Rule::WrongTtl, format!("{kind:?}"));
        }
    }

    pub(in crate::check) fn clean(&mut self, cpu: usize, phys: PhysAddr, size: u64) {
        let detail = format!("{phys:#x}, {size:#x} bytes");
        let overlaps_device = self
            .memslots
            .values()
            .any(|slot| slot.is_device && slot.phys < phys + size && phys < slot.phys + slot.size);
        if overlaps_device {
            self.report(Rule::DeviceMaintained, detail.as_str());
        }
        if self.setup.features.fwb {
            self.report(Rule::NeedlessMaintenance, detail);
        }
        let stale = &self.tlbs.stale;
        let is_reachable = |phys, size| stale.iter().any(|stale| stale.maps_memory(phys, size));
        self.effect.any = self.caches.clean(cpu, phys, size, is_reachable);
    }

    /// Checks that a CPU has completed its CMOs: it must before it breaks an entry, so that the
    /// break-before-make window stays short, and before it releases the lock.
    pub(super) fn check_maintenance_complete(&mut self, cpu: usize) {
        if self.caches.is_pending(cpu) {
            self.report(Rule::UnfinishedMaintenance, "a DSB is missing");
        }
    }
}
