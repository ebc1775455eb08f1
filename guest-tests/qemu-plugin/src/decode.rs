// SPDX-License-Identifier: GPL-2.0-or-later
//! Decodes and names the A64 instructions that are counted.
//!
//! `SYS #op1, Cn, Cm, #op2` (Arm ARM, C6.2 "SYS") is the encoding behind every DC, IC and TLBI: Cn
//! is 7 for cache maintenance, 8 for TLB maintenance and 9 for its `nXS` variants (FEAT_XS).
//! Address translation (`AT`) has Cn 7 too, with Cm 8 or 9, and is not counted. An encoding without
//! a name is counted as `sys_<op1>_c<n>_c<m>_<op2>`, so that none is lost.

/// An instruction that the plugin counts or reacts to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecodedInstruction {
    /// A cache or TLB maintenance instruction.
    Maintenance(SysOperation),
    /// A mark, by its `HINT` immediate, [`FIRST_MARK`] to [`LAST_MARK`].
    Mark(u8),
}

/// Smallest immediate of a mark, which marks code outside any phase.
pub const FIRST_MARK: u8 = 0x60;
/// Largest immediate of a mark.
pub const LAST_MARK: u8 = 0x7f;

/// Operation of a `SYS` instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SysOperation {
    /// `op1`, 0 to 7.
    pub op1: u8,
    /// `Cn`: 7, 8 or 9.
    pub cn: u8,
    /// `Cm`, 0 to 15.
    pub cm: u8,
    /// `op2`, 0 to 7.
    pub op2: u8,
}

/// Decodes an instruction word; `None` for instructions that are not counted.
pub const fn decode(word: u32) -> Option<DecodedInstruction> {
    const HINT: u32 = 0xd503_201f;
    if word & 0xffff_f01f == HINT {
        let immediate = bits(word, 5, 7);
        return match immediate {
            FIRST_MARK..=LAST_MARK => Some(DecodedInstruction::Mark(immediate)),
            _ => None,
        };
    }
    if word & 0xfff8_0000 != 0xd508_0000 {
        return None;
    }
    let sys = SysOperation {
        op1: bits(word, 16, 3),
        cn: bits(word, 12, 4),
        cm: bits(word, 8, 4),
        op2: bits(word, 5, 3),
    };
    match (sys.cn, sys.cm) {
        (7, 8 | 9) => None, // AT
        (7..=9, _) => Some(DecodedInstruction::Maintenance(sys)),
        _ => None,
    }
}

/// Returns the maintenance operation of an instruction, if it is one.
pub const fn maintenance(word: u32) -> Option<SysOperation> {
    match decode(word) {
        Some(DecodedInstruction::Maintenance(operation)) => Some(operation),
        _ => None,
    }
}

/// Returns whether a CPU may be unable to run after an instruction: `WFI` and `WFIT` wait for an
/// interrupt, `HVC` and `SMC` may be a PSCI call that turns the CPU off.
pub const fn may_halt(word: u32) -> bool {
    const WFI: u32 = 0xd503_207f;
    const WFIT_X0: u32 = 0xd503_1020;
    word == WFI
        || word & !0x1f == WFIT_X0
        || matches!(word & 0xffe0_001f, 0xd400_0002 | 0xd400_0003)
}

#[expect(clippy::cast_possible_truncation, reason = "at most seven bits are kept")]
const fn bits(word: u32, low: u32, count: u32) -> u8 {
    ((word >> low) & ((1 << count) - 1)) as u8
}

impl SysOperation {
    /// Returns the name in assembler syntax (`DC CIVAC`), or the encoding.
    pub fn name(self) -> String {
        let Self { op1, cn, cm, op2 } = self;
        let known = match cn {
            7 => cache_operation_name(op1, cm, op2).map(str::to_owned),
            8 => tlbi_name(op1, cm, op2).map(|name| format!("TLBI {name}")),
            9 => tlbi_name(op1, cm, op2).map(|name| format!("TLBI {name}nXS")),
            _ => None,
        };
        known.unwrap_or_else(|| format!("sys_{op1}_c{cn}_c{cm}_{op2}"))
    }
}

/// Cache maintenance, Cn = 7 (Arm ARM, C5.3).
const fn cache_operation_name(op1: u8, cm: u8, op2: u8) -> Option<&'static str> {
    Some(match (op1, cm, op2) {
        (0, 1, 0) => "IC IALLUIS",
        (0, 5, 0) => "IC IALLU",
        (3, 5, 1) => "IC IVAU",
        (0, 6, 1) => "DC IVAC",
        (0, 6, 2) => "DC ISW",
        (0, 6, 3) => "DC IGVAC",
        (0, 6, 4) => "DC IGSW",
        (0, 6, 5) => "DC IGDVAC",
        (0, 6, 6) => "DC IGDSW",
        (0, 10, 2) => "DC CSW",
        (0, 10, 4) => "DC CGSW",
        (0, 10, 6) => "DC CGDSW",
        (0, 14, 2) => "DC CISW",
        (0, 14, 4) => "DC CIGSW",
        (0, 14, 6) => "DC CIGDSW",
        (3, 4, 1) => "DC ZVA",
        (3, 4, 3) => "DC GVA",
        (3, 4, 4) => "DC GZVA",
        (3, 10, 1) => "DC CVAC",
        (3, 10, 3) => "DC CGVAC",
        (3, 10, 5) => "DC CGDVAC",
        (3, 11, 1) => "DC CVAU",
        (3, 12, 1) => "DC CVAP",
        (3, 12, 3) => "DC CGVAP",
        (3, 12, 5) => "DC CGDVAP",
        (3, 13, 1) => "DC CVADP",
        (3, 13, 3) => "DC CGVADP",
        (3, 13, 5) => "DC CGDVADP",
        (3, 14, 1) => "DC CIVAC",
        (3, 14, 3) => "DC CIGVAC",
        (3, 14, 5) => "DC CIGDVAC",
        (4, 14, 0) => "DC CIPAE",
        (4, 14, 7) => "DC CIGDPAE",
        (6, 14, 1) => "DC CIPAPA",
        (6, 14, 5) => "DC CIGDPAPA",
        _ => return None,
    })
}

/// TLB maintenance, Cn = 8, and 9 for `nXS` (Arm ARM, C5.5).
const fn tlbi_name(op1: u8, cm: u8, op2: u8) -> Option<&'static str> {
    match op1 {
        0 => tlbi_el1_name(cm, op2),
        4 => tlbi_el2_name(cm, op2),
        6 => tlbi_el3_name(cm, op2),
        _ => None,
    }
}

const fn tlbi_el1_name(cm: u8, op2: u8) -> Option<&'static str> {
    Some(match (cm, op2) {
        (1, 0) => "VMALLE1OS",
        (1, 1) => "VAE1OS",
        (1, 2) => "ASIDE1OS",
        (1, 3) => "VAAE1OS",
        (1, 5) => "VALE1OS",
        (1, 7) => "VAALE1OS",
        (2, 1) => "RVAE1IS",
        (2, 3) => "RVAAE1IS",
        (2, 5) => "RVALE1IS",
        (2, 7) => "RVAALE1IS",
        (3, 0) => "VMALLE1IS",
        (3, 1) => "VAE1IS",
        (3, 2) => "ASIDE1IS",
        (3, 3) => "VAAE1IS",
        (3, 5) => "VALE1IS",
        (3, 7) => "VAALE1IS",
        (5, 1) => "RVAE1OS",
        (5, 3) => "RVAAE1OS",
        (5, 5) => "RVALE1OS",
        (5, 7) => "RVAALE1OS",
        (6, 1) => "RVAE1",
        (6, 3) => "RVAAE1",
        (6, 5) => "RVALE1",
        (6, 7) => "RVAALE1",
        (7, 0) => "VMALLE1",
        (7, 1) => "VAE1",
        (7, 2) => "ASIDE1",
        (7, 3) => "VAAE1",
        (7, 5) => "VALE1",
        (7, 7) => "VAALE1",
        _ => return None,
    })
}

const fn tlbi_el2_name(cm: u8, op2: u8) -> Option<&'static str> {
    Some(match (cm, op2) {
        (0, 1) => "IPAS2E1IS",
        (0, 2) => "RIPAS2E1IS",
        (0, 5) => "IPAS2LE1IS",
        (0, 6) => "RIPAS2LE1IS",
        (1, 0) => "ALLE2OS",
        (1, 1) => "VAE2OS",
        (1, 4) => "ALLE1OS",
        (1, 5) => "VALE2OS",
        (1, 6) => "VMALLS12E1OS",
        (2, 1) => "RVAE2IS",
        (2, 5) => "RVALE2IS",
        (3, 0) => "ALLE2IS",
        (3, 1) => "VAE2IS",
        (3, 4) => "ALLE1IS",
        (3, 5) => "VALE2IS",
        (3, 6) => "VMALLS12E1IS",
        (4, 0) => "IPAS2E1OS",
        (4, 1) => "IPAS2E1",
        (4, 2) => "RIPAS2E1",
        (4, 3) => "RIPAS2E1OS",
        (4, 4) => "IPAS2LE1OS",
        (4, 5) => "IPAS2LE1",
        (4, 6) => "RIPAS2LE1",
        (4, 7) => "RIPAS2LE1OS",
        (5, 1) => "RVAE2OS",
        (5, 5) => "RVALE2OS",
        (6, 1) => "RVAE2",
        (6, 5) => "RVALE2",
        (7, 0) => "ALLE2",
        (7, 1) => "VAE2",
        (7, 4) => "ALLE1",
        (7, 5) => "VALE2",
        (7, 6) => "VMALLS12E1",
        _ => return None,
    })
}

const fn tlbi_el3_name(cm: u8, op2: u8) -> Option<&'static str> {
    Some(match (cm, op2) {
        (1, 0) => "ALLE3OS",
        (1, 1) => "VAE3OS",
        (1, 4) => "PAALLOS",
        (1, 5) => "VALE3OS",
        (2, 1) => "RVAE3IS",
        (2, 5) => "RVALE3IS",
        (3, 0) => "ALLE3IS",
        (3, 1) => "VAE3IS",
        (3, 5) => "VALE3IS",
        (4, 3) => "RPAOS",
        (4, 7) => "RPALOS",
        (5, 1) => "RVAE3OS",
        (5, 5) => "RVALE3OS",
        (6, 1) => "RVAE3",
        (6, 5) => "RVALE3",
        (7, 0) => "ALLE3",
        (7, 1) => "VAE3",
        (7, 4) => "PAALL",
        (7, 5) => "VALE3",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation_name(word: u32) -> Option<String> {
        match decode(word)? {
            DecodedInstruction::Maintenance(sys) => Some(sys.name()),
            DecodedInstruction::Mark(_) => None,
        }
    }

    /// Encodings of `aarch64-linux-gnu-as`, with register x5.
    #[test]
    fn operations_are_named_as_in_assembler_syntax() {
        for (word, name) in [
            (0xd50b_7e25, "DC CIVAC"),
            (0xd50b_7a25, "DC CVAC"),
            (0xd50b_7b25, "DC CVAU"),
            (0xd50b_7425, "DC ZVA"),
            (0xd50b_7525, "IC IVAU"),
            (0xd508_711f, "IC IALLUIS"),
            (0xd508_751f, "IC IALLU"),
            (0xd50c_8025, "TLBI IPAS2E1IS"),
            (0xd50c_8045, "TLBI RIPAS2E1IS"),
            (0xd50c_83df, "TLBI VMALLS12E1IS"),
            (0xd508_831f, "TLBI VMALLE1IS"),
            (0xd508_8325, "TLBI VAE1IS"),
            (0xd508_8365, "TLBI VAAE1IS"),
            (0xd50c_8325, "TLBI VAE2IS"),
            (0xd50c_8425, "TLBI IPAS2E1"),
            (0xd508_871f, "TLBI VMALLE1"),
            (0xd508_931f, "TLBI VMALLE1ISnXS"),
        ] {
            assert_eq!(operation_name(word).as_deref(), Some(name), "{word:#x}");
        }
    }

    #[test]
    fn the_register_operand_is_ignored() {
        for register in 0..32 {
            assert_eq!(operation_name(0xd50b_7e20 | register).as_deref(), Some("DC CIVAC"));
        }
    }

    #[test]
    fn an_unknown_operation_is_named_by_its_encoding() {
        assert_eq!(operation_name(0xd50f_84e0).as_deref(), Some("sys_7_c8_c4_7"));
    }

    #[test]
    fn only_hints_from_0x60_are_marks() {
        let hint = |immediate: u32| decode(0xd503_201f | immediate << 5);

        for immediate in 0..0x60 {
            assert_eq!(hint(immediate), None);
        }
        assert_eq!(hint(0x60), Some(DecodedInstruction::Mark(0x60)));
        assert_eq!(hint(0x61), Some(DecodedInstruction::Mark(0x61)));
        assert_eq!(hint(0x7f), Some(DecodedInstruction::Mark(0x7f)));
    }

    #[test]
    fn similar_encodings_are_not_counted() {
        for (word, what) in [
            (0xd503_3b9f, "dsb ish"),
            (0xd503_3fdf, "isb"),
            (0xd508_7825, "at s1e1w, x5"),
            (0xd538_d085, "mrs x5, tpidr_el1"),
            (0xd528_7e25, "sysl x5, #0, c7, c14, #1"),
            (0xd51b_4225, "msr daif, x5"),
            (0xd65f_03c0, "ret"),
            (0, "udf #0"),
        ] {
            assert_eq!(decode(word), None, "{what}");
        }
    }
}
