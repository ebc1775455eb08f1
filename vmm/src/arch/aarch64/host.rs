// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! KVM on an arm64 host: tracepoints, the cause of a missing driver, and event filters that count
//! stage-2 aborts by type, level and access.
//!
//! The tracepoint `kvm_guest_fault` records syndrome (`hsr`) and IPA of each abort. The kernel's
//! event filters cannot compare a masked field, but they can test bits of the syndrome. In the
//! fault status code (Arm ARM D19.2.39), bits 3:2 are 01 for a translation fault, 10 for an access
//! flag fault and 11 for a permission fault; bits 1:0 are the level. Bit 28 distinguishes data
//! aborts from instruction aborts, and bit 6 is set for a write. Aborts below the start of memory
//! are device accesses and are not counted.

use std::ffi::CStr;

/// Tracepoints to count, in the kernel's `kvm` group: guest aborts and exits, and the
/// mmu_notifier calls of the host's memory management.
pub const TRACEPOINTS: &[&str] =
    &["kvm_guest_fault", "kvm_access_fault", "kvm_exit", "kvm_unmap_hva_range", "kvm_set_spte_hva"];

/// Returns the frequency in hertz of the counter that host and guest share (`CNTFRQ_EL0`).
#[cfg(target_arch = "aarch64")]
#[must_use]
pub fn counter_frequency() -> u64 {
    let frequency;
    // SAFETY: the instruction reads a register and nothing else. Linux lets user space read it, or
    // emulates the access where it is trapped (`cntfrq_read_handler()` of `arch/arm64/kernel/traps.c`).
    unsafe {
        std::arch::asm!("mrs {}, cntfrq_el0", out(reg) frequency,
            options(nomem, nostack, preserves_flags));
    }
    frequency
}

/// Returns the possible causes of a missing KVM driver.
pub fn explain_missing_driver() -> String {
    "the kernel needs CONFIG_KVM and must be booted at EL2, which a virtual machine without nested \
     virtualisation does not provide (`dmesg | grep -i kvm` reports which)"
        .to_owned()
}

/// Legacy system calls, which newer architectures lack; arm64 has none.
pub const LEGACY_SYSCALLS: &[i64] = &[];

/// Tracepoint of stage-2 aborts.
pub const FAULT_TRACEPOINT: &str = "kvm_guest_fault";

/// Start of the names in [`FAULT_FILTERS`] that count aborts by access.
pub const ACCESS_PREFIX: &str = "by.";

/// Event filters that count stage-2 aborts, each with the counter's name.
///
/// Level 0 has tables only, of guests with more than 44 bits of addresses; KVM does not use level -1.
pub const FAULT_FILTERS: &[(&str, &CStr)] = &[
    (
        "translation.level0",
        c"ipa >= 0x40000000 && hsr & 4 && !(hsr & 8) && !(hsr & 1) && !(hsr & 2)",
    ),
    ("translation.level1", c"ipa >= 0x40000000 && hsr & 4 && !(hsr & 8) && hsr & 1 && !(hsr & 2)"),
    ("translation.level2", c"ipa >= 0x40000000 && hsr & 4 && !(hsr & 8) && hsr & 2 && !(hsr & 1)"),
    ("translation.level3", c"ipa >= 0x40000000 && hsr & 4 && !(hsr & 8) && hsr & 2 && hsr & 1"),
    ("access-flag.level1", c"ipa >= 0x40000000 && hsr & 8 && !(hsr & 4) && hsr & 1 && !(hsr & 2)"),
    ("access-flag.level2", c"ipa >= 0x40000000 && hsr & 8 && !(hsr & 4) && hsr & 2 && !(hsr & 1)"),
    ("access-flag.level3", c"ipa >= 0x40000000 && hsr & 8 && !(hsr & 4) && hsr & 2 && hsr & 1"),
    ("permission.level1", c"ipa >= 0x40000000 && hsr & 4 && hsr & 8 && hsr & 1 && !(hsr & 2)"),
    ("permission.level2", c"ipa >= 0x40000000 && hsr & 4 && hsr & 8 && hsr & 2 && !(hsr & 1)"),
    ("permission.level3", c"ipa >= 0x40000000 && hsr & 4 && hsr & 8 && hsr & 2 && hsr & 1"),
    ("by.instruction", c"ipa >= 0x40000000 && !(hsr & 0x10000000)"),
    ("by.read", c"ipa >= 0x40000000 && hsr & 0x10000000 && !(hsr & 0x40)"),
    ("by.write", c"ipa >= 0x40000000 && hsr & 0x10000000 && hsr & 0x40"),
];

/// Field of [`FAULT_TRACEPOINT`] with the syndrome: tracepoint and field.
pub const FAULT_SYNDROME: Option<(&str, &str)> = Some((FAULT_TRACEPOINT, "hsr"));

/// Function of the kernel that maps the memory of a fault at stage 2, and the register with the size of
/// the page or block, its third argument.
pub const MAP_FUNCTION: Option<(&str, &str)> = Some(("kvm_pgtable_stage2_map", "%x2"));

/// Event filter for stage-2 aborts on memory.
pub const MEMORY_FILTER: &CStr = c"ipa >= 0x40000000";

/// Returns the name of an abort in [`FAULT_FILTERS`], by type and level, or `None` if these count no
/// such abort.
#[must_use]
pub fn fault_name(syndrome: u64) -> Option<&'static str> {
    let types = ["translation.", "access-flag.", "permission."];
    let prefix = types.get(usize::try_from((syndrome >> 2 & 3).checked_sub(1)?).ok()?)?;
    let level = match syndrome & 3 {
        0 => "level0",
        1 => "level1",
        2 => "level2",
        _ => "level3",
    };
    fault_names().find(|name| name.strip_prefix(prefix) == Some(level))
}

/// Returns the names of aborts by type and level.
pub fn fault_names() -> impl Iterator<Item = &'static str> {
    FAULT_FILTERS.iter().map(|(name, _)| *name).filter(|name| !name.starts_with(ACCESS_PREFIX))
}

/// Event filters that count stage-2 aborts by type, each with the event's name.
pub const FAULT_TYPE_FILTERS: &[(&str, &CStr)] = &[
    ("translation_faults", c"hsr & 4 && !(hsr & 8)"),
    ("access_flag_faults", c"hsr & 8 && !(hsr & 4)"),
    ("permission_faults", c"hsr & 4 && hsr & 8"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::MEMORY_START;

    /// Returns whether a filter accepts the syndrome of a guest's access to memory. `&&` joins its
    /// terms: one may exclude device accesses, each other one tests bits of the syndrome.
    fn filter_accepts(filter: &CStr, syndrome: u64) -> bool {
        let memory = format!("ipa >= {:#x}", MEMORY_START.0);
        filter.to_str().unwrap().split(" && ").filter(|term| *term != memory).all(|term| {
            let (expected, bits) = match term.strip_prefix("!(hsr & ") {
                Some(bits) => (false, bits.trim_end_matches(')')),
                None => (true, term.strip_prefix("hsr & ").unwrap()),
            };
            let bits = match bits.strip_prefix("0x") {
                Some(hex) => u64::from_str_radix(hex, 16).unwrap(),
                None => bits.parse().unwrap(),
            };
            (syndrome & bits != 0) == expected
        })
    }

    #[test]
    fn the_counts_by_level_exclude_device_accesses() {
        let memory = format!("ipa >= {:#x} && ", MEMORY_START.0);

        assert!(FAULT_FILTERS.iter().all(|(_, f)| f.to_str().unwrap().starts_with(&memory)));
        assert_eq!(format!("{} && ", MEMORY_FILTER.to_str().unwrap()), memory);
    }

    fn names_accepting<'a>(filters: &[(&'a str, &CStr)], syndrome: u64) -> Vec<&'a str> {
        let accepting = filters.iter().filter(|(_, filter)| filter_accepts(filter, syndrome));
        accepting.map(|(name, _)| *name).collect()
    }

    #[test]
    fn each_abort_is_counted_once_by_type_and_once_by_access() {
        for (status, kind) in [(0x04, "translation"), (0x08, "access-flag"), (0x0c, "permission")] {
            // Only a table can be missing at level 0.
            let first_level = u64::from(kind != "translation");
            for level in first_level..4 {
                for (class, access) in [
                    (0x20 << 26, "by.instruction"),
                    (0x24 << 26, "by.read"),
                    (0x24 << 26 | 1 << 6, "by.write"),
                ] {
                    let syndrome = class | status | level;
                    let names = names_accepting(FAULT_FILTERS, syndrome);
                    let types = names_accepting(FAULT_TYPE_FILTERS, syndrome);

                    assert_eq!(names, [format!("{kind}.level{level}").as_str(), access]);
                    assert_eq!(fault_name(syndrome), Some(names[0]));
                    assert_eq!(types, [format!("{}_faults", kind.replace('-', "_"))]);
                }
            }
        }
    }
}
