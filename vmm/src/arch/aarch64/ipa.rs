// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The width of a VM's guest-physical addresses (IPA).
//!
//! Each bit may cost: with 4K pages stage 2 has two levels up to 34 bits, three up to 43 and four
//! from 44 on, and every level is one more access in every walk. So a VM gets the smallest width
//! that holds its memory, 32 bits at least (the smallest that KVM makes, `KVM_CREATE_VM` in the
//! kernel's `Documentation/virt/kvm/api.rst`). A guest on large pages gets as many levels as blocks of
//! that size take: where the tables begin with entries of 2M, a page of 1G is 512 of them.

use granule_types::units::Bytes;
use thiserror::Error;

/// The smallest width KVM makes.
const SMALLEST: u8 = 32;
/// The width of a VM where the kernel offers no choice (before Linux 4.20).
const FIXED: u8 = 40;

/// Why a width cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum IpaError {
    /// More than the host can.
    #[error(
        "{asked} bits of guest-physical address were asked for; this host's KVM gives {SMALLEST} \
         to {limit} (KVM_CAP_ARM_VM_IPA_SIZE)"
    )]
    Beyond {
        /// What was asked for.
        asked: u8,
        /// The host's limit.
        limit: u8,
    },
    /// Too few for the memory.
    #[error("guest memory ends at {end:#x}, which takes {needed} bits of address, not {asked}")]
    TooFew {
        /// What was asked for.
        asked: u8,
        /// What it takes.
        needed: u8,
        /// The end of guest memory.
        end: u64,
    },
}

/// The limit behind the value of `KVM_CAP_ARM_VM_IPA_SIZE`; 0 means that there is no choice.
pub fn limit(capability: i32) -> u8 {
    match u8::try_from(capability) {
        Ok(bits) if bits >= SMALLEST => bits,
        _ => FIXED,
    }
}

/// The width for memory that ends before `end`: as asked, or the smallest that fits.
///
/// # Errors
/// The memory does not fit what was asked for, or the host cannot give it.
pub const fn choose(end: u64, asked: Option<u8>, limit: u8) -> Result<u8, IpaError> {
    let needed = bits_of(end);
    let bits = match asked {
        Some(asked) if asked < needed => {
            return Err(IpaError::TooFew { asked, needed, end });
        }
        Some(asked) => asked,
        None => needed,
    };
    if bits < SMALLEST || bits > limit {
        return Err(IpaError::Beyond { asked: bits, limit });
    }
    Ok(bits)
}

/// The smallest width whose tables have blocks of `page` bytes, with a granule of `granule`.
///
/// KVM makes (bits - 8) / (bits of an index) levels, as it puts up to 16 tables side by side instead
/// of a level (`stage2_pgtable_levels` in the kernel's `asm/stage2_pgtable.h`).
pub fn for_blocks(page: Bytes, granule: Bytes) -> u8 {
    let offset = granule.0.trailing_zeros();
    let index = offset - 3;
    let levels = page.0.trailing_zeros().saturating_sub(offset) / index + 1;
    u8::try_from(levels * index + 8).map_or(SMALLEST, |bits| bits.max(SMALLEST))
}

/// The smallest width, at least [`SMALLEST`], that holds every address before `end`.
const fn bits_of(end: u64) -> u8 {
    let mut bits = SMALLEST;
    while bits < 64 && (end.saturating_sub(1) >> bits) != 0 {
        bits += 1;
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_width_that_fits_is_taken() {
        for (end, bits) in [
            (0x10_0000, 32),
            (1 << 32, 32),
            ((1 << 32) + 1, 33),
            (1 << 40, 40),
            (0xffff_ffe0_0000, 48),
        ] {
            assert_eq!(choose(end, None, 48), Ok(bits), "{end:#x}");
        }
    }

    #[test]
    fn a_page_of_1g_takes_a_third_level() {
        let small = Bytes::kib(4);

        assert_eq!(for_blocks(Bytes::gib(1), small), 35);
        assert_eq!(for_blocks(Bytes::mib(2), small), 32);
        assert_eq!(for_blocks(small, small), 32);
        assert_eq!(for_blocks(Bytes::mib(512), Bytes::kib(64)), 34);
    }

    #[test]
    fn a_width_can_be_asked_for() {
        assert_eq!(choose(1 << 32, Some(44), 48), Ok(44));
    }

    #[test]
    fn widths_beyond_the_host_and_below_the_memory_are_refused() {
        assert_eq!(
            choose(1 << 32, Some(49), 48),
            Err(IpaError::Beyond {
                asked: 49,
                limit: 48
            })
        );
        assert_eq!(
            choose(1 << 41, None, 40),
            Err(IpaError::Beyond {
                asked: 41,
                limit: 40
            })
        );
        assert!(matches!(
            choose(1 << 41, Some(40), 48),
            Err(IpaError::TooFew { needed: 41, .. })
        ));
        assert!(choose(0, Some(31), 48).is_err());
    }

    #[test]
    fn a_kernel_without_the_choice_has_40_bits() {
        assert_eq!(limit(0), 40);
        assert_eq!(limit(-1), 40);
        assert_eq!(limit(48), 48);
    }
}
