// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Properties of an arm64 host.

use std::{collections::BTreeMap, fs};

/// Returns the CPU features that affect the fault path: `fwb`, `bbm` (its level) and `tlbirange`,
/// from `ID_AA64ISAR0_EL1` and `ID_AA64MMFR2_EL1` (Arm manual, D19.2).
///
/// Linux hides these fields from user space (`ftr_id_aa64mmfr2` in `cpufeature.c`), but a vCPU's
/// copies of the registers, read through KVM, contain them.
pub fn stage2_features(isar0: u64, mmfr2: u64) -> BTreeMap<String, u64> {
    let field = |register: u64, shift: u32| (register >> shift) & 0xf;
    [
        ("bbm", field(mmfr2, 52)),
        ("fwb", field(mmfr2, 40)),
        ("tlbirange", u64::from(field(isar0, 56) >= 2)),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

/// Returns the cache features that user space can read: `dic` and `idc` (`CTR_EL0`).
#[cfg(target_arch = "aarch64")]
pub fn cache_features() -> BTreeMap<String, u64> {
    let ctr: u64;
    // SAFETY: user space can read CTR_EL0; where CPUs differ, Linux returns a value that is safe on
    // all of them (`ctr_read_handler()`).
    unsafe {
        std::arch::asm!("mrs {}, ctr_el0", out(reg) ctr, options(nomem, nostack, preserves_flags));
    }
    [("idc", (ctr >> 28) & 1), ("dic", (ctr >> 29) & 1)]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
}

/// Returns the CPU's name, from its identification register (`MIDR_EL1`).
pub fn cpu_name() -> Option<String> {
    let path = "/sys/devices/system/cpu/cpu0/regs/identification/midr_el1";
    let text = fs::read_to_string(path).ok()?;
    let midr = u64::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()?;
    Some(cpu_name_of_midr(midr))
}

/// Returns the CPU name and revision that `midr` encodes (`arch/arm64/include/asm/cputype.h`).
fn cpu_name_of_midr(midr: u64) -> String {
    let name = match ((midr >> 24) & 0xff, (midr >> 4) & 0xfff) {
        (0x41, 0xd03) => "cortex-a53",
        (0x41, 0xd07) => "cortex-a57",
        (0x41, 0xd08) => "cortex-a72",
        (0x41, 0xd0b) => "cortex-a76",
        (0x41, 0xd0c) => "neoverse-n1",
        (0x41, 0xd40) => "neoverse-v1",
        (0x41, 0xd49) => "neoverse-n2",
        (0x41, 0xd4f) => "neoverse-v2",
        (0x41, 0xd84) => "neoverse-v3",
        (0x41, 0xd8e) => "neoverse-n3",
        (0x46, 0x001) => "a64fx",
        (0x48, 0xd01) => "kunpeng-920",
        (0xc0, 0xac3) => "ampere-1",
        _ => return format!("midr {midr:#x}"),
    };
    format!("{name} r{}p{}", (midr >> 20) & 0xf, midr & 0xf)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stage2_features_are_read_from_the_id_registers() {
        let none = stage2_features(1 << 56, 0);
        let all = stage2_features(2 << 56, 2 << 52 | 1 << 40);

        assert!(none.values().all(|value| *value == 0));
        assert_eq!(
            all.into_iter().collect::<Vec<_>>(),
            [("bbm", 2), ("fwb", 1), ("tlbirange", 1)].map(|(n, v)| (n.to_owned(), v))
        );
    }

    #[test]
    fn a_cpu_is_named_by_its_part_or_by_its_midr() {
        assert_eq!(cpu_name_of_midr(0x413f_d0c1), "neoverse-n1 r3p1");
        assert_eq!(cpu_name_of_midr(0x1234_5678), "midr 0x12345678");
    }
}
