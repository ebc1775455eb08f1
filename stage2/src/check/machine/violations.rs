// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Violations of the current event, moved to the findings with their call stack and the last change of the
//! tables.

use alloc::vec::Vec;

use super::{event::MachineEvent, findings::CheckedTables, observer::Observer};
use crate::check::{Cause, Rule, Violation};

impl Observer {
    /// Moves new violations to the findings.
    pub(super) fn collect(&mut self, index: u64, event: &MachineEvent) {
        let vmid = self.registers[usize::from(event.cpu)].vmid();
        let handles_abort = self.calls.handles_abort(self.threads[usize::from(event.cpu)]);
        for guest in self.guests.values_mut() {
            // A CMO of a driver is no concern of the guest.
            let is_cmo_of_guest = handles_abort || guest.holds_lock(event.cpu);
            for mut violation in guest.checker.take_violations() {
                if guest.is_shadow
                    || (violation.rule == Rule::NeedlessCmo && !is_cmo_of_guest)
                    || self.machine.disabled_rules.contains(&violation.rule)
                    || (guest.lock.is_none() && violation.rule.requires_lock())
                {
                    continue;
                }
                let earlier = violation.cause.filter(|_| event.stack.is_none());
                let Cause { cpu, mut stack } = earlier.unwrap_or(event.cause());
                violation.cpu = cpu;
                let mut change = guest.last_changes[usize::from(violation.cpu)];
                // The last CPU that releases a shared lock reveals what another one has unmapped.
                if let (Rule::ReturnedUnclean, Some((cpu, unmapped_in, unmapped))) =
                    (violation.rule, guest.last_unmap)
                {
                    violation.cpu = cpu;
                    (stack, change) = (unmapped_in, Some(unmapped));
                }
                let stack = stack.and_then(|number| self.stacks.get(&number));
                let stack = stack.map_or(&[][..], Vec::as_slice);
                let tables = CheckedTables::Guest(guest.root, vmid);
                self.findings.add(violation, index, tables, (stack, change));
            }
        }
    }

    /// Moves new violations of the kernel's tables to the findings.
    pub(super) fn collect_kernel(&mut self, index: u64, event: &MachineEvent) {
        for found in self.kernel.take_violations() {
            if self.machine.disabled_rules.contains(&found.rule) {
                continue;
            }
            let earlier = found.cause.filter(|_| event.stack.is_none());
            let Cause { cpu, stack } = earlier.unwrap_or(event.cause());
            let (rule, detail, cause) = (found.rule, found.detail, found.cause);
            let violation = Violation { rule, event: index, cpu, detail, cause };
            let change = self.kernel.last_changes[usize::from(cpu)];
            let stack = stack.and_then(|number| self.stacks.get(&number));
            let stack = stack.map_or(&[][..], Vec::as_slice);
            let tables = CheckedTables::Kernel(self.kernel.root);
            self.findings.add(violation, index, tables, (stack, change));
        }
    }
}
