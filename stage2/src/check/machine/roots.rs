// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests by their root tables: their first and last events, the tables of a root, and their VMIDs.

use alloc::format;
use core::mem;

use super::{
    guest::Guest,
    observer::Observer,
    pages::{Pages, TablePage},
};
use crate::{
    address::{PhysAddr, TableAddress},
    check::{Action, Cause, Rule},
    geometry::Geometry,
    operations::{Dsb, Vmid},
};

impl Observer {
    /// Selects the guest of a CPU's registers, which may be a new one.
    ///
    /// A hypervisor may write VTTBR_EL2 before VTCR_EL2, which is valid when it enables stage 2: then an
    /// unsupported root is looked at again. Before that, VTCR_EL2 may be that of another guest. A
    /// guest is new when it first runs: only then HCR_EL2.FWB says whether the entries that were made
    /// before need clean memory.
    fn select(&mut self, cpu: u8) {
        let registers = self.registers[usize::from(cpu)];
        if let Some(root) = registers.root()
            && !self.by_root.contains_key(&root)
            && (registers.runs_guest() || !self.unsupported_roots.contains(&root))
        {
            let is_host = registers.vmid() == Vmid(0);
            match registers.geometry() {
                _ if is_host => drop(self.host_roots.insert(root)),
                Some(_) if !registers.runs_guest() => {}
                Some(geometry) => {
                    self.host_roots.remove(&root);
                    self.totals.unsupported -= u64::from(self.unsupported_roots.remove(&root));
                    self.add_guest(cpu, root, geometry);
                }
                None => {
                    self.totals.unsupported += u64::from(self.unsupported_roots.insert(root));
                }
            }
        }
        self.guests.values_mut().for_each(|guest| guest.select(cpu, registers));
        self.check_vmid(cpu);
    }

    /// Writes VTCR_EL2. Its first value may complete the registers of a root; a later one may be that of
    /// another guest, whose VTTBR_EL2 follows.
    pub(super) fn set_vtcr(&mut self, cpu: u8, value: u64) {
        let before = mem::replace(&mut self.registers[usize::from(cpu)].vtcr, value);
        if before == 0 {
            self.select(cpu);
        }
    }

    /// Writes VTTBR_EL2.
    pub(super) fn set_vttbr(&mut self, write: Cause, value: u64) {
        let registers = &mut self.registers[usize::from(write.cpu)];
        (registers.vttbr, registers.needs_isb) = (value, true);
        registers.vttbr_stack = write.stack;
        self.select(write.cpu);
    }

    /// Writes HCR_EL2, with which a CPU enters and leaves a guest.
    pub(super) fn set_hcr(&mut self, cpu: u8, value: u64) {
        let registers = &mut self.registers[usize::from(cpu)];
        registers.hcr = value;
        if registers.runs_guest() {
            self.calls.enter_guest(cpu);
        }
        self.select(cpu);
    }

    fn add_guest(&mut self, cpu: u8, root: TableAddress, geometry: Geometry) {
        // Numbers are never used again: pages of a destroyed guest keep its number.
        let number = usize::try_from(self.totals.guests).unwrap_or(usize::MAX);
        let mut guest = Guest::new(number, root, geometry, self.features(), self.machine.cpus);
        if self.machine.hypervisor.locked_entry.is_none() {
            guest.checker.share_plain_relaxations();
        }
        let (start, size) = self.machine.memory;
        for (at, size) in self.clean_ranges.gaps(start, size) {
            guest.check(cpu, Action::HostWrite { phys: at, size });
        }
        for (other, registers) in (0..).zip(&self.registers) {
            guest.select(other, *registers);
            // The switch preceded the first event of the guest.
            guest.check(other, Action::Isb);
        }
        self.by_root.insert(root, number);
        self.guests.insert(number, guest);
        self.totals.guests += 1;
        let granule = geometry.granule();
        self.calls.set_granule(granule);
        self.pages.get_or_insert_with(|| Pages::new(granule));
        for index in 0..geometry.root_tables() {
            self.adopt_root(cpu, number, TableAddress(root.0 + index * granule.size()));
        }
    }

    /// Adopts the entries of a root table that were made before the guest first ran.
    fn adopt_root(&mut self, cpu: u8, number: usize, table: TableAddress) {
        let Some(pages) = &mut self.pages else { return };
        let Some(guest) = self.guests.get_mut(&number) else { return };
        for (at, page) in pages.assign(table, number) {
            let checker = &mut guest.checker;
            if at != table {
                checker.adopt_table(at, page.descriptors(), page.writer());
                continue;
            }
            for (index, value) in page.descriptors() {
                checker.adopt_entry(usize::from(cpu), table.entry(index), value);
            }
        }
    }

    /// Adds a page that has become a table.
    pub(super) fn add_table(&mut self, cpu: u8, table: TableAddress, page: TablePage) {
        // The CPU that changes a table may have run no guest: all guests have the same granule.
        let own = self.registers[usize::from(cpu)].geometry();
        let any = || self.registers.iter().find_map(|registers| registers.geometry());
        let Some(geometry) = own.or_else(any) else { return };
        let granule = geometry.granule();
        self.pages.get_or_insert_with(|| Pages::new(granule)).insert(table, page);
        // The root of a guest that is known already: VTTBR_EL2 was written before the event of its table.
        if let Some((root, number)) = self.by_root.range(..=table).next_back()
            && table.0 < root.0 + geometry.root_alignment()
        {
            self.adopt_root(cpu, *number, table);
        }
    }

    /// Returns whether a guest has a lock.
    pub(super) fn has_lock(&self, word: PhysAddr) -> bool {
        self.guests.values().any(|guest| guest.lock == Some(word))
    }

    /// Ends the checks of a guest: its tables are freed without the lock.
    pub(super) fn free(&mut self, root: TableAddress) {
        self.host_roots.remove(&root);
        self.unsupported_roots.remove(&root);
        let Some(number) = self.by_root.remove(&root) else { return };
        let guest = self.guests.remove(&number);
        if let Some(guest) = &guest {
            let most = guest.checker.most_leaves();
            self.totals.most_leaves = self.totals.most_leaves.larger(most);
        }
        let lock = guest.and_then(|guest| guest.lock);
        if let Some(word) = lock.filter(|word| !self.has_lock(*word)) {
            self.locks.remove(&word);
            self.calls.forget_memory(word);
        }
        if let Some(pages) = &mut self.pages {
            let removed = pages.remove(number);
            self.calls.forget_guest(number, &removed);
        }
    }

    /// Checks that a CPU that runs a guest holds no entry of another guest with the same VMID.
    ///
    /// With protected KVM, whose host has a table, the CPU also seems to run a guest while the host
    /// invalidates entries of that guest's VMID, which may be another guest's by then: not checked.
    pub(super) fn check_vmid(&mut self, cpu: u8) {
        let registers = self.registers[usize::from(cpu)];
        let number = registers.root().and_then(|root| self.by_root.get(&root)).copied();
        let runs = registers.runs_guest() && registers.vmid() != Vmid(0);
        let guest = number.filter(|_| runs).map(|number| (registers.vmid(), number));
        let other = self.vmids.run(usize::from(cpu), guest);
        let (Some((vmid, number)), Some(other)) = (guest, other) else { return };
        let other = self.guests.get(&other).map_or("a destroyed guest".into(), |other| {
            format!("the guest of root {}", other.root)
        });
        if let Some(guest) = self.guests.get_mut(&number).filter(|_| self.host_roots.is_empty()) {
            let detail = format!("VMID {}: TLB entries of {other} remain", vmid.0);
            let switch = Cause { cpu, stack: registers.vttbr_stack };
            guest.checker.report_caused(Rule::VmidNotCurrent, detail, Some(switch));
        }
    }

    /// Completes the invalidations of VMIDs by a CPU: guests may then have other ones.
    pub(super) fn complete_vmids(&mut self, cpu: u8, dsb: Dsb, is_nxs: bool) {
        for vmid in self.vmids.complete(usize::from(cpu), dsb, is_nxs) {
            for (number, guest) in &mut self.guests {
                // A CPU that runs the guest has fetched entries since.
                if vmid.is_none() || !self.vmids.is_running(*number) {
                    guest.forget_vmid(vmid);
                }
            }
        }
    }
}
