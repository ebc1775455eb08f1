// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The x86_64 guest: its program (`payload`, built for x86_64 only), the entries of its tables
//! ([`paging`]), its descriptor tables ([`descriptors`]) and its exceptions ([`exception`]); and
//! what the host does only here.

#[cfg(target_arch = "x86_64")]
pub mod cache;
pub mod descriptors;
pub mod exception;
pub mod paging;
#[cfg(target_arch = "x86_64")]
mod payload;

use std::sync::Arc;

use crate::guest::layout::Abi;
use granule_types::guest_mode::GuestMode;

/// The first of the bells' ports. Nothing is there: every `OUT` leaves the guest.
pub const DOORBELL: u16 = 0x1000;

/// What there is to know about a guest of this mode.
pub fn abi(mode: GuestMode) -> Abi {
    Abi {
        mode,
        format: Arc::new(paging::LongMode),
        bells: None,
    }
}
