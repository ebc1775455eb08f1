// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest: its stage-2 table with a checker, and the lock that protects the table.

use alloc::{format, vec, vec::Vec};

use super::{
    findings::TableChange,
    lock::{Hold, Lock},
    registers::Registers,
};
use crate::{
    address::{Ipa, PhysAddr, TableAddress},
    check::{
        Action, Cause, Checker, Event, Rule, Setup, entry::Invalidation, held_entries::Removed,
    },
    engine::Features,
    geometry::Geometry,
    operations::{Note, Vmid},
};

/// VMID of the guest in the events of its checker, whichever one the hypervisor has assigned.
const OWN: Vmid = Vmid(1);
/// VMID of all other guests, and of the host.
const OTHER: Vmid = Vmid(0);

#[derive(Debug)]
pub(super) struct Guest {
    /// The number of the guest, in the order of first events.
    pub(super) number: usize,
    pub(super) root: TableAddress,
    pub(super) checker: Checker,
    /// Address of the lock's word, from the first store on that was made under a lock.
    pub(super) lock: Option<PhysAddr>,
    /// Indicates that an earlier guest has the same lock: the tables are those of a nested guest.
    pub(super) is_shadow: bool,
    /// The holds on the lock that the checker knows.
    holds: Vec<Option<Hold>>,
    /// The VMID of the guest's TLB entries, if it has run since they were invalidated.
    vmid: Option<Vmid>,
    /// The last change of the tables by each CPU.
    pub(super) last_changes: Vec<Option<TableChange>>,
    /// The last store that unmapped a leaf: the CPU and the call stack.
    pub(super) last_unmap: Option<(u8, Option<u32>, TableChange)>,
}

impl Guest {
    pub(super) fn new(
        number: usize,
        root: TableAddress,
        geometry: Geometry,
        features: Features,
        cpus: u8,
    ) -> Self {
        let setup = Setup { geometry, features, vmid: OWN, root, cpus };
        let mut checker = Checker::new(setup);
        checker.defer_restrictions();
        Self {
            number,
            root,
            checker,
            lock: None,
            is_shadow: false,
            holds: vec![None; usize::from(cpus)],
            vmid: None,
            last_changes: vec![None; usize::from(cpus)],
            last_unmap: None,
        }
    }

    pub(super) fn check(&mut self, cpu: u8, action: Action) {
        self.checker.check(&Event { cpu, action });
    }

    /// Makes the guest current on a CPU, or another one, after a change of registers: the write of
    /// VTTBR_EL2 is the cause, also of what a later write of HCR_EL2 enables.
    pub(super) fn select(&mut self, cpu: u8, registers: Registers) {
        self.checker.begin_event(Cause { cpu, stack: registers.vttbr_stack });
        let is_own = registers.selects_guest() && registers.root() == Some(self.root);
        let runs = is_own && registers.enables_stage2();
        let current = registers.vmid();
        let is_vmid_kept = self.vmid.is_none_or(|vmid| vmid == current);
        let vmid = if runs || (is_own && is_vmid_kept) { OWN } else { OTHER };
        if self.checker.current_vmid(usize::from(cpu)) != vmid {
            self.check(cpu, Action::SwitchVmid(vmid));
        }
        if runs {
            if let Some(vmid) = self.vmid.replace(current).filter(|_| !is_vmid_kept) {
                let detail =
                    format!("VMID {} replaces {}, whose TLB entries remain", current.0, vmid.0);
                let switch = self.checker.current();
                self.checker.report_caused(Rule::VmidNotCurrent, detail, Some(switch));
            }
            if registers.has_fwb() {
                self.checker.set_fwb();
            }
        }
    }

    /// Processes an invalidation of the current VMID, on a CPU with these registers.
    pub(super) fn invalidate(&mut self, cpu: u8, kind: Invalidation<Ipa>, registers: Registers) {
        let cpu = usize::from(cpu);
        let current = registers.vmid();
        let is_vmid_kept = self.vmid.is_none_or(|vmid| vmid == current);
        match (registers.selects_guest(), kind.removed) {
            (true, _) => self.checker.invalidate(cpu, kind),
            (false, Removed::Combined) => {}
            (false, _) if is_vmid_kept && !registers.needs_isb => {
                self.checker.invalidate_current(cpu, kind);
            }
            (false, _) => {
                let detail = format!("VMID {}: {kind:?}", current.0);
                self.checker.report(Rule::VmidNotCurrent, detail);
            }
        }
    }

    /// Forgets the guest's VMID if it is this one, or `None` for any: its entries have been invalidated
    /// on all CPUs, so the hypervisor may assign another one.
    pub(super) fn forget_vmid(&mut self, vmid: Option<Vmid>) {
        if vmid.is_none() || self.vmid == vmid {
            self.vmid = None;
        }
    }

    /// Passes changes of the lock's holders to the checker: first the releases.
    pub(super) fn update_lock(&mut self, lock: &Lock) {
        let holds: Vec<_> = (0..self.holds.len()).map(|cpu| lock.hold(cpu)).collect();
        let before = core::mem::replace(&mut self.holds, holds.clone());
        for (cpu, (before, after)) in (0..).zip(before.iter().zip(&holds)) {
            if let Some(hold) = before.filter(|_| before != after) {
                self.check(cpu, Action::Note(Note::Unlock));
                self.walk(cpu, hold, false);
            }
        }
        for (cpu, (before, after)) in (0..).zip(before.into_iter().zip(holds)) {
            if let Some(hold) = after.filter(|_| before != after) {
                let is_exclusive = hold == Hold::Exclusive;
                self.check(cpu, Action::Note(Note::Lock { is_exclusive }));
                self.walk(cpu, hold, true);
            }
        }
    }

    /// Returns whether a CPU holds the lock of the table.
    pub(super) fn holds_lock(&self, cpu: u8) -> bool {
        self.holds.get(usize::from(cpu)).is_some_and(Option::is_some)
    }

    /// Returns whether no CPU holds the lock of the table.
    pub(super) fn is_unlocked(&self) -> bool {
        self.holds.iter().all(Option::is_none)
    }

    /// Treats the time of a shared hold as a walk: tables that it may reach must not be reused.
    fn walk(&mut self, cpu: u8, hold: Hold, begins: bool) {
        if hold == Hold::Shared {
            self.check(cpu, Action::Walk { begins });
        }
    }
}
