// SPDX-License-Identifier: GPL-2.0-or-later
//! Costs of instructions by class, in picoseconds.
//!
//! Without a table each instruction costs one nanosecond of virtual time, as under `-icount shift=0`.
//! A table names the classes whose cost differs. The entry of an exception has no instruction, so
//! `exception` is the cost of entry and return, accounted at the `ERET`.

use crate::decode::{SysOperation, maintenance};

/// Class of an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Any other instruction.
    Instruction,
    /// `LDXR`, `STXR`, `CAS` and the atomic operations of FEAT_LSE.
    Atomic,
    /// `DC` of one cache line.
    CacheLine,
    /// `DC ZVA`.
    Zero,
    /// `IC IVAU`.
    InstructionLine,
    /// `IC IALLU` and `IC IALLUIS`.
    InstructionAll,
    /// `TLBI` of the executing CPU.
    LocalInvalidation,
    /// `TLBI` of all CPUs of the shareability domain.
    BroadcastInvalidation,
    /// `DSB`.
    Barrier,
    /// Entry of an exception and `ERET`.
    Exception,
}

/// Names of the classes in the argument `cost`.
const NAMES: [(&str, Class); 10] = [
    ("instruction", Class::Instruction),
    ("atomic", Class::Atomic),
    ("dc_line", Class::CacheLine),
    ("dc_zva", Class::Zero),
    ("ic_line", Class::InstructionLine),
    ("ic_all", Class::InstructionAll),
    ("tlbi_local", Class::LocalInvalidation),
    ("tlbi_broadcast", Class::BroadcastInvalidation),
    ("dsb", Class::Barrier),
    ("exception", Class::Exception),
];

/// Cost of each class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Costs([u64; NAMES.len()]);

impl Default for Costs {
    fn default() -> Self {
        Self([1000; NAMES.len()])
    }
}

impl Costs {
    /// Sets the cost of a class from `CLASS:PICOSECONDS`; `None` if the text is malformed.
    pub fn set(&mut self, text: &str) -> Option<()> {
        let (name, cost) = text.split_once(':')?;
        let (_, class) = NAMES.iter().find(|(known, _)| *known == name)?;
        self.0[*class as usize] = cost.parse().ok()?;
        Some(())
    }

    /// Returns the cost of an instruction.
    pub fn of(&self, word: u32) -> u64 {
        self.0[class(word) as usize]
    }
}

/// Returns the class of an instruction.
fn class(word: u32) -> Class {
    let is = |mask: u32, value: u32| word & mask == value;
    if let Some(operation) = maintenance(word) {
        return operation_class(operation);
    }
    if is(0xffff_f0ff, 0xd503_309f) {
        Class::Barrier
    } else if is(0xffff_f3ff, 0xd69f_03e0) || is(0xffff_fbff, 0xd69f_0bff) {
        Class::Exception
    } else if is(0x3f80_0000, 0x0800_0000) // exclusive loads and stores
        || is(0x3fa0_7c00, 0x08a0_7c00) // CAS
        || is(0x3b20_0c00, 0x3820_0000)
    // FEAT_LSE
    {
        Class::Atomic
    } else {
        Class::Instruction
    }
}

fn operation_class(operation: SysOperation) -> Class {
    let name = operation.name();
    let (kind, rest) = name.split_once(' ').unwrap_or((&name, ""));
    let rest = rest.trim_end_matches("nXS");
    match kind {
        "TLBI" if rest.ends_with("IS") || rest.ends_with("OS") => Class::BroadcastInvalidation,
        "TLBI" => Class::LocalInvalidation,
        "IC" if rest == "IVAU" => Class::InstructionLine,
        "IC" => Class::InstructionAll,
        "DC" if rest == "ZVA" => Class::Zero,
        "DC" => Class::CacheLine,
        _ => Class::Instruction,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodings of `aarch64-linux-gnu-as`.
    #[test]
    fn instructions_are_classified() {
        for (word, name, expected) in [
            (0xd50b_7e25, "dc civac, x5", Class::CacheLine),
            (0xd50b_7425, "dc zva, x5", Class::Zero),
            (0xd50b_7525, "ic ivau, x5", Class::InstructionLine),
            (0xd508_711f, "ic ialluis", Class::InstructionAll),
            (0xd50c_8025, "tlbi ipas2e1is, x5", Class::BroadcastInvalidation),
            (0xd508_931f, "tlbi vmalle1isnxs", Class::BroadcastInvalidation),
            (0xd50c_8425, "tlbi ipas2e1, x5", Class::LocalInvalidation),
            (0xd503_3b9f, "dsb ish", Class::Barrier),
            (0xd503_3bbf, "dmb ish", Class::Instruction),
            (0xd69f_03e0, "eret", Class::Exception),
            (0xd69f_0bff, "eretaa", Class::Exception),
            (0xd65f_03c0, "ret", Class::Instruction),
            (0xc85f_7c20, "ldxr x0, [x1]", Class::Atomic),
            (0xc802_7c20, "stxr w2, x0, [x1]", Class::Atomic),
            (0xc8df_fc20, "ldar x0, [x1]", Class::Instruction),
            (0xc8a2_7c20, "cas x2, x0, [x1]", Class::Atomic),
            (0xf822_0020, "ldadd x2, x0, [x1]", Class::Atomic),
            (0xf940_0020, "ldr x0, [x1]", Class::Instruction),
            (0xf862_6820, "ldr x0, [x1, x2]", Class::Instruction),
        ] {
            assert_eq!(class(word), expected, "{name}");
        }
    }

    #[test]
    fn a_class_has_the_cost_that_is_set() {
        let mut costs = Costs::default();

        costs.set("dc_line:584").unwrap();

        assert_eq!((costs.of(0xd50b_7e25), costs.of(0xd65f_03c0)), (584, 1000));
        for malformed in ["dc_line", "dc_line:x", "line:1"] {
            assert_eq!(costs.set(malformed), None, "{malformed}");
        }
    }
}
