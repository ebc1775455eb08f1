// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The arm64 guest: doorbells, stage-1 entries (Arm manual, D8.2 and D8.3), values of the system
//! registers that enable MMU and caches (D19.2), and descriptions of exceptions (`ESR_EL1`,
//! D19.2.37).

use crate::guest::{
    mailbox::{GuestException, Mailbox},
    tables::GuestArch,
};
use granule_types::{guest_mode::GuestMode, units::GuestAddress};

/// Address of the first doorbell. It is in no memslot, so every store exits to user space.
pub const FIRST_DOORBELL: GuestAddress = GuestAddress(0x8000);

const VALID: u64 = 1 << 0;
/// Descriptor type: table at levels 0 to 2, page at level 3; a block if clear.
const TABLE_OR_PAGE: u64 = 1 << 1;
/// Attribute 1 of [`MAIR`]: write-back cacheable.
const WRITE_BACK: u64 = 1 << 2;
const INNER_SHAREABLE: u64 = 3 << 8;
/// Access flag, set so that no access takes an access flag fault.
const ACCESSED: u64 = 1 << 10;
const PRIVILEGED_EXECUTE_NEVER: u64 = 1 << 53;

pub const fn guest_arch(mode: GuestMode) -> GuestArch {
    GuestArch {
        mode,
        first_doorbell: Some(FIRST_DOORBELL),
        address_bits: mode.va_bits,
        // Without FEAT_LPA2, blocks start at level 1 with 4K granules and at level 2 with others.
        first_block_level: if mode.page_shift == 12 { 1 } else { 2 },
        table_attributes: TABLE_OR_PAGE | VALID,
        block_attributes: ACCESSED | VALID,
        page_attributes: ACCESSED | TABLE_OR_PAGE | VALID,
        normal_memory: WRITE_BACK | INNER_SHAREABLE,
        device_memory: PRIVILEGED_EXECUTE_NEVER,
    }
}

pub fn explain_exception(mailbox: &Mailbox) -> GuestException {
    GuestException {
        // Aborts and PC alignment faults set FAR_EL1.
        has_address: matches!(exception_class(mailbox.syndrome), 0x20 | 0x21 | 0x22 | 0x24 | 0x25),
        detail: describe_exception(mailbox.vector, mailbox.syndrome),
    }
}

/// Returns the exception class, bits 31:26 of the syndrome.
const fn exception_class(syndrome: u64) -> u64 {
    (syndrome >> 26) & 0x3f
}

/// Describes an exception by its vector (0 to 15, in the order of the vector table) and syndrome.
fn describe_exception(vector: u64, syndrome: u64) -> String {
    let kind = match vector % 4 {
        0 => "synchronous exception",
        1 => return "unexpected interrupt (IRQ)".to_owned(),
        2 => return "unexpected interrupt (FIQ)".to_owned(),
        _ => return "SError: an asynchronous memory error".to_owned(),
    };
    let what = match exception_class(syndrome) {
        0x00 => "an unknown or trapped instruction",
        0x07 => "a trapped floating-point instruction",
        0x0d => "a branch to an invalid target (BTI)",
        0x0e => "an illegal execution state",
        0x15 => "a supervisor call",
        0x16 => "a hypervisor call",
        0x18 => "a trapped system register or instruction",
        0x20 | 0x21 => {
            return format!("{kind}: instruction abort, {}", describe_fault_status(syndrome));
        }
        0x22 => "a misaligned program counter",
        0x24 | 0x25 => {
            let access = if syndrome & (1 << 6) != 0 { "write" } else { "read" };
            return format!(
                "{kind}: data abort by a {access}, {}",
                describe_fault_status(syndrome)
            );
        }
        0x26 => "a misaligned stack pointer",
        0x2f => "an SError",
        0x3c => "a breakpoint instruction",
        _ => return format!("{kind} of class {:#x}", exception_class(syndrome)),
    };
    format!("{kind}: {what}")
}

/// Describes the fault status of an abort: bits 5:0, of which bits 1:0 are the level.
fn describe_fault_status(syndrome: u64) -> String {
    let level = syndrome & 3;
    match syndrome & 0x3f {
        0x00..=0x03 => format!("address size fault at level {level}"),
        0x04..=0x07 => format!("translation fault at level {level}"),
        0x08..=0x0b => format!("access flag fault at level {level}"),
        0x0c..=0x0f => format!("permission fault at level {level}"),
        0x10 => "external abort".to_owned(),
        0x14..=0x17 => format!("external abort on a table walk at level {level}"),
        0x21 => "alignment fault".to_owned(),
        0x30 => "TLB conflict abort".to_owned(),
        status => format!("fault status {status:#x}"),
    }
}

/// Value of `MAIR_EL1`: attribute 0 is Device-nGnRnE, attribute 1 is write-back cacheable.
pub const MAIR: u64 = 0xff << 8;

/// Returns the requested guest mode, or by default the widest of 48, 40 and 36 bits, if the test
/// and KVM support it. KVM supports IPAs of up to `limit` bits.
pub fn choose_mode(requested: Option<GuestMode>, limit: u8) -> Result<GuestMode, String> {
    let Some(mode) = requested else {
        let defaults = [GuestMode::P48V48_4K, GuestMode::P40V48_4K, GuestMode::P36V48_4K];
        return defaults.into_iter().find(|mode| mode.pa_bits <= limit).ok_or_else(|| {
            format!(
                "this host's KVM supports {limit} bits of guest-physical address; no guest mode \
                 fits"
            )
        });
    };
    let (name, bits) = (mode.name, mode.pa_bits);
    let too_wide = bits > 48 && mode.page_shift != 16;
    if mode.va_bits > 48 || too_wide || bits == 0 {
        return Err(format!(
            "unsupported guest mode {name}: physical addresses are limited to 48 bits with 4K \
             granules, virtual addresses to 48 bits; use 2 (P48V48_4K), 5 (P40V48_4K) or 11 \
             (P36V48_4K)"
        ));
    }
    if bits > limit {
        return Err(format!(
            "guest mode {name} has {bits} bits of guest-physical address; this host's KVM supports \
             at most {limit} (KVM_CAP_ARM_VM_IPA_SIZE): use a narrower mode, or omit -m for the \
             default"
        ));
    }
    Ok(mode)
}

/// Checks that the CPU supports the mode's granule (TGran4, TGran64 and TGran16 of
/// `ID_AA64MMFR0_EL1`).
pub fn check_granule(mode: GuestMode, mmfr0: u64) -> Result<(), String> {
    let field = |shift: u32| (mmfr0 >> shift) & 0xf;
    let is_supported = match mode.page_shift {
        12 => field(28) < 8,
        14 => field(20) != 0,
        _ => field(24) < 8,
    };
    if is_supported {
        return Ok(());
    }
    Err(format!(
        "guest mode {} needs {} granules, which this CPU does not support \
         (ID_AA64MMFR0_EL1 is {mmfr0:#x})",
        mode.name,
        mode.page_size()
    ))
}

/// Returns the reset value of `SCTLR_EL1` with MMU (M), data caches (C) and instruction cache (I)
/// enabled.
pub const fn sctlr(reset: u64) -> u64 {
    reset | 1 << 0 | 1 << 2 | 1 << 12
}

/// Returns `TCR_EL1` for a mode: no walks of TTBR1 (EPD1), walks of TTBR0 write-back cacheable and
/// inner shareable.
pub const fn tcr(mode: GuestMode) -> u64 {
    let size = 64 - mode.va_bits as u64;
    let walks = 1 << 8 | 1 << 10 | 3 << 12;
    let granule: u64 = match mode.page_shift {
        16 => 1,
        14 => 2,
        _ => 0,
    };
    let physical: u64 = match mode.pa_bits {
        ..=32 => 0,
        33..=36 => 1,
        37..=40 => 2,
        41..=42 => 3,
        43..=44 => 4,
        45..=48 => 5,
        _ => 6,
    };
    size | walks | granule << 14 | 1 << 23 | physical << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exceptions_are_described() {
        for (vector, syndrome, has_address, text) in [
            (4, 0x9600_0047, true, "data abort by a write, translation fault at level 3"),
            (4, 0x9600_000e, true, "data abort by a read, permission fault at level 2"),
            (4, 0x8600_000f, true, "instruction abort, permission fault at level 3"),
            (0, 0x3f << 26, false, "synchronous exception of class 0x3f"),
            (7, 0, false, "SError"),
            (4, 0x0200_0000, false, "an unknown or trapped instruction"),
        ] {
            let crash = explain_exception(&Mailbox { vector, syndrome, ..Mailbox::default() });

            assert_eq!(crash.has_address, has_address, "{syndrome:#x}");
            assert!(crash.detail.contains(text), "{}", crash.detail);
        }
    }

    fn mode(name: &str) -> GuestMode {
        name.parse().unwrap()
    }

    #[test]
    fn tcr_holds_widths_and_granule() {
        for (name, size, granule, physical) in [
            ("P48V48_4K", 16, 0, 5),
            ("P40V48_16K", 16, 2, 2),
            ("P36V47_16K", 17, 2, 1),
            ("P52V48_64K", 16, 1, 6),
        ] {
            let tcr = tcr(mode(name));

            assert_eq!(tcr & 0x3f, size, "{name}: T0SZ");
            assert_eq!((tcr >> 14) & 3, granule, "{name}: TG0");
            assert_eq!((tcr >> 32) & 7, physical, "{name}: IPS");
            assert_eq!((tcr >> 8) & 0x3f, 0b11_0101, "{name}: SH0, ORGN0, IRGN0");
            assert_eq!((tcr >> 23) & 1, 1, "{name}: EPD1");
        }
    }

    #[test]
    fn unsupported_modes_and_granules_are_refused() {
        for name in ["P52V48_4K", "PXXV48_4K", "P47V64_4K", "P44V64_4K"] {
            assert!(choose_mode(Some(mode(name)), 52).is_err(), "{name}");
        }
        for name in ["P48V48_4K", "P40V48_4K", "P36V48_4K", "P52V48_64K"] {
            assert!(choose_mode(Some(mode(name)), 52).is_ok(), "{name}");
        }
        assert!(choose_mode(Some(mode("P48V48_4K")), 48).is_ok());
        let error = choose_mode(Some(mode("P48V48_4K")), 44).unwrap_err();
        assert!(error.contains("at most 44"), "{error}");
        // cortex-a72 supports 4K and 64K, but not 16K.
        for (name, mmfr0, is_supported) in [
            ("P48V48_4K", 0x0000_1124, true),
            ("P48V48_64K", 0x0000_1124, true),
            ("P48V48_16K", 0x0000_1124, false),
            ("P48V48_4K", 0xf000_0000, false),
        ] {
            assert_eq!(check_granule(mode(name), mmfr0).is_ok(), is_supported, "{name}");
        }
    }

    #[test]
    fn the_default_mode_depends_on_the_address_width() {
        for (bits, name) in
            [(52, "P48V48_4K"), (48, "P48V48_4K"), (44, "P40V48_4K"), (36, "P36V48_4K")]
        {
            assert_eq!(choose_mode(None, bits).unwrap().name, name);
        }
        assert!(choose_mode(None, 34).is_err());
    }

    #[test]
    fn sctlr_enables_mmu_and_caches_and_keeps_reset_bits() {
        assert_eq!(sctlr(0x00c5_0078), 0x00c5_107d);
    }
}
