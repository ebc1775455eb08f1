// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The width of a VM's intermediate physical addresses (IPA).
//!
//! With 4K pages stage 2 has two levels up to 34 bits, three up to 43 and four from 44 on, and each
//! level is one more access in every walk. A VM therefore gets the smallest width that holds its memory,
//! at least 32 bits (the minimum of `KVM_CREATE_VM`, `Documentation/virt/kvm/api.rst`). A guest on huge
//! pages gets at least the levels that blocks of that size need: with tables that start at 2M entries,
//! a 1G page would be 512 entries.

use granule_types::units::{Bytes, GuestAddress};
use thiserror::Error;

/// Smallest IPA width of KVM.
const MIN_BITS: u8 = 32;
/// IPA width of kernels without a choice (before Linux 4.20).
const FIXED_BITS: u8 = 40;

/// Error returned when an IPA width is not available.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum IpaError {
    /// The host does not support the width.
    #[error(
        "{requested} bits of guest-physical address are not available: this host's KVM supports \
         {MIN_BITS} to {limit} (KVM_CAP_ARM_VM_IPA_SIZE); use a smaller --ipa-bits or less memory"
    )]
    Unsupported {
        /// The requested or required width.
        requested: u8,
        /// The largest supported width.
        limit: u8,
    },
    /// The memory needs more bits.
    #[error("--ipa-bits {requested}: guest memory ends at {end:#x} and needs {needed}")]
    TooFew {
        /// The requested width.
        requested: u8,
        /// The required width.
        needed: u8,
        /// The end of guest memory.
        end: u64,
    },
}

/// Returns the largest IPA width, from the value of `KVM_CAP_ARM_VM_IPA_SIZE`; 0 means no choice.
pub fn limit(capability: i32) -> u8 {
    match u8::try_from(capability) {
        Ok(bits) if bits >= MIN_BITS => bits,
        _ => FIXED_BITS,
    }
}

/// Returns the IPA width for memory that ends before `end`: the requested one, or the smallest that
/// fits.
///
/// # Errors
/// The memory does not fit the requested width, or the host does not support it.
pub const fn choose(end: GuestAddress, requested: Option<u8>, limit: u8) -> Result<u8, IpaError> {
    let end = end.0;
    let needed = bits_of(end);
    let bits = match requested {
        Some(requested) if requested < needed => {
            return Err(IpaError::TooFew { requested, needed, end });
        }
        Some(requested) => requested,
        None => needed,
    };
    if bits < MIN_BITS || bits > limit {
        return Err(IpaError::Unsupported { requested: bits, limit });
    }
    Ok(bits)
}

/// Returns the smallest width whose tables have blocks of `page` bytes, with pages of `granule` bytes.
///
/// The number of levels is (bits - 8) / (index bits), because KVM concatenates up to 16 tables at the
/// start level (`stage2_pgtable_levels` in the kernel's `asm/stage2_pgtable.h`).
pub fn for_blocks(page: Bytes, granule: Bytes) -> u8 {
    let offset = granule.0.trailing_zeros();
    let index = offset - 3;
    let levels = page.0.trailing_zeros().saturating_sub(offset) / index + 1;
    u8::try_from(levels * index + 8).map_or(MIN_BITS, |bits| bits.max(MIN_BITS))
}

/// Returns the smallest width, at least [`MIN_BITS`], that holds every address before `end`.
const fn bits_of(end: u64) -> u8 {
    let mut bits = MIN_BITS;
    while bits < 64 && (end.saturating_sub(1) >> bits) != 0 {
        bits += 1;
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_width_that_fits_is_chosen() {
        for (end, bits) in [
            (0x10_0000, 32),
            (1 << 32, 32),
            ((1 << 32) + 1, 33),
            (1 << 40, 40),
            (0xffff_ffe0_0000, 48),
        ] {
            assert_eq!(choose(GuestAddress(end), None, 48), Ok(bits), "{end:#x}");
        }
    }

    #[test]
    fn a_1g_page_needs_a_third_level() {
        let small = Bytes::kib(4);

        assert_eq!(for_blocks(Bytes::gib(1), small), 35);
        assert_eq!(for_blocks(Bytes::mib(2), small), 32);
        assert_eq!(for_blocks(small, small), 32);
        assert_eq!(for_blocks(Bytes::mib(512), Bytes::kib(64)), 34);
    }

    #[test]
    fn a_width_can_be_asked_for() {
        assert_eq!(choose(GuestAddress(1 << 32), Some(44), 48), Ok(44));
    }

    #[test]
    fn widths_above_the_host_limit_or_below_the_memory_are_refused() {
        assert_eq!(
            choose(GuestAddress(1 << 32), Some(49), 48),
            Err(IpaError::Unsupported { requested: 49, limit: 48 })
        );
        assert_eq!(
            choose(GuestAddress(1 << 41), None, 40),
            Err(IpaError::Unsupported { requested: 41, limit: 40 })
        );
        assert!(matches!(
            choose(GuestAddress(1 << 41), Some(40), 48),
            Err(IpaError::TooFew { needed: 41, .. })
        ));
        assert!(choose(GuestAddress(0), Some(31), 48).is_err());
    }

    #[test]
    fn a_kernel_without_the_capability_has_40_bits() {
        assert_eq!(limit(0), 40);
        assert_eq!(limit(-1), 40);
        assert_eq!(limit(48), 48);
    }
}
