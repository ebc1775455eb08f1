// SPDX-License-Identifier: GPL-2.0-or-later
//! Stores, and the barriers that order them.

/// Returns the name of a `DSB` or `ISB` in assembler syntax (`DSB ISHST`).
pub const fn barrier_name(word: u32) -> Option<&'static str> {
    const DSB: u32 = 0xd503_309f;
    const DSB_NXS: u32 = 0xd503_303f;
    const ISB: u32 = 0xd503_30df;
    Some(match (word & 0xffff_f0ff, word >> 8 & 0xf) {
        (ISB, _) => "ISB",
        (DSB, 1) => "DSB OSHLD",
        (DSB, 2) => "DSB OSHST",
        (DSB, 3) => "DSB OSH",
        (DSB, 5) => "DSB NSHLD",
        (DSB, 6) => "DSB NSHST",
        (DSB, 7) => "DSB NSH",
        (DSB, 9) => "DSB ISHLD",
        (DSB, 10) => "DSB ISHST",
        (DSB, 11) => "DSB ISH",
        (DSB, 13) => "DSB LD",
        (DSB, 14) => "DSB ST",
        // Reserved options order as `SY`. 0 and 4 are SSBB and PSSBB.
        (DSB, 8 | 12 | 15) => "DSB SY",
        (DSB_NXS, 2) => "DSB OSHnXS",
        (DSB_NXS, 6) => "DSB NSHnXS",
        (DSB_NXS, 10) => "DSB ISHnXS",
        (DSB_NXS, 14) => "DSB SYnXS",
        _ => return None,
    })
}

/// Masks and values of instructions that write memory (Arm ARM, C4.1.94 "Loads and Stores").
const STORES: [(u32, u32); 9] = [
    (0x3f40_0000, 0x0800_0000), // STXR, STXP, STLR, CASP
    (0x3fa0_7c00, 0x0820_7c00), // CASP with acquire
    (0x3fa0_7c00, 0x08a0_7c00), // CAS
    (0x3b20_0c00, 0x3820_0000), // FEAT_LSE: LDADD … SWP
    (0x3a40_0000, 0x2800_0000), // STP, STNP
    (0x3ac0_0000, 0x3800_0000), // STR, STUR, STTR
    (0xfec0_0000, 0x3c80_0000), // STR, STUR of 128 bits
    (0x3fe0_0c00, 0x1900_0000), // STLUR
    (0xbe40_0000, 0x0c00_0000), // ST1 … ST4
];
/// Mask and value of LDAPR, which is encoded among the atomic operations of FEAT_LSE.
pub const LDAPR: (u32, u32) = (0x3fe0_fc00, 0x38a0_c000);
/// Masks and values of instructions among [`STORES`] that only read: LDAPR, LDRAA.
const LOADS: [(u32, u32); 2] = [LDAPR, (0xff20_0400, 0xf820_0400)];

/// Returns whether an instruction stores to memory. A pair is one store; `DC ZVA`, stores of
/// allocation tags (FEAT_MTE) and memory copies (FEAT_MOPS) are none.
pub fn is_store(word: u32) -> bool {
    let matches = |&(mask, value): &(u32, u32)| word & mask == value;
    STORES.iter().any(matches) && !LOADS.iter().any(matches)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodings of `aarch64-linux-gnu-as`.
    #[test]
    fn barriers_are_named_as_in_assembler_syntax() {
        for (word, name) in [
            (0xd503_3b9f, "DSB ISH"),
            (0xd503_3a9f, "DSB ISHST"),
            (0xd503_379f, "DSB NSH"),
            (0xd503_369f, "DSB NSHST"),
            (0xd503_399f, "DSB ISHLD"),
            (0xd503_339f, "DSB OSH"),
            (0xd503_3f9f, "DSB SY"),
            (0xd503_3d9f, "DSB LD"),
            (0xd503_3a3f, "DSB ISHnXS"),
            (0xd503_3fdf, "ISB"),
        ] {
            assert_eq!(barrier_name(word), Some(name), "{word:#x}");
        }
        for (word, what) in [
            (0xd503_3bbf, "dmb ish"),
            (0xd503_309f, "ssbb"),
            (0xd503_349f, "pssbb"),
            (0xd503_30ff, "sb"),
            (0xd503_201f, "nop"),
        ] {
            assert_eq!(barrier_name(word), None, "{what}");
        }
    }

    /// Encodings of `aarch64-linux-gnu-as -march=armv8.5-a`.
    #[test]
    fn stores_are_single_pairs_exclusives_and_atomics() {
        for (word, what) in [
            (0xf900_0020, "str x0, [x1]"),
            (0xb800_4c20, "str w0, [x1, #4]!"),
            (0xf800_8420, "str x0, [x1], #8"),
            (0x3900_0020, "strb w0, [x1]"),
            (0x7822_6820, "strh w0, [x1, x2]"),
            (0xf822_7820, "str x0, [x1, x2, lsl #3]"),
            (0xf81f_8020, "stur x0, [x1, #-8]"),
            (0xf800_0820, "sttr x0, [x1]"),
            (0xa900_0440, "stp x0, x1, [x2]"),
            (0xa981_0440, "stp x0, x1, [x2, #16]!"),
            (0x2881_0440, "stp w0, w1, [x2], #8"),
            (0xa800_0440, "stnp x0, x1, [x2]"),
            (0x3d80_0020, "str q0, [x1]"),
            (0x3c81_0c20, "str q0, [x1, #16]!"),
            (0x3c9f_0020, "stur q0, [x1, #-16]"),
            (0x3ca2_6820, "str q0, [x1, x2]"),
            (0xfd00_0020, "str d0, [x1]"),
            (0xbc22_6820, "str s0, [x1, x2]"),
            (0xad00_0440, "stp q0, q1, [x2]"),
            (0x4c00_7020, "st1 {v0.16b}, [x1]"),
            (0x4c9f_0020, "st4 {v0.16b-v3.16b}, [x1], #64"),
            (0x0d00_0420, "st1 {v0.b}[1], [x1]"),
            (0xc802_7c20, "stxr w2, x0, [x1]"),
            (0xc802_fc20, "stlxr w2, x0, [x1]"),
            (0x0802_fc20, "stlxrb w2, w0, [x1]"),
            (0xc822_0c20, "stxp w2, x0, x3, [x1]"),
            (0xc89f_fc20, "stlr x0, [x1]"),
            (0x089f_fc20, "stlrb w0, [x1]"),
            (0xc89f_7c20, "stllr x0, [x1]"),
            (0xd900_8020, "stlur x0, [x1, #8]"),
            (0x1900_8020, "stlurb w0, [x1, #8]"),
            (0xc8a2_7c20, "cas x2, x0, [x1]"),
            (0xc8e2_fc20, "casal x2, x0, [x1]"),
            (0x88e2_7c20, "casa w2, w0, [x1]"),
            (0x08a2_7c20, "casb w2, w0, [x1]"),
            (0x4820_7c82, "casp x0, x1, x2, x3, [x4]"),
            (0x4860_fc82, "caspal x0, x1, x2, x3, [x4]"),
            (0xf822_0020, "ldadd x2, x0, [x1]"),
            (0xf8e2_3020, "ldsetal x2, x0, [x1]"),
            (0xf822_003f, "stadd x2, [x1]"),
            (0xf8e2_8020, "swpal x2, x0, [x1]"),
            (0x3822_8020, "swpb w2, w0, [x1]"),
            (0xb8e2_6020, "ldumaxal w2, w0, [x1]"),
        ] {
            assert!(is_store(word), "{what}");
        }
    }

    /// Encodings of `aarch64-linux-gnu-as -march=armv8.5-a`.
    #[test]
    fn loads_are_no_stores() {
        for (word, what) in [
            (0xf940_0020, "ldr x0, [x1]"),
            (0xb840_4c20, "ldr w0, [x1, #4]!"),
            (0x3940_0020, "ldrb w0, [x1]"),
            (0xb980_0020, "ldrsw x0, [x1]"),
            (0x39c0_0020, "ldrsb w0, [x1]"),
            (0x78a2_6820, "ldrsh x0, [x1, x2]"),
            (0xf862_7820, "ldr x0, [x1, x2, lsl #3]"),
            (0xf85f_8020, "ldur x0, [x1, #-8]"),
            (0xf840_0820, "ldtr x0, [x1]"),
            (0xa940_0440, "ldp x0, x1, [x2]"),
            (0x6940_0440, "ldpsw x0, x1, [x2]"),
            (0xa840_0440, "ldnp x0, x1, [x2]"),
            (0x3dc0_0020, "ldr q0, [x1]"),
            (0x3cdf_0020, "ldur q0, [x1, #-16]"),
            (0x3ce2_6820, "ldr q0, [x1, x2]"),
            (0xfd40_0020, "ldr d0, [x1]"),
            (0xad40_0440, "ldp q0, q1, [x2]"),
            (0x4c40_7020, "ld1 {v0.16b}, [x1]"),
            (0x4d40_c020, "ld1r {v0.16b}, [x1]"),
            (0x0d40_0420, "ld1 {v0.b}[1], [x1]"),
            (0xc85f_7c20, "ldxr x0, [x1]"),
            (0xc85f_fc20, "ldaxr x0, [x1]"),
            (0xc87f_0c20, "ldxp x0, x3, [x1]"),
            (0xc8df_fc20, "ldar x0, [x1]"),
            (0x08df_fc20, "ldarb w0, [x1]"),
            (0xc8df_7c20, "ldlar x0, [x1]"),
            (0xf8bf_c020, "ldapr x0, [x1]"),
            (0x38bf_c020, "ldaprb w0, [x1]"),
            (0xd940_8020, "ldapur x0, [x1, #8]"),
            (0xf980_0020, "prfm pldl1keep, [x1]"),
            (0xf89f_8020, "prfum pldl1keep, [x1, #-8]"),
            (0xf8a2_6820, "prfm pldl1keep, [x1, x2]"),
            (0x5800_0000, "ldr x0, 130"),
            (0xd800_0000, "prfm pldl1keep, 134"),
            (0x8b02_0020, "add x0, x1, x2"),
            (0xd65f_03c0, "ret"),
            (0x9400_0000, "bl 140"),
            (0xd50b_7420, "dc zva, x0"),
        ] {
            assert!(!is_store(word), "{what}");
        }
    }
}
