// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How far a guest's physical addresses reach.
//!
//! A VM has no width of its own: it is the CPU's (CPUID leaf `0x8000_0008`), unless KVM says that
//! the second stage reaches less far. On AMD's CPUs the 12 GiB at its end are HyperTransport's
//! (AMD64 manual volume 2, 2.1.3 with the processor's own guide), and no memory can be there.

use granule_guest_tests::units::GuestAddress;
use thiserror::Error;

/// What HyperTransport takes.
const HYPERTRANSPORT: u64 = 12 << 30;

/// The memory does not fit the addresses asked for.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{asked} bits of guest-physical address were asked for; guest memory ends at {end:#x}, and this      host's CPU has {limit} bits"
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

/// The end of the addresses that memory can have.
pub const fn end(width: u8, hypertransport: bool) -> GuestAddress {
    let end = 1u64 << width;
    GuestAddress(if hypertransport && width >= 40 {
        end - HYPERTRANSPORT
    } else {
        end
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

    #[test]
    fn hypertransport_keeps_the_end() {
        assert_eq!(end(46, false), GuestAddress(1 << 46));
        assert_eq!(end(40, true), GuestAddress(0xfd_0000_0000));
        assert_eq!(end(48, true), GuestAddress(0xfffd_0000_0000));
    }

    #[test]
    fn a_width_can_be_asked_for_where_it_is_there() {
        assert_eq!(choose(1 << 46, None, 46), Ok(46));
        assert_eq!(choose(1 << 40, Some(40), 46), Ok(40));
        assert!(choose(1 << 40, Some(39), 46).is_err());
        assert!(choose(1 << 40, Some(47), 46).is_err());
    }
}
