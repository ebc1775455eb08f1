// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The x86_64 guest: its program (`payload`, built for x86_64 only), page table entries
//! ([`paging`]), descriptor tables ([`descriptors`]) and exceptions ([`exception`]).

pub mod descriptors;
pub mod exception;
pub mod paging;
#[cfg(target_arch = "x86_64")]
mod payload;

use std::sync::Arc;

use crate::guest::layout::Abi;
use granule_types::guest_mode::GuestMode;

/// The first doorbell port. No device is there, so every `OUT` exits to the host.
pub const DOORBELL: u16 = 0x1000;

/// Returns the properties of a guest of this mode.
pub fn abi(mode: GuestMode) -> Abi {
    Abi {
        mode,
        format: Arc::new(paging::LongMode),
        doorbells: None,
    }
}
