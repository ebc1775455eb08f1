// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The arm64 guest: its program (`payload`, built for arm64 only), stage-1 entries ([`stage1`]),
//! system registers ([`registers`]) and exception syndromes ([`syndrome`]).

#[cfg(target_arch = "aarch64")]
mod payload;
pub mod registers;
pub mod stage1;
pub mod syndrome;

use std::sync::Arc;

use crate::guest::layout::Abi;
use granule_types::{guest_mode::GuestMode, units::GuestAddress};

/// Address of the doorbells: no memory is there, so every store exits to the host.
pub const DOORBELL: GuestAddress = GuestAddress(0x8000);

/// Returns the properties of a guest of this mode.
pub fn abi(mode: GuestMode) -> Abi {
    Abi {
        mode,
        format: Arc::new(stage1::Stage1 {
            page_shift: mode.page_shift(),
            va_bits: mode.va_bits(),
        }),
        doorbells: Some(DOORBELL),
    }
}
