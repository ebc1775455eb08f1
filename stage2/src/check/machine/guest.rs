// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest: its stage-2 table with a checker, and the lock that protects the table.

use alloc::{vec, vec::Vec};

use super::{
    lock::{Hold, Lock},
    registers::Registers,
};
use crate::{
    address::{PhysAddr, TableAddress},
    check::{Action, Checker, Event, Setup},
    engine::Features,
    geometry::Geometry,
    operations::{Note, Vmid},
};

/// VMID of the guest in the events of its checker. A hypervisor may assign another one at any time.
const OWN: Vmid = Vmid(1);
/// VMID of all other guests, and of the host.
const OTHER: Vmid = Vmid(0);

#[derive(Debug)]
pub(super) struct Guest {
    pub(super) root: PhysAddr,
    pub(super) checker: Checker,
    /// Address of the lock's word, from the first store on that was made under a lock.
    pub(super) lock: Option<PhysAddr>,
    /// Indicates that an earlier guest has the same lock: the tables are those of a nested guest.
    pub(super) is_shadow: bool,
    /// The holds on the lock that the checker knows.
    holds: Vec<Option<Hold>>,
    /// The CPU and the call stack of the last store that unmapped a leaf.
    pub(super) last_unmap: Option<(u8, Option<u32>)>,
}

impl Guest {
    pub(super) fn new(root: PhysAddr, geometry: Geometry, features: Features, cpus: u8) -> Self {
        let root_table = TableAddress(root.0);
        let setup = Setup { geometry, features, vmid: OWN, root: root_table, cpus };
        let mut checker = Checker::new(setup);
        checker.defer_restrictions();
        let holds = vec![None; usize::from(cpus)];
        Self { root, checker, lock: None, is_shadow: false, holds, last_unmap: None }
    }

    pub(super) fn check(&mut self, cpu: u8, action: Action) {
        self.checker.check(&Event { cpu, action });
    }

    /// Makes the guest current on a CPU, or another one, after a change of registers.
    pub(super) fn select(&mut self, cpu: u8, registers: Registers) {
        let is_own = registers.selects_guest() && registers.root() == Some(self.root);
        let vmid = if is_own { OWN } else { OTHER };
        if self.checker.current_vmid(usize::from(cpu)) != vmid {
            self.check(cpu, Action::SwitchVmid(vmid));
        }
        if is_own && registers.enables_stage2() && registers.has_fwb() {
            self.checker.set_fwb();
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
