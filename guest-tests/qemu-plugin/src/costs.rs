// SPDX-License-Identifier: GPL-2.0-or-later
//! Costs of instructions by class, in picoseconds.
//!
//! Without a table each instruction costs one nanosecond of virtual time, as under `-icount
//! shift=0`. A table names the classes whose cost differs. An exception entry has no instruction of
//! its own, so `exception` is the cost of entry and return, accounted at the `ERET`.
//!
//! Two costs depend on what was executed before:
//!
//! * `dc_long`: `DC` of a line after [`SHORT_RANGE`] others without a `DSB`. Each line of a range
//!   costs more if the range exceeds the reach of the CPU's TLB and caches.
//! * `atomic_shared`: an atomic operation on a cache line whose previous one another CPU executed,
//!   so that the line moves between the CPUs.
//!
//! Without these costs, such instructions cost the same as others of their classes.

use crate::decode::{SysOperation, maintenance};

/// Number of `DC` lines after which further lines cost more: 4M of memory, the reach of a TLB with
/// 1,024 entries of 4K.
pub const SHORT_RANGE: u64 = 1 << 16;

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
pub struct Costs {
    classes: [u64; NAMES.len()],
    long: Option<u64>,
    shared: Option<u64>,
}

impl Default for Costs {
    fn default() -> Self {
        Self { classes: [1000; NAMES.len()], long: None, shared: None }
    }
}

/// Cost of an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cost {
    /// Fixed cost in picoseconds.
    Fixed(u64),
    /// `DC` of a line, by the length of the range.
    Line,
    /// Fixed cost of a `DSB`, which ends a range of lines.
    RangeEnd(u64),
    /// Atomic operation, by whether another CPU used the cache line last.
    Atomic,
}

impl Costs {
    /// Sets the cost of a class from `CLASS:PICOSECONDS`; `None` if the text is malformed.
    pub fn set(&mut self, text: &str) -> Option<()> {
        let (name, cost) = text.split_once(':')?;
        let cost = cost.parse().ok()?;
        match name {
            "dc_long" => self.long = Some(cost),
            "atomic_shared" => self.shared = Some(cost),
            _ => {
                let (_, class) = NAMES.iter().find(|(known, _)| *known == name)?;
                self.classes[*class as usize] = cost;
            }
        }
        Some(())
    }

    /// Returns the cost of an instruction.
    pub fn of(&self, word: u32) -> Cost {
        match class(word) {
            Class::CacheLine if self.long.is_some() => Cost::Line,
            Class::Barrier if self.long.is_some() => Cost::RangeEnd(self.fixed(Class::Barrier)),
            Class::Atomic if self.shared.is_some() => Cost::Atomic,
            class => Cost::Fixed(self.fixed(class)),
        }
    }

    /// Returns the cost of `DC` of a line after `lines` others of its range.
    pub fn line(&self, lines: u64) -> u64 {
        self.long.filter(|_| lines >= SHORT_RANGE).unwrap_or(self.fixed(Class::CacheLine))
    }

    /// Returns the cost of an atomic operation; `shared` if another CPU used the line last.
    pub fn atomic(&self, shared: bool) -> u64 {
        self.shared.filter(|_| shared).unwrap_or(self.fixed(Class::Atomic))
    }

    fn fixed(&self, class: Class) -> u64 {
        self.classes[class as usize]
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

        let (clean, ret) = (0xd50b_7e25, 0xd65f_03c0);
        assert_eq!([clean, ret].map(|w| costs.of(w)), [584, 1000].map(Cost::Fixed));

        costs.set("dc_long:7").unwrap();
        assert_eq!([clean, ret].map(|w| costs.of(w)), [Cost::Line, Cost::Fixed(1000)]);
        assert_eq!(costs.of(0xd503_3b9f), Cost::RangeEnd(1000), "dsb ish");
        assert_eq!([0, SHORT_RANGE - 1, SHORT_RANGE].map(|lines| costs.line(lines)), [584, 584, 7]);
        costs.set("atomic_shared:11").unwrap();
        assert_eq!(costs.of(0xf822_0020), Cost::Atomic);
        assert_eq!([false, true].map(|shared| costs.atomic(shared)), [1000, 11]);
        for malformed in ["dc_line", "dc_line:x", "line:1"] {
            assert_eq!(costs.set(malformed), None, "{malformed}");
        }
    }
}
