// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How far a guest's physical addresses reach.
//!
//! A VM has no width of its own: it is the CPU's (CPUID leaf `0x8000_0008`), unless KVM says that
//! the second stage reaches less far. On AMD's CPUs 12 GiB belong to HyperTransport, and no memory
//! can be there: from family 17h on those at the end of the CPU's addresses, less what memory
//! encryption takes of their width (leaf `0x8000_001f`); before it those below 1T, where all memory
//! stays then. The kernel's own tests keep to the same (`vm_compute_max_gfn()` in
//! `tools/testing/selftests/kvm/lib/x86_64/processor.c`).

use granule_types::units::GuestAddress;
use thiserror::Error;

/// What HyperTransport takes.
const HYPERTRANSPORT: u64 = 12 << 30;

/// The first family whose HyperTransport is at the end of its addresses.
const AT_THE_END: u32 = 0x17;

/// The width from which on HyperTransport is within it.
const VISIBLE: u8 = 40;

/// The memory does not fit the addresses asked for.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{asked} bits of guest-physical address were asked for; guest memory ends at {end:#x}, and this \
     host's CPU has {limit} bits"
)]
pub struct WidthError {
    asked: u8,
    end: u64,
    limit: u8,
}

/// The width by `EAX` of leaf `0x8000_0008`: bits 23:16, what the second stage reaches, or where
/// that is 0 bits 7:0, what the CPU has.
pub const fn width(eax: u32) -> u8 {
    let [physical, _, guest, _] = eax.to_le_bytes();
    if guest == 0 { physical } else { guest }
}

/// What the host's own CPUID says of an AMD CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Amd {
    /// `EAX` of leaf 1: the family, among others.
    pub signature: u32,
    /// Bits 7:0 of `EAX` of leaf `0x8000_0008`: its own width.
    pub width: u8,
    /// `EBX` of leaf `0x8000_001f`, 0 where there is none: by how many bits encryption narrows it,
    /// among others.
    pub encryption: u32,
}

impl Amd {
    /// Its family: bits 11:8, and where these are all set bits 27:20 on top.
    const fn family(self) -> u32 {
        let base = self.signature >> 8 & 0xf;
        if base == 0xf {
            base + (self.signature >> 20 & 0xff)
        } else {
            base
        }
    }

    /// Where HyperTransport begins.
    const fn hypertransport(self) -> u64 {
        let end = if self.family() < AT_THE_END {
            1 << 40
        } else {
            let width = self.width as u32;
            let reduced = width.saturating_sub(self.encryption >> 6 & 0x3f);
            match 1u64.checked_shl(reduced) {
                Some(end) => end,
                None => u64::MAX,
            }
        };
        end.saturating_sub(HYPERTRANSPORT)
    }
}

/// The end of the addresses that memory can have in a VM of `width` bits.
pub fn end(width: u8, amd: Option<Amd>) -> GuestAddress {
    let end = 1u64 << width;
    GuestAddress(match amd {
        Some(amd) if width >= VISIBLE => end.min(amd.hypertransport()),
        _ => end,
    })
}

/// The width in use: as asked, or the CPU's.
///
/// # Errors
/// [`WidthError`].
pub fn choose(end: u64, asked: Option<u8>, limit: u8) -> Result<u8, WidthError> {
    match asked {
        None => Ok(limit),
        Some(asked) if asked <= limit && end <= 1 << asked => Ok(asked),
        Some(asked) => Err(WidthError { asked, end, limit }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_stage_may_reach_less_far_than_the_cpu() {
        assert_eq!(width(0x0000_302e), 46);
        assert_eq!(width(0x0030_3034), 48);
    }

    /// Opteron 8347 (family 10h), Ryzen 1700 (17h), EPYC 7763 (19h).
    const OLD: u32 = 0x0010_0f23;
    const FIRST: u32 = 0x0080_0f11;
    const NEWER: u32 = 0x00a0_0f11;

    fn amd(signature: u32, width: u8, encryption: u32) -> Option<Amd> {
        Some(Amd {
            signature,
            width,
            encryption,
        })
    }

    #[test]
    fn a_cpu_without_hypertransport_has_all_addresses() {
        assert_eq!(end(46, None), GuestAddress(1 << 46));
    }

    #[test]
    fn before_family_17h_hypertransport_is_below_1t() {
        for width in [40, 48] {
            let end = end(width, amd(OLD, width, 0));
            assert_eq!(end, GuestAddress(0xfd_0000_0000), "{width}");
        }
    }

    #[test]
    fn from_family_17h_on_it_is_at_the_end_of_the_cpus_addresses() {
        for signature in [FIRST, NEWER] {
            let at = |width, reduced_by: u32| end(48, amd(signature, width, reduced_by << 6));
            assert_eq!(at(48, 0), GuestAddress(0xfffd_0000_0000));
            assert_eq!(at(48, 5), GuestAddress((1 << 43) - (12 << 30)));
            assert_eq!(at(52, 0), GuestAddress(1 << 48));
        }
    }

    #[test]
    fn below_40_bits_it_is_hidden() {
        assert_eq!(end(39, amd(OLD, 39, 0)), GuestAddress(1 << 39));
    }

    #[test]
    fn a_width_can_be_asked_for_where_it_is_there() {
        assert_eq!(choose(1 << 46, None, 46), Ok(46));
        assert_eq!(choose(1 << 40, Some(40), 46), Ok(40));
        assert!(choose(1 << 40, Some(39), 46).is_err());
        assert!(choose(1 << 40, Some(47), 46).is_err());
    }
}
