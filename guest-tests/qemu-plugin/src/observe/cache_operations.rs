// SPDX-License-Identifier: GPL-2.0-or-later
//! Cache maintenance of adjacent lines, which becomes one event.

use granule_stage2::{
    PhysAddr,
    check::machine::event::{IcScope, MachineAction},
};

use super::pages::PAGE_SIZE;
use crate::decode::SysOperation;

/// Bytes to which cache operations by address apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineSizes {
    /// Smallest data cache line: `DC`.
    data: u64,
    /// Smallest instruction cache line: `IC IVAU`.
    instruction: u64,
    /// Block of `DC ZVA`.
    pub zeroed: u64,
}

impl LineSizes {
    /// Returns the sizes of a CPU model by CTR_EL0.DminLine and IminLine, and DCZID_EL0.BS, all of
    /// them logarithms of words. If QEMU does not offer DCZID_EL0, a block is a line,
    /// as in QEMU's CPU models.
    pub const fn new(ctr: u64, dczid: Option<u64>) -> Self {
        let data = 4 << (ctr >> 16 & 0xf);
        let zeroed = match dczid {
            Some(dczid) => 4 << (dczid & 0xf),
            None => data,
        };
        Self { data, instruction: 4 << (ctr & 0xf), zeroed }
    }

    /// Returns the line of an address to which an operation applies.
    pub fn line(self, operation: LineOperation, virt: u64, phys: PhysAddr) -> Line {
        let size = match operation {
            LineOperation::Data(_) => self.data,
            LineOperation::Instruction => self.instruction,
        };
        Line { operation, virt, phys: phys.align_down(size), size }
    }
}

/// A line and an operation on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Line {
    operation: LineOperation,
    /// Virtual address in the line.
    virt: u64,
    /// First byte.
    phys: PhysAddr,
    size: u64,
}

impl Line {
    /// Returns the virtual and physical address of its page.
    fn page(&self) -> (u64, PhysAddr) {
        (self.virt & !(PAGE_SIZE - 1), self.phys.align_down(PAGE_SIZE))
    }
}

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
    pub fn extend(&mut self, cpu: u8, line: Line) -> bool {
        let Some(run) = self.0.iter_mut().find(|run| run.cpu == cpu) else { return false };
        if run.operation != line.operation || line.phys != run.first + run.size {
            return false;
        }
        run.size += line.size;
        run.page = line.page();
        true
    }

    /// Starts a run.
    pub fn start(&mut self, (cpu, stack): (u8, Option<u32>), line: Line) {
        let Line { operation, phys: first, size, .. } = line;
        self.0.push(LineRun { cpu, stack, operation, page: line.page(), first, size });
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

#[cfg(test)]
mod tests {
    use super::*;

    const CIVAC: LineOperation =
        LineOperation::Data(SysOperation { op1: 3, cn: 7, cm: 14, op2: 1 });

    /// CTR_EL0 of a Cortex-A57, with lines of 64 bytes.
    const CTR: u64 = 0x8444_c004;

    /// Records a line as an observer does.
    fn record(runs: &mut LineRuns, cpu: u8, operation: LineOperation, phys: u64) -> Option<String> {
        let sizes = LineSizes::new(CTR, None);
        let line = sizes.line(operation, phys + (1 << 40), PhysAddr(phys));
        if runs.extend(cpu, line) {
            return None;
        }
        let taken = runs.take(cpu);
        runs.start((cpu, None), line);
        taken.map(|run| run.action().to_string())
    }

    #[test]
    fn sizes_of_lines_are_those_of_the_cpu_model() {
        let at = |sizes: LineSizes, operation| {
            let line = sizes.line(operation, 0x11ff, PhysAddr(0x51ff));
            (line.phys.0, line.size, sizes.zeroed)
        };

        for (ctr, dczid, data, instruction) in [
            (CTR, None, (0x51c0, 0x40, 0x40), (0x51c0, 0x40, 0x40)),
            (CTR, Some(0x17), (0x51c0, 0x40, 0x200), (0x51c0, 0x40, 0x200)),
            // A64FX: data lines of 256 bytes; here instruction lines of 64 bytes.
            (0x8666_8004, None, (0x5100, 0x100, 0x100), (0x51c0, 0x40, 0x100)),
        ] {
            let sizes = LineSizes::new(ctr, dczid);

            assert_eq!(at(sizes, CIVAC), data, "{ctr:#x}");
            assert_eq!(at(sizes, LineOperation::Instruction), instruction, "{ctr:#x}");
        }
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
        let sizes = LineSizes::new(CTR, None);
        runs.start((1, None), sizes.line(CIVAC, 0xffff_0000_0000_1fc0, PhysAddr(0x5fc0)));

        assert_eq!(runs.translate(1, 0xffff_0000_0000_1008), Some(PhysAddr(0x5008)));
        assert_eq!(runs.translate(1, 0xffff_0000_0000_2000), None);
        assert_eq!(runs.translate(0, 0xffff_0000_0000_1008), None);
    }
}
