// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counts of kernel functions in each phase, from the plugin's counts of blocks of code.
//!
//! A function includes the parts that the compiler has split off. Functions of one name are added up.
//! KVM's code at EL2 of a kernel without VHE has addresses that programs may use too, so it counts as
//! [other code](OTHER_CODE).

use std::{collections::BTreeMap, ops::AddAssign};

use granule_types::{mark, phase::Phase};
use serde::Serialize;

use crate::{
    check::SymbolTable,
    jobs::counts::{SegmentLine, phase_of, program_segments},
};

/// Code outside of the kernel's functions: programs, guests with low addresses, compiled BPF, and EL2 without
/// VHE.
pub const OTHER_CODE: &str = "(other code)";

/// Counts of a function.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct FunctionCounts {
    /// Executions of its first instruction.
    pub calls: u64,
    /// Instructions without those of the functions that it calls.
    pub instructions: u64,
}

impl AddAssign for FunctionCounts {
    fn add_assign(&mut self, other: Self) {
        self.calls += other.calls;
        self.instructions += other.instructions;
    }
}

/// Functions with counts, by name.
pub type Functions = BTreeMap<String, FunctionCounts>;

/// Returns the functions of each phase, in the order of the phases. Phases of one name are added up.
/// The steps of a program have different names, and its whole run, which includes them, is the last.
pub fn functions_of_phases(
    segments: &[SegmentLine],
    symbols: &SymbolTable,
) -> Vec<(String, Functions)> {
    let mut phases: Vec<(String, Functions)> = Vec::new();
    let run = program_segments(segments);
    for segment in segments.iter().filter(|segment| segment.mark != mark::UNMARKED_PROGRAM) {
        let Some(name) = phase_name(segment.mark) else { continue };
        let index = phases.iter().position(|(phase, _)| *phase == name).unwrap_or_else(|| {
            phases.push((name, Functions::new()));
            phases.len() - 1
        });
        add(&mut phases[index].1, segment, symbols);
    }
    if !run.is_empty() {
        let mut whole = Functions::new();
        run.iter().for_each(|segment| add(&mut whole, segment, symbols));
        phases.push((Phase::WholeRun.to_string(), whole));
    }
    phases
}

fn phase_name(number: u8) -> Option<String> {
    let phase = phase_of(number)?;
    let step = mark::step_number(number);
    Some(step.map_or_else(|| phase.to_string(), |number| format!("{phase}-{number}")))
}

fn add(functions: &mut Functions, segment: &SegmentLine, symbols: &SymbolTable) {
    for (address, block) in &segment.blocks {
        let address = u64::from_str_radix(address, 16).unwrap_or(0);
        let place = symbols.place(address).filter(|_| address >> 63 == 1);
        let is_call = place.as_ref().is_some_and(|place| place.offset == 0 && !place.is_part);
        let name = place.map_or_else(|| OTHER_CODE.to_owned(), |place| place.function);
        let calls = if is_call { block.executions } else { 0 };
        *functions.entry(name).or_default() +=
            FunctionCounts { calls, instructions: block.instructions };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::counts::BlockCounts;

    #[test]
    fn blocks_belong_to_the_function_and_the_phase() {
        let symbols = SymbolTable::parse(
            "ffff800010000000 T _text\nffff800010000000 t f\nffff800010000040 t g.isra.0\n\
             ffff800010000080 t f.cold\n",
        );
        let segment = |mark, blocks: &[(&str, u64, u64)]| SegmentLine {
            mark,
            blocks: blocks
                .iter()
                .map(|(address, executions, instructions)| {
                    let counts =
                        BlockCounts { executions: *executions, instructions: *instructions };
                    ((*address).to_owned(), counts)
                })
                .collect(),
            ..SegmentLine::default()
        };
        let (f, inside_f, f_cold) = ("ffff800010000000", "ffff800010000010", "ffff800010000080");
        let g = "ffff800010000040";
        let segments = [
            segment(0x60, &[(f, 9, 90)]),
            segment(0x61, &[(f, 2, 8), (inside_f, 3, 6), ("0", 1, 100)]),
            segment(0x61, &[(f, 1, 4), (f_cold, 1, 1)]),
            segment(0x70, &[(f, 1, 3)]),
            segment(0x78, &[(g, 1, 5)]),
            segment(0x60, &[(f, 8, 80)]),
        ];

        let phases = functions_of_phases(&segments, &symbols);

        let counts = |calls, instructions| FunctionCounts { calls, instructions };
        let create = [(OTHER_CODE.to_owned(), counts(0, 100)), ("f".to_owned(), counts(3, 19))];
        let step = ("g".to_owned(), counts(1, 5));
        let whole = [("f".to_owned(), counts(1, 3)), step.clone()];
        let expected = [
            ("create".to_owned(), create.into()),
            ("step-1".to_owned(), [step].into()),
            ("whole".to_owned(), whole.into()),
        ];
        assert_eq!(phases, expected);
    }
}
