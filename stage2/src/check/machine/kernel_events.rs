// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Events that concern the kernel's own tables, passed to their checker.

use super::{
    event::{MachineAction, MachineEvent, OrderedAccesses, barrier},
    hypervisor::Role,
    observer::Observer,
};
use crate::address::PhysAddr;

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
                if barrier::orders_stores(*accesses, *domain) {
                    kernel.order_stores(cpu);
                }
                if let Some(kind) = barrier::dsb(*accesses, *domain) {
                    kernel.barrier(cpu, kind, *accesses == OrderedAccesses::NonXs);
                }
            }
            MachineAction::Dmb(accesses, domain) if barrier::orders_stores(*accesses, *domain) => {
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
}
