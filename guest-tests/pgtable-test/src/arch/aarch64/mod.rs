// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The arm64 guest: its program (`payload`, built for arm64 only), the entries of its tables
//! ([`stage1`]), its system registers ([`registers`]); and what the host does only here.

#[cfg(target_arch = "aarch64")]
pub mod cache;
#[cfg(target_arch = "aarch64")]
mod payload;
pub mod registers;
pub mod stage1;
pub mod syndrome;

use std::sync::Arc;

use crate::guest::layout::Abi;
use granule_types::{guest_mode::GuestMode, units::GuestAddress};

/// The bells' address, outside all memory.
pub const DOORBELL: GuestAddress = GuestAddress(0x8000);

/// What there is to know about a guest of this mode.
pub fn abi(mode: GuestMode) -> Abi {
    Abi {
        mode,
        format: Arc::new(stage1::Stage1 {
            page_shift: mode.page_shift(),
            va_bits: mode.va_bits(),
        }),
        bells: Some(DOORBELL),
    }
}
