// SPDX-License-Identifier: GPL-2.0-or-later
//! The tables of the running kernel: those of TTBR1, in the regime EL1&0 or, with VHE, EL2&0.

use granule_stage2::{PhysAddr, TableAddress, check::machine::event::MachineAction};

use super::{
    instruction::KernelRegister,
    machine::Machine,
    pages::Pages,
    shape::Shape,
    system_registers::SystemRegisters,
    tables::{NewTable, Tables},
};

/// A CPU's registers of the kernel's regime.
#[derive(Debug, Clone, Copy, Default)]
struct KernelRegisters {
    /// Exception level and root.
    root: Option<(u8, PhysAddr)>,
    tcr: u64,
    mair: u64,
}

/// The kernel's tables.
#[derive(Debug)]
pub struct KernelTables {
    pub tables: Tables,
    cpus: Vec<KernelRegisters>,
}

impl KernelTables {
    /// Returns the tables of a kernel on `cpus` CPUs.
    pub fn new(cpus: usize) -> Self {
        Self { tables: Tables::reporting_reuse(), cpus: vec![KernelRegisters::default(); cpus] }
    }

    /// Writes a register; returns the event and the tables that become known, or `None` without a
    /// change.
    pub fn set(
        &mut self,
        (machine, pages): (&dyn Machine, &Pages),
        cpu: u8,
        (register, value): (KernelRegister, u64),
        others: SystemRegisters,
    ) -> Option<(MachineAction, Vec<NewTable>)> {
        let level = machine.exception_level();
        // A hypervisor without VHE writes the registers of a guest, or restores those of its host.
        if level >= 2 && !others.redirect_el1() {
            return None;
        }
        let registers = self.cpus.get_mut(usize::from(cpu))?;
        let (field, action) = match register {
            KernelRegister::Tcr => (&mut registers.tcr, MachineAction::SetKernelTcr(value)),
            KernelRegister::Mair => (&mut registers.mair, MachineAction::SetKernelMair(value)),
            KernelRegister::Ttbr1 => {
                let root = PhysAddr(value & 0xffff_ffff_fffe);
                return self.select(machine, pages, cpu, (level, root));
            }
        };
        (std::mem::replace(field, value) != value).then_some((action, Vec::new()))
    }

    /// Selects a root on a CPU. The tables of a root that no CPU selects are forgotten.
    fn select(
        &mut self,
        machine: &dyn Machine,
        pages: &Pages,
        cpu: u8,
        (level, root): (u8, PhysAddr),
    ) -> Option<(MachineAction, Vec<NewTable>)> {
        let registers = self.cpus.get_mut(usize::from(cpu))?;
        let before = registers.root.replace((level, root));
        if before == Some((level, root)) {
            return None;
        }
        let shape = Shape::of_tcr1(registers.tcr);
        let added =
            shape.map_or_else(Vec::new, |shape| self.tables.add_root(machine, pages, root, shape));
        if let Some((_, before)) = before
            && self.cpus.iter().all(|cpu| cpu.root.is_none_or(|(_, root)| root != before))
        {
            self.tables.remove_root(pages, before);
        }
        Some((MachineAction::SetKernelRoot(level, TableAddress(root.0)), added))
    }

    /// Returns whether no other CPU translates by the kernel's tables.
    pub fn is_alone(&self, cpu: u8) -> bool {
        let mut others = (0..).zip(&self.cpus).filter(|(number, _)| *number != cpu);
        others.all(|(_, registers)| registers.root.is_none())
    }

    /// Returns whether a TLB invalidation applies to the kernel's tables: its regime is that of the
    /// running CPU, and its address is an upper one. `name` is in lower case.
    pub fn concerns(
        machine: &dyn Machine,
        name: &str,
        operand: u64,
        others: SystemRegisters,
    ) -> bool {
        let name = name.strip_suffix("nxs").unwrap_or(name);
        let name = name.trim_end_matches("is").trim_end_matches("os");
        let level = machine.exception_level();
        let applies = match name {
            _ if name.ends_with("e1") => level == 1 || others.invalidate_el2(),
            _ if name.ends_with("e2") => level == 2 && others.redirect_el1(),
            _ => false,
        };
        applies
            && match name.trim_end_matches(['1', '2']) {
                "vmalle" | "alle" => true,
                // Bit 55 of the address, or bit 48 of the base of a range.
                "vae" | "vaae" | "vale" | "vaale" => operand >> 43 & 1 == 1,
                "rvae" | "rvaae" | "rvale" | "rvaale" => operand >> 36 & 1 == 1,
                _ => false,
            }
            && name != "alle1"
    }
}
