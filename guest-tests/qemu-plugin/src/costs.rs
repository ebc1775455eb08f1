// SPDX-License-Identifier: GPL-2.0-or-later
//! Costs of instructions by class, in picoseconds.
//!
//! Without a table each instruction costs one nanosecond of virtual time, as under `-icount
//! shift=0`. A table names the classes whose cost differs. An exception entry has no instruction of
//! its own, so `exception` is the cost of entry and return, accounted at the `ERET`.
//!
//! Two costs depend on earlier instructions:
//!
//! * `dc_long`: `DC` of a line after [`SHORT_RANGE`] others without a `DSB`, beyond the reach of
//!   the CPU's TLB and caches.
//! * `atomic_shared`: an atomic operation that writes to a cache line to which the last one of another
//!   CPU wrote, so that the line moves between the CPUs. A load-exclusive and a failed
//!   store-exclusive write nothing and cost `atomic`.
//!
//! Two more distinguish barriers: `dsb_store`, a `DSB` of stores alone, and `isb`.
//!
//! By default, these four cost the same as other instructions of their classes.

use crate::{
    decode::{SysOperation, maintenance},
    stores::LDAPR,
};

/// Number of `DC` lines in a short range: 4M, the reach of a TLB with 1,024 entries of 4K.
pub const SHORT_RANGE: u64 = 1 << 16;

/// Class of an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Instruction of no other class.
    Other,
    /// `LDXR`, `STXR`, `CAS` and the atomic operations of FEAT_LSE.
    Atomic,
    /// `DC` of one cache line.
    DcLine,
    /// `DC ZVA`.
    DcZva,
    /// `IC IVAU`.
    IcLine,
    /// `IC IALLU` and `IC IALLUIS`.
    IcAll,
    /// `TLBI` of the executing CPU.
    TlbiLocal,
    /// `TLBI` of all CPUs of the shareability domain.
    TlbiBroadcast,
    /// `DSB`.
    Dsb,
    /// Exception entry and `ERET`.
    Exception,
}

/// Names of the classes in the argument `cost`.
const CLASS_NAMES: [(&str, Class); 10] = [
    ("instruction", Class::Other),
    ("atomic", Class::Atomic),
    ("dc_line", Class::DcLine),
    ("dc_zva", Class::DcZva),
    ("ic_line", Class::IcLine),
    ("ic_all", Class::IcAll),
    ("tlbi_local", Class::TlbiLocal),
    ("tlbi_broadcast", Class::TlbiBroadcast),
    ("dsb", Class::Dsb),
    ("exception", Class::Exception),
];

/// Cost of each class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CostTable {
    class_costs: [u64; CLASS_NAMES.len()],
    dc_long: Option<u64>,
    atomic_shared: Option<u64>,
    dsb_store: Option<u64>,
    isb: Option<u64>,
}

impl Default for CostTable {
    fn default() -> Self {
        let class_costs = [1000; CLASS_NAMES.len()];
        Self { class_costs, dc_long: None, atomic_shared: None, dsb_store: None, isb: None }
    }
}

/// Rule for the cost of an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CostRule {
    /// Fixed cost in picoseconds.
    Fixed(u64),
    /// `DC` of a line; its cost depends on its position in the range.
    DcLine,
    /// Fixed cost of a `DSB`, which ends a range of lines.
    RangeEnd(u64),
    /// Fixed cost of an atomic operation; a write has an additional cost that depends on the CPU that
    /// wrote to the cache line last.
    Atomic(u64),
}

impl CostTable {
    /// Sets the cost of a class from `CLASS:PICOSECONDS`; `None` if the text is malformed.
    pub fn set(&mut self, text: &str) -> Option<()> {
        let (name, cost) = text.split_once(':')?;
        let cost = cost.parse().ok()?;
        match name {
            "dc_long" => self.dc_long = Some(cost),
            "atomic_shared" => self.atomic_shared = Some(cost),
            "dsb_store" => self.dsb_store = Some(cost),
            "isb" => self.isb = Some(cost),
            _ => {
                let (_, class) = CLASS_NAMES.iter().find(|(known, _)| *known == name)?;
                self.class_costs[*class as usize] = cost;
            }
        }
        Some(())
    }

    /// Returns the cost rule of an instruction.
    pub fn rule(&self, word: u32) -> CostRule {
        match class(word) {
            Class::DcLine if self.dc_long.is_some() => CostRule::DcLine,
            Class::Dsb if self.dc_long.is_some() => CostRule::RangeEnd(self.dsb_cost(word)),
            Class::Dsb => CostRule::Fixed(self.dsb_cost(word)),
            Class::Other if word & ISB_MASK == ISB => {
                CostRule::Fixed(self.isb.unwrap_or(self.class_cost(Class::Other)))
            }
            Class::Atomic if self.atomic_shared.is_some() => {
                CostRule::Atomic(self.class_cost(Class::Atomic))
            }
            class => CostRule::Fixed(self.class_cost(class)),
        }
    }

    /// Returns the cost of `DC` of a line after `lines` others of its range.
    pub fn dc_line_cost(&self, lines: u64) -> u64 {
        self.dc_long.filter(|_| lines >= SHORT_RANGE).unwrap_or(self.class_cost(Class::DcLine))
    }

    /// Returns the cost of an atomic write to a cache line of another CPU in addition to the fixed one.
    pub fn shared_line_cost(&self) -> u64 {
        self.atomic_shared.unwrap_or(0).saturating_sub(self.class_cost(Class::Atomic))
    }

    fn dsb_cost(&self, word: u32) -> u64 {
        let is_of_stores = word & DSB_OPTION_MASK == DSB_STORES;
        self.dsb_store.filter(|_| is_of_stores).unwrap_or(self.class_cost(Class::Dsb))
    }

    fn class_cost(&self, class: Class) -> u64 {
        self.class_costs[class as usize]
    }
}

/// Mask of a `DSB` without its shareability domain.
const DSB_OPTION_MASK: u32 = 0xffff_f3ff;
/// `DSB` of stores alone, and `DSB` nXS, both without their domains.
const DSB_STORES: u32 = 0xd503_329f;
const DSB_NXS: u32 = 0xd503_323f;
const ISB: u32 = 0xd503_30df;
/// Mask of an `ISB` without its option.
const ISB_MASK: u32 = 0xffff_f0ff;

/// Masks and values of exclusive loads and stores, `CAS`, and the atomic operations of FEAT_LSE.
const ATOMICS: [(u32, u32); 3] =
    [(0x3f80_0000, 0x0800_0000), (0x3fa0_7c00, 0x08a0_7c00), (0x3b20_0c00, 0x3820_0000)];

fn class(word: u32) -> Class {
    let is = |mask: u32, value: u32| word & mask == value;
    if let Some(operation) = maintenance(word) {
        return operation_class(operation);
    }
    if is(0xffff_f0ff, 0xd503_309f) || is(DSB_OPTION_MASK, DSB_NXS) {
        Class::Dsb
    } else if is(0xffff_f3ff, 0xd69f_03e0) || is(0xffff_fbff, 0xd69f_0bff) {
        Class::Exception
    } else if ATOMICS.iter().any(|&(mask, value)| is(mask, value)) && !is(LDAPR.0, LDAPR.1) {
        Class::Atomic
    } else {
        Class::Other
    }
}

fn operation_class(operation: SysOperation) -> Class {
    let name = operation.name();
    let (kind, rest) = name.split_once(' ').unwrap_or((&name, ""));
    let rest = rest.trim_end_matches("nXS");
    match kind {
        "TLBI" if rest.ends_with("IS") || rest.ends_with("OS") => Class::TlbiBroadcast,
        "TLBI" => Class::TlbiLocal,
        "IC" if rest == "IVAU" => Class::IcLine,
        "IC" => Class::IcAll,
        "DC" if rest == "ZVA" => Class::DcZva,
        "DC" => Class::DcLine,
        _ => Class::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodings of `aarch64-linux-gnu-as`.
    #[test]
    fn instructions_are_classified() {
        for (word, name, expected) in [
            (0xd50b_7e25, "dc civac, x5", Class::DcLine),
            (0xd50b_7425, "dc zva, x5", Class::DcZva),
            (0xd50b_7525, "ic ivau, x5", Class::IcLine),
            (0xd508_711f, "ic ialluis", Class::IcAll),
            (0xd50c_8025, "tlbi ipas2e1is, x5", Class::TlbiBroadcast),
            (0xd508_931f, "tlbi vmalle1isnxs", Class::TlbiBroadcast),
            (0xd50c_8425, "tlbi ipas2e1, x5", Class::TlbiLocal),
            (0xd503_3b9f, "dsb ish", Class::Dsb),
            (0xd503_3a3f, "dsb ishnxs", Class::Dsb),
            (0xd503_3e3f, "dsb synxs", Class::Dsb),
            (0xd503_305f, "clrex #0", Class::Other),
            (0xd503_3bbf, "dmb ish", Class::Other),
            (0xd69f_03e0, "eret", Class::Exception),
            (0xd69f_0bff, "eretaa", Class::Exception),
            (0xd65f_03c0, "ret", Class::Other),
            (0xc85f_7c20, "ldxr x0, [x1]", Class::Atomic),
            (0xc802_7c20, "stxr w2, x0, [x1]", Class::Atomic),
            (0xc8df_fc20, "ldar x0, [x1]", Class::Other),
            (0xc8a2_7c20, "cas x2, x0, [x1]", Class::Atomic),
            (0xf822_0020, "ldadd x2, x0, [x1]", Class::Atomic),
            (0xf8bf_c020, "ldapr x0, [x1]", Class::Other),
            (0x38bf_c020, "ldaprb w0, [x1]", Class::Other),
            (0xf940_0020, "ldr x0, [x1]", Class::Other),
            (0xf862_6820, "ldr x0, [x1, x2]", Class::Other),
        ] {
            assert_eq!(class(word), expected, "{name}");
        }
    }

    #[test]
    fn a_class_has_the_cost_that_is_set() {
        let mut costs = CostTable::default();

        costs.set("dc_line:584").unwrap();

        let (clean, ret) = (0xd50b_7e25, 0xd65f_03c0);
        assert_eq!([clean, ret].map(|w| costs.rule(w)), [584, 1000].map(CostRule::Fixed));

        costs.set("dc_long:7").unwrap();
        assert_eq!([clean, ret].map(|w| costs.rule(w)), [CostRule::DcLine, CostRule::Fixed(1000)]);
        assert_eq!(costs.rule(0xd503_3b9f), CostRule::RangeEnd(1000), "dsb ish");
        assert_eq!(
            [0, SHORT_RANGE - 1, SHORT_RANGE].map(|lines| costs.dc_line_cost(lines)),
            [584, 584, 7]
        );
        costs.set("atomic_shared:11").unwrap();
        for (word, name) in [(0xf822_0020, "ldadd"), (0xc85f_7c20, "ldxr"), (0xc802_7c20, "stxr")] {
            assert_eq!(costs.rule(word), CostRule::Atomic(1000), "{name}");
        }
        assert_eq!(costs.shared_line_cost(), 0, "less than the fixed cost");
        costs.set("atomic_shared:1011").unwrap();
        assert_eq!(costs.shared_line_cost(), 11);
        let (dsb, dsb_store, isb) = (0xd503_3b9f, 0xd503_3a9f, 0xd503_3fdf);
        costs.set("dsb:9").unwrap();
        assert_eq!([dsb, dsb_store].map(|w| costs.rule(w)), [CostRule::RangeEnd(9); 2]);
        costs.set("dsb_store:3").unwrap();
        costs.set("isb:5").unwrap();
        assert_eq!([dsb, dsb_store].map(|w| costs.rule(w)), [9, 3].map(CostRule::RangeEnd));
        assert_eq!(costs.rule(0xd503_3a3f), CostRule::RangeEnd(9), "dsb ishnxs");
        assert_eq!(costs.rule(isb), CostRule::Fixed(5));
        for malformed in ["dc_line", "dc_line:x", "line:1"] {
            assert_eq!(costs.set(malformed), None, "{malformed}");
        }
    }
}
