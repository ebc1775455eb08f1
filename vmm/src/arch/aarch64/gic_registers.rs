// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Registers of a GICv3 that hold its state, in the order in which they are restored (Arm IHI 0069,
//! chapter 12; `Documentation/virt/kvm/devices/arm-vgic-v3.rst`).

use super::state::RegisterId;

/// Number of SGIs and PPIs, which precede the SPIs.
pub const PRIVATE_INTERRUPTS: u32 = 32;
/// Offset of `GICD_IIDR`, which is restored before all other registers.
pub const GICD_IIDR: u32 = 0x8;
/// `ICC_CTLR_EL1`.
pub const ICC_CTLR_EL1: RegisterId = RegisterId::system([3, 0, 12, 12, 4]);

/// Offset of the second frame of a redistributor, for SGIs and PPIs.
const SGI_BASE: u32 = 0x1_0000;

/// Consecutive 32-bit registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegisterRange {
    /// Offset of the first register.
    pub offset: u32,
    /// Number of registers.
    pub count: u32,
    /// Offset of the registers that clear the bits of these, for registers whose written zeros have
    /// no effect. `ISPENDR` needs none: KVM sets the latches to the written value.
    pub clear_offset: Option<u32>,
}

impl RegisterRange {
    const fn new(offset: u32, count: u32) -> Self {
        Self { offset, count, clear_offset: None }
    }

    const fn with_clear(offset: u32, clear_offset: u32, count: u32) -> Self {
        Self { offset, count, clear_offset: Some(clear_offset) }
    }
}

/// Returns the distributor registers of all SPIs of a GIC with `interrupts` interrupts, a multiple
/// of 32.
pub fn distributor(interrupts: u32) -> Vec<RegisterRange> {
    let first = |bits: u32| bits * PRIVATE_INTERRUPTS / 8;
    let spis = interrupts.saturating_sub(PRIVATE_INTERRUPTS);
    let range = |offset: u32, bits: u32| RegisterRange::new(offset + first(bits), bits * spis / 32);
    let set = |offset: u32, clear_offset: u32| {
        RegisterRange::with_clear(offset + first(1), clear_offset + first(1), spis / 32)
    };
    vec![
        RegisterRange::new(0x10, 1), // GICD_STATUSR
        range(0x80, 1),              // GICD_IGROUPR
        // Trigger modes and targets precede the pending state, which depends on them.
        range(0xc00, 2),            // GICD_ICFGR
        range(0x400, 8),            // GICD_IPRIORITYR
        range(0x6000, 64),          // GICD_IROUTER
        set(0x100, 0x180),          // GICD_ISENABLER, GICD_ICENABLER
        range(0x200, 1),            // GICD_ISPENDR
        set(0x300, 0x380),          // GICD_ISACTIVER, GICD_ICACTIVER
        RegisterRange::new(0x0, 1), // GICD_CTLR
    ]
}

/// Returns the registers of a redistributor.
pub fn redistributor() -> Vec<RegisterRange> {
    let private = |offset: u32, count: u32| RegisterRange::new(SGI_BASE + offset, count);
    let set = |offset: u32, clear_offset: u32| {
        RegisterRange::with_clear(SGI_BASE + offset, SGI_BASE + clear_offset, 1)
    };
    vec![
        RegisterRange::new(0x10, 2), // GICR_STATUSR, GICR_WAKER
        RegisterRange::new(0x70, 4), // GICR_PROPBASER, GICR_PENDBASER, 64 bits each
        private(0x80, 1),            // GICR_IGROUPR0
        private(0xc00, 2),           // GICR_ICFGR0, GICR_ICFGR1
        private(0x400, 8),           // GICR_IPRIORITYR0 to GICR_IPRIORITYR7
        set(0x100, 0x180),           // GICR_ISENABLER0, GICR_ICENABLER0
        private(0x200, 1),           // GICR_ISPENDR0
        set(0x300, 0x380),           // GICR_ISACTIVER0, GICR_ICACTIVER0
        // Bit EnableLPIs makes PROPBASER and PENDBASER read-only.
        RegisterRange::new(0x0, 1), // GICR_CTLR
    ]
}

/// Returns the registers of a CPU interface whose `ICC_CTLR_EL1` has the value `ctlr`.
pub fn cpu_interface(ctlr: u64) -> Vec<RegisterId> {
    // PRIbits, bits 10:8, is the number of priority bits less one. 5 bits need one active priorities
    // register per group, 6 need two, 7 need four.
    let active = match ctlr >> 8 & 7 {
        0..=4 => 1,
        5 => 2,
        _ => 4,
    };
    let register = |crn, crm, op2| RegisterId::system([3, 0, crn, crm, op2]);
    // ICC_CTLR_EL1 sets the number of priority bits that the other registers have.
    let mut registers = vec![
        register(12, 12, 5), // ICC_SRE_EL1
        ICC_CTLR_EL1,
        register(4, 6, 0),   // ICC_PMR_EL1
        register(12, 8, 3),  // ICC_BPR0_EL1
        register(12, 12, 3), // ICC_BPR1_EL1
    ];
    registers.extend((0..active).map(|index| register(12, 8, 4 + index))); // ICC_AP0Rn_EL1
    registers.extend((0..active).map(|index| register(12, 9, index))); // ICC_AP1Rn_EL1
    registers.push(register(12, 12, 6)); // ICC_IGRPEN0_EL1
    registers.push(register(12, 12, 7)); // ICC_IGRPEN1_EL1
    registers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributor_ranges_cover_the_spis_only() {
        let ranges = distributor(96);

        for range in [
            RegisterRange::with_clear(0x104, 0x184, 2),
            RegisterRange::new(0x204, 2),
            RegisterRange::new(0x420, 16),
            RegisterRange::new(0xc08, 4),
            RegisterRange::new(0x6100, 128),
        ] {
            assert!(ranges.contains(&range), "{range:x?}");
        }
    }

    #[test]
    fn control_registers_are_restored_after_the_tables() {
        assert_eq!(distributor(64).last().map(|range| range.offset), Some(0));
        assert_eq!(redistributor().last().map(|range| range.offset), Some(0));
    }

    #[test]
    fn priority_bits_determine_the_active_priorities_registers() {
        for (bits, count) in [(4, 1), (5, 1), (6, 2), (7, 4)] {
            let registers = cpu_interface((bits - 1) << 8);

            let active = |crm: u8, op2: u8| RegisterId::system([3, 0, 12, crm, op2]);
            let present = (0..4).filter(|index| registers.contains(&active(9, *index))).count();
            assert_eq!(present, count, "{bits}");
            assert!(registers.contains(&active(8, 4)));
            assert_eq!(registers.len(), 7 + 2 * count);
        }
    }
}
