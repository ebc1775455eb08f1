// SPDX-License-Identifier: GPL-2.0-or-later
//! Cache maintenance of adjacent lines, which becomes one event.

use granule_stage2::{
    PhysAddr,
    check::machine::event::{IcScope, MachineAction},
};

use super::pages::PAGE_SIZE;
use crate::decode::SysOperation;

/// Size of a cache line of QEMU's CPU models.
pub const LINE_SIZE: u64 = 64;

/// Cache maintenance by address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineOperation {
    /// `DC`.
    Data(SysOperation),
    /// `IC IVAU`.
    Instruction,
}

impl LineOperation {
    /// Returns whether the operation cleans to the point of coherency or persistence: `CVAC`, `CVAP`,
    /// `CVADP`, `CIVAC`, but neither `CVAU` nor `IVAC` (Arm ARM C5.3).
    pub const fn cleans_to_poc(self) -> bool {
        matches!(self, Self::Data(SysOperation { op1: 3, cm: 10 | 12 | 13 | 14, .. }))
    }
}

/// Operations of a CPU on adjacent lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineRun {
    /// The CPU.
    pub cpu: u8,
    /// Call stack of the first operation.
    pub stack: Option<u32>,
    operation: LineOperation,
    /// Virtual and physical address of the page of the last line.
    page: (u64, PhysAddr),
    first: PhysAddr,
    size: u64,
}

impl LineRun {
    /// Returns the event.
    pub fn action(&self) -> MachineAction {
        let (first, size) = (self.first, self.size);
        match self.operation {
            LineOperation::Instruction => MachineAction::Ic(IcScope::Range(first, size)),
            LineOperation::Data(operation) => {
                let name = operation.name().trim_start_matches("DC ").to_lowercase();
                MachineAction::Dc(name, first, size)
            }
        }
    }
}

/// Runs that are not yet reported, at most one of each CPU, in the order of their start.
#[derive(Debug, Default)]
pub struct LineRuns(Vec<LineRun>);

impl LineRuns {
    /// Returns the physical address of a virtual address in the page of a CPU's last line. Its
    /// translation cannot have changed: every other event takes all runs.
    pub fn translate(&self, cpu: u8, virt: u64) -> Option<PhysAddr> {
        let (page, phys) = self.0.iter().find(|run| run.cpu == cpu)?.page;
        (virt & !(PAGE_SIZE - 1) == page).then(|| phys + virt % PAGE_SIZE)
    }

    /// Extends the run of a CPU by the line at an address; returns whether it is adjacent.
    pub fn extend(&mut self, cpu: u8, operation: LineOperation, virt: u64, phys: PhysAddr) -> bool {
        let Some(run) = self.0.iter_mut().find(|run| run.cpu == cpu) else { return false };
        let line = phys.align_down(LINE_SIZE);
        if run.operation != operation || line != run.first + run.size {
            return false;
        }
        run.size += LINE_SIZE;
        run.page = pages_of(virt, phys);
        true
    }

    /// Starts a run.
    pub fn start(
        &mut self,
        (cpu, stack): (u8, Option<u32>),
        operation: LineOperation,
        virt: u64,
        phys: PhysAddr,
    ) {
        let (page, first) = (pages_of(virt, phys), phys.align_down(LINE_SIZE));
        self.0.push(LineRun { cpu, stack, operation, page, first, size: LINE_SIZE });
    }

    /// Returns whether a CPU has a run.
    pub fn has_run(&self, cpu: u8) -> bool {
        self.0.iter().any(|run| run.cpu == cpu)
    }

    /// Takes the run of a CPU.
    pub fn take(&mut self, cpu: u8) -> Option<LineRun> {
        let index = self.0.iter().position(|run| run.cpu == cpu)?;
        Some(self.0.remove(index))
    }

    /// Takes all runs.
    pub fn take_all(&mut self) -> Vec<LineRun> {
        std::mem::take(&mut self.0)
    }
}

fn pages_of(virt: u64, phys: PhysAddr) -> (u64, PhysAddr) {
    (virt & !(PAGE_SIZE - 1), phys.align_down(PAGE_SIZE))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CIVAC: LineOperation =
        LineOperation::Data(SysOperation { op1: 3, cn: 7, cm: 14, op2: 1 });

    /// Records a line as an observer does.
    fn record(runs: &mut LineRuns, cpu: u8, operation: LineOperation, phys: u64) -> Option<String> {
        let (virt, phys) = (phys + (1 << 40), PhysAddr(phys));
        if runs.extend(cpu, operation, virt, phys) {
            return None;
        }
        let taken = runs.take(cpu);
        runs.start((cpu, None), operation, virt, phys);
        taken.map(|run| run.action().to_string())
    }

    #[test]
    fn adjacent_lines_of_a_cpu_are_one_event() {
        let mut runs = LineRuns::default();

        for line in 0..65 {
            assert_eq!(record(&mut runs, 1, CIVAC, 0x1000 + line * 64 + 8), None);
            assert_eq!(record(&mut runs, 0, LineOperation::Instruction, 0x8000 + line * 64), None);
        }
        assert_eq!(record(&mut runs, 1, CIVAC, 0x3000).unwrap(), "dc civac 1000 1040");
        let change = record(&mut runs, 0, CIVAC, 0x8000 + 65 * 64).unwrap();

        assert_eq!(change, "ic ivau 8000 1040");
        let rest: Vec<_> = runs.take_all().iter().map(|run| run.action().to_string()).collect();
        assert_eq!(rest, ["dc civac 3000 40", "dc civac 9040 40"]);
        assert!(runs.take_all().is_empty());
    }

    #[test]
    fn the_page_of_the_last_line_needs_no_translation() {
        let mut runs = LineRuns::default();
        runs.start((1, None), CIVAC, 0xffff_0000_0000_1fc0, PhysAddr(0x5fc0));

        assert_eq!(runs.translate(1, 0xffff_0000_0000_1008), Some(PhysAddr(0x5008)));
        assert_eq!(runs.translate(1, 0xffff_0000_0000_2000), None);
        assert_eq!(runs.translate(0, 0xffff_0000_0000_1008), None);
    }
}
