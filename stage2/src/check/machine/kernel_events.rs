// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Passes the events of a machine to the checker of the kernel's own tables, and its violations to the
//! findings.

use alloc::vec::Vec;

use super::{
    event::{MachineAction, MachineEvent, OrderedAccesses},
    findings::CheckedTables,
    hypervisor::Role,
    observer::{Observer, cause, dsb, orders_stores},
};
use crate::{
    address::PhysAddr,
    check::{Cause, Violation},
};

impl Observer {
    /// Passes an event to the checker of the kernel's own tables.
    pub(super) fn observe_kernel(&mut self, event: &MachineEvent) {
        let (cpu, thread) = (event.cpu, self.threads[usize::from(event.cpu)]);
        let kernel = &mut self.kernel;
        match &event.action {
            MachineAction::SetKernelRoot(level, root) => {
                self.kernel.select_root(cpu, (*level, *root), self.features().bbm);
            }
            MachineAction::SetKernelTcr(value) => kernel.set_tcr(cpu, *value),
            MachineAction::SetKernelMair(value) => kernel.set_mair(*value),
            MachineAction::KernelTable { table, unordered_writer, entries, .. } => {
                kernel.add_table(*table, *unordered_writer, entries);
            }
            MachineAction::KernelTlbi(name, operand) => kernel.invalidate(cpu, name, *operand),
            MachineAction::Store { entry, old, new, kind } => {
                kernel.store((cpu, thread), *entry, (*old, *new), *kind);
            }
            MachineAction::Dsb(accesses, domain) => {
                if orders_stores(*accesses, *domain) {
                    kernel.order_stores(cpu);
                }
                if let Some(kind) = dsb(*accesses, *domain) {
                    kernel.barrier(cpu, kind, *accesses == OrderedAccesses::NonXs);
                }
            }
            MachineAction::Dmb(accesses, domain) if orders_stores(*accesses, *domain) => {
                kernel.order_stores(cpu);
            }
            MachineAction::HostWrite(page) => kernel.reuse_page(*page),
            MachineAction::Enter(number, arguments) => {
                match self.machine.hypervisor.role(*number) {
                    Some(Role::ChangeKernel) => kernel.enter(*number, thread, self.totals.events),
                    Some(Role::FreePage) => kernel.reuse_page(PhysAddr(arguments[0])),
                    _ => {}
                }
            }
            MachineAction::Leave(number, _) => kernel.leave(*number, thread),
            _ => {}
        }
    }

    /// Moves new violations of the kernel's tables to the findings.
    pub(super) fn collect_kernel(&mut self, index: u64, event: &MachineEvent) {
        for found in self.kernel.take_violations() {
            if self.machine.disabled_rules.contains(&found.rule) {
                continue;
            }
            let earlier = found.cause.filter(|_| event.stack.is_none());
            let Cause { cpu, stack } = earlier.unwrap_or(cause(event));
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
