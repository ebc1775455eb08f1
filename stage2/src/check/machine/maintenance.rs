// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Barriers, TLB invalidations and CMOs, passed to the guests to which they apply.

use super::{
    event::{Domain, IcScope, OrderedAccesses, barrier},
    observer::Observer,
    tlbi::{self, InvalidatedVmids},
};
use crate::{
    address::PhysAddr,
    check::{Action, held_entries::Removed},
};

impl Observer {
    /// Orders the stores of a CPU to tables before its later stores, if a barrier does so.
    pub(super) fn order_stores(&mut self, cpu: u8, accesses: OrderedAccesses, domain: Domain) {
        if !barrier::orders_stores(accesses, domain) {
            return;
        }
        for guest in self.guests.values_mut() {
            guest.checker.order_stores(usize::from(cpu));
        }
        if let Some(pages) = &mut self.pages {
            pages.order_stores(cpu);
        }
    }

    /// Completes invalidations and CMOs of a CPU, if a `DSB` does so.
    pub(super) fn complete(&mut self, cpu: u8, accesses: OrderedAccesses, domain: Domain) {
        let Some(kind) = barrier::dsb(accesses, domain) else { return };
        let is_nxs = accesses == OrderedAccesses::NonXs;
        self.complete_vmids(cpu, kind, is_nxs);
        for guest in self.guests.values_mut() {
            match is_nxs {
                true => guest.checker.barrier(usize::from(cpu), kind, true),
                false => guest.check(cpu, Action::Dsb(kind)),
            }
        }
    }

    /// Processes a TLB invalidation, of the current VMID or of all.
    pub(super) fn invalidate(&mut self, cpu: u8, name: &str, operand: u64) {
        let registers = self.registers[usize::from(cpu)];
        let Some(encoding) = registers.encoding() else { return };
        let Some((vmids, kind)) = tlbi::decode(name, operand, encoding) else { return };
        if vmids == InvalidatedVmids::All {
            self.vmids.invalidate(cpu, None, &kind);
            for guest in self.guests.values_mut() {
                guest.checker.invalidate_all_vmids(usize::from(cpu), kind);
            }
            return;
        }
        if kind.removed == Removed::Everything {
            self.vmids.invalidate(cpu, Some(registers.vmid()), &kind);
        }
        let number = registers.root().and_then(|root| self.by_root.get(&root));
        if let Some(guest) = number.and_then(|number| self.guests.get_mut(number)) {
            guest.invalidate(cpu, kind, registers);
        }
    }

    /// Processes a data cache operation on a range. One to the PoU, or an invalidation without a clean,
    /// cleans nothing to the PoC.
    pub(super) fn maintain_caches(&mut self, cpu: u8, name: &str, phys: PhysAddr, size: u64) {
        match name {
            "civac" | "cigvac" | "cigdvac" => {
                self.clean_ranges.add(phys, size);
                self.check_all(cpu, Action::CleanInvalidate { phys, size });
            }
            "cvac" | "cvap" | "cvadp" | "cgvac" | "cgdvac" => {
                self.clean_ranges.add(phys, size);
                self.guests.values_mut().for_each(|guest| guest.checker.clean(phys, size));
            }
            _ => {}
        }
    }

    /// Processes an invalidation of instructions. One of this CPU alone removes nothing that a rule
    /// requires.
    pub(super) fn invalidate_icache(&mut self, cpu: u8, scope: IcScope) {
        let range = match scope {
            IcScope::Range(phys, size) => Some((phys, size)),
            IcScope::AllCpus => None,
            IcScope::ThisCpu => return,
        };
        self.check_all(cpu, Action::InvalidateICache(range));
    }

    /// Processes a write of a page by the host.
    pub(super) fn write_page(&mut self, cpu: u8, page: PhysAddr) {
        let size = 0x1000;
        self.clean_ranges.remove(page, size);
        self.check_all(cpu, Action::HostWrite { phys: page, size });
    }
}
