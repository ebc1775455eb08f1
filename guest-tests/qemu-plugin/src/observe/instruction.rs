// SPDX-License-Identifier: GPL-2.0-or-later
//! Decodes the A64 instructions that the trace reports (Arm ARM, C4.1).

use granule_stage2::check::{
    StoreKind,
    machine::event::{Domain, IcScope, OrderedAccesses},
};

use super::barrier::Barrier;
use crate::decode::{SysOperation, maintenance};

/// General register that an instruction names; 31 is `XZR`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Operand(pub u8);

/// System register whose writes are reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SystemRegister {
    /// Base of the stage-2 tables, and VMID.
    Vttbr,
    /// Control of stage-2 translation.
    Vtcr,
    /// Configuration of virtualisation.
    Hcr,
    /// Register of the translation regime of the running kernel.
    Kernel(KernelRegister),
}

/// System register that selects the kernel's own tables. With HCR_EL2.E2H, the names of EL1 denote the
/// registers of EL2 at EL2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelRegister {
    /// Base of the tables of the upper addresses.
    Ttbr1,
    /// Control of translation.
    Tcr,
    /// Memory types.
    Mair,
}

/// Instruction that is reported when it is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Observed {
    /// `MSR`.
    Write(SystemRegister, Operand),
    /// `DSB`, `DMB` or `ISB`; `ERET` as an `ISB`.
    Barrier(Barrier),
    /// TLB maintenance.
    Tlbi(SysOperation, Operand),
    /// Data cache maintenance by virtual address.
    Dc(SysOperation, Operand),
    /// `DC ZVA`.
    Zero(Operand),
    /// `IC IVAU`.
    IcLine(Operand),
    /// `IC IALLU` or `IC IALLUIS`.
    IcAll(IcScope),
    /// Step of a memory copy or memory set (FEAT_MOPS).
    Bulk {
        /// Register with the destination.
        destination: Operand,
        /// Register with the number of bytes, or with its negative if the destination is the end.
        size: Operand,
    },
}

/// Returns the observed instruction that a word encodes, if any.
pub fn decode(word: u32) -> Option<Observed> {
    if let Some(operation) = maintenance(word) {
        return decode_maintenance(operation, operand(word, 0));
    }
    if is_exception_return(word) {
        return Some(Observed::Barrier(Barrier::Isb));
    }
    if word & 0xfb20_0c00 == 0x1900_0400 {
        return Some(Observed::Bulk { destination: operand(word, 0), size: operand(word, 5) });
    }
    let register = match word & 0xffff_ffe0 {
        0xd51c_2100 => SystemRegister::Vttbr,
        0xd51c_2140 => SystemRegister::Vtcr,
        0xd51c_1100 => SystemRegister::Hcr,
        0xd518_2020 => SystemRegister::Kernel(KernelRegister::Ttbr1),
        0xd518_2040 => SystemRegister::Kernel(KernelRegister::Tcr),
        0xd518_a200 => SystemRegister::Kernel(KernelRegister::Mair),
        _ => return decode_barrier(word).map(Observed::Barrier),
    };
    Some(Observed::Write(register, operand(word, 0)))
}

/// Returns whether an instruction is `ERET`, `ERETAA` or `ERETAB`, which synchronise the context.
const fn is_exception_return(word: u32) -> bool {
    matches!(word, 0xd69f_03e0 | 0xd69f_0bff | 0xd69f_0fff)
}

fn decode_maintenance(operation: SysOperation, operand: Operand) -> Option<Observed> {
    let name = operation.name();
    match name.split_once(' ')? {
        ("TLBI", _) => Some(Observed::Tlbi(operation, operand)),
        ("IC", "IVAU") => Some(Observed::IcLine(operand)),
        ("IC", "IALLU") => Some(Observed::IcAll(IcScope::ThisCpu)),
        ("IC", _) => Some(Observed::IcAll(IcScope::AllCpus)),
        ("DC", "ZVA" | "GZVA") => Some(Observed::Zero(operand)),
        // Set and way, and operations on allocation tags alone.
        ("DC", name) if name.ends_with("SW") => None,
        ("DC", "GVA" | "IGVAC" | "CGVAC" | "CGVAP" | "CGVADP" | "CIGVAC") => None,
        ("DC", _) => Some(Observed::Dc(operation, operand)),
        _ => None,
    }
}

fn decode_barrier(word: u32) -> Option<Barrier> {
    let option = (word >> 8) & 0xf;
    let accesses = match option & 3 {
        1 => OrderedAccesses::Loads,
        2 => OrderedAccesses::Stores,
        _ => OrderedAccesses::All,
    };
    let domain = |field: u32| match field & 3 {
        0 => Domain::OuterShareable,
        1 => Domain::NonShareable,
        2 => Domain::InnerShareable,
        _ => Domain::FullSystem,
    };
    match (word & 0xffff_f0ff, option) {
        (0xd503_309f, 0 | 4) => None, // SSBB, PSSBB
        // Reserved options order as `SY`.
        (0xd503_309f, 8 | 12) => Some(Barrier::Dsb(accesses, Domain::FullSystem)),
        (0xd503_309f, _) => Some(Barrier::Dsb(accesses, domain(option >> 2))),
        (0xd503_30bf, 0 | 4 | 8 | 12) => Some(Barrier::Dmb(accesses, Domain::FullSystem)),
        (0xd503_30bf, _) => Some(Barrier::Dmb(accesses, domain(option >> 2))),
        (0xd503_30df, _) => Some(Barrier::Isb),
        // DSB nXS, whose option is in bits 11 and 10.
        (0xd503_303f, 2 | 6 | 10 | 14) => {
            Some(Barrier::Dsb(OrderedAccesses::NonXs, domain(option >> 2)))
        }
        _ => None,
    }
}

fn operand(word: u32, low: u32) -> Operand {
    Operand(u8::try_from((word >> low) & 0x1f).unwrap_or(31))
}

/// Returns whether an instruction is a load or store, which may write memory.
pub const fn accesses_memory(word: u32) -> bool {
    word & 0x0a00_0000 == 0x0800_0000
}

/// Returns how an instruction that writes memory writes it.
pub const fn store_kind(word: u32) -> StoreKind {
    const fn is(word: u32, mask: u32, value: u32) -> bool {
        word & mask == value
    }
    let is_exclusive = is(word, 0x3fc0_0000, 0x0800_0000) // STXR, STLXR, STXP, CASP
        || is(word, 0x3fa0_7c00, 0x0820_7c00) // CASP with acquire
        || is(word, 0x3fa0_7c00, 0x08a0_7c00); // CAS
    let is_atomic = is(word, 0x3b20_0c00, 0x3820_0000) // FEAT_LSE: LDADD … SWP
        || is(word, 0xff20_0c00, 0x1920_0000); // FEAT_LSE128
    // o0 of exclusive and compare-and-swap instructions, R of other atomic ones.
    let releases = if is_exclusive { word >> 15 & 1 } else { word >> 22 & 1 } == 1;
    let is_release = is(word, 0x3fe0_0000, 0x0880_0000) // STLR, STLLR
        || is(word, 0x3fe0_0c00, 0x1900_0000); // STLUR
    if is_exclusive || is_atomic {
        if releases { StoreKind::Swap } else { StoreKind::RelaxedSwap }
    } else if is_release {
        StoreKind::Release
    } else {
        StoreKind::Plain
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodings of `aarch64-linux-gnu-as`.
    #[test]
    fn observed_instructions_are_decoded() {
        use {Domain::*, OrderedAccesses::*};
        let barrier = |barrier| Some(Observed::Barrier(barrier));
        let write = |register, number| Some(Observed::Write(register, Operand(number)));
        for (word, expected, text) in [
            (0xd51c_2105, write(SystemRegister::Vttbr, 5), "msr vttbr_el2, x5"),
            (0xd51c_215f, write(SystemRegister::Vtcr, 31), "msr vtcr_el2, xzr"),
            (0xd51c_1100, write(SystemRegister::Hcr, 0), "msr hcr_el2, x0"),
            (0xd53c_2105, None, "mrs x5, vttbr_el2"),
            (
                0xd518_2021,
                write(SystemRegister::Kernel(KernelRegister::Ttbr1), 1),
                "msr ttbr1_el1, x1",
            ),
            (
                0xd518_204a,
                write(SystemRegister::Kernel(KernelRegister::Tcr), 10),
                "msr tcr_el1, x10",
            ),
            (
                0xd518_a205,
                write(SystemRegister::Kernel(KernelRegister::Mair), 5),
                "msr mair_el1, x5",
            ),
            (0xd518_2000, None, "msr ttbr0_el1, x0"),
            (0xd518_1005, None, "msr sctlr_el1, x5"),
            (0xd503_3b9f, barrier(Barrier::Dsb(All, InnerShareable)), "dsb ish"),
            (0xd503_3a9f, barrier(Barrier::Dsb(Stores, InnerShareable)), "dsb ishst"),
            (0xd503_379f, barrier(Barrier::Dsb(All, NonShareable)), "dsb nsh"),
            (0xd503_339f, barrier(Barrier::Dsb(All, OuterShareable)), "dsb osh"),
            (0xd503_3d9f, barrier(Barrier::Dsb(Loads, FullSystem)), "dsb ld"),
            (0xd503_3f9f, barrier(Barrier::Dsb(All, FullSystem)), "dsb sy"),
            (0xd503_3a3f, barrier(Barrier::Dsb(NonXs, InnerShareable)), "dsb ishnxs"),
            (0xd503_3e3f, barrier(Barrier::Dsb(NonXs, FullSystem)), "dsb synxs"),
            (0xd503_3abf, barrier(Barrier::Dmb(Stores, InnerShareable)), "dmb ishst"),
            (0xd503_39bf, barrier(Barrier::Dmb(Loads, InnerShareable)), "dmb ishld"),
            (0xd503_3fdf, barrier(Barrier::Isb), "isb"),
            (0xd69f_03e0, barrier(Barrier::Isb), "eret"),
            (0xd69f_0bff, barrier(Barrier::Isb), "eretaa"),
            (0xd65f_03c0, None, "ret"),
            (0xd503_309f, None, "ssbb"),
            (0xd503_349f, None, "pssbb"),
            (0xd503_30ff, None, "sb"),
            (0xd503_201f, None, "nop"),
            (0xd50b_7423, Some(Observed::Zero(Operand(3))), "dc zva, x3"),
            (0xd50b_7523, Some(Observed::IcLine(Operand(3))), "ic ivau, x3"),
            (0xd508_711f, Some(Observed::IcAll(IcScope::AllCpus)), "ic ialluis"),
            (0xd508_751f, Some(Observed::IcAll(IcScope::ThisCpu)), "ic iallu"),
            (0xd508_7e43, None, "dc cisw, x3"),
        ] {
            assert_eq!(decode(word), expected, "{text}");
        }
        for (word, name, number) in [(0xd50b_7e23, "DC CIVAC", 3), (0xd508_7629, "DC IVAC", 9)] {
            let Some(Observed::Dc(operation, operand)) = decode(word) else { panic!("{name}") };
            assert_eq!((operation.name().as_str(), operand), (name, Operand(number)));
        }
        for (word, name, number) in
            [(0xd50c_8025, "TLBI IPAS2E1IS", 5), (0xd508_831f, "TLBI VMALLE1IS", 31)]
        {
            let Some(Observed::Tlbi(operation, operand)) = decode(word) else { panic!("{name}") };
            assert_eq!((operation.name().as_str(), operand), (name, Operand(number)));
        }
    }

    /// Encodings of `aarch64-linux-gnu-as -march=armv8.8-a+mops`.
    #[test]
    fn memory_copies_and_sets_have_a_destination_and_a_size() {
        for (word, size, text) in [
            (0x1902_0483, 4, "cpyfp [x3]!, [x2]!, x4!"),
            (0x1d42_0483, 4, "cpym [x3]!, [x2]!, x4!"),
            (0x19c4_0443, 2, "setp [x3]!, x2!, x4"),
        ] {
            let expected = Observed::Bulk { destination: Operand(3), size: Operand(size) };
            assert_eq!(decode(word), Some(expected), "{text}");
        }
    }

    /// Encodings of `aarch64-linux-gnu-as -march=armv8.4-a`.
    #[test]
    fn plain_stores_releases_and_swaps_differ() {
        for (word, kind, text) in [
            (0xf900_0020, StoreKind::Plain, "str x0, [x1]"),
            (0xa900_0420, StoreKind::Plain, "stp x0, x1, [x1]"),
            (0xf822_6820, StoreKind::Plain, "str x0, [x1, x2]"),
            (0xf81f_8020, StoreKind::Plain, "stur x0, [x1, #-8]"),
            (0xc89f_fc20, StoreKind::Release, "stlr x0, [x1]"),
            (0xd900_0020, StoreKind::Release, "stlur x0, [x1]"),
            (0xc802_7c20, StoreKind::RelaxedSwap, "stxr w2, x0, [x1]"),
            (0xc802_fc20, StoreKind::Swap, "stlxr w2, x0, [x1]"),
            (0xc822_7c20, StoreKind::RelaxedSwap, "stxp w2, x0, xzr, [x1]"),
            (0xc822_fc20, StoreKind::Swap, "stlxp w2, x0, xzr, [x1]"),
            (0xc8a2_7c20, StoreKind::RelaxedSwap, "cas x2, x0, [x1]"),
            (0xc8e2_7c20, StoreKind::RelaxedSwap, "casa x2, x0, [x1]"),
            (0xc8a2_fc20, StoreKind::Swap, "casl x2, x0, [x1]"),
            (0xc8e2_fc20, StoreKind::Swap, "casal x2, x0, [x1]"),
            (0x4820_7c22, StoreKind::RelaxedSwap, "casp x0, x1, x2, x3, [x1]"),
            (0x4860_7c22, StoreKind::RelaxedSwap, "caspa x0, x1, x2, x3, [x1]"),
            (0x4860_fc22, StoreKind::Swap, "caspal x0, x1, x2, x3, [x1]"),
            (0xf822_0020, StoreKind::RelaxedSwap, "ldadd x2, x0, [x1]"),
            (0xf8a2_8020, StoreKind::RelaxedSwap, "swpa x2, x0, [x1]"),
            (0xf862_8020, StoreKind::Swap, "swpl x2, x0, [x1]"),
            (0xf8e2_3020, StoreKind::Swap, "ldsetal x2, x0, [x1]"),
            (0xf8e2_8020, StoreKind::Swap, "swpal x2, x0, [x1]"),
        ] {
            assert!(accesses_memory(word), "{text}");
            assert_eq!(store_kind(word), kind, "{text}");
        }
        for (word, text) in [(0x8b02_0020, "add x0, x1, x2"), (0xd65f_03c0, "ret")] {
            assert!(!accesses_memory(word), "{text}");
        }
    }
}
