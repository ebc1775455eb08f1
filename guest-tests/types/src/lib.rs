// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The types that Granule's crates agree on: units, addresses, backings, guest modes, phases, the
//! marks between them, and the records of `granule.result/1`.

pub mod backing;
pub mod guest_mode;
pub mod host;
pub mod mark;
pub mod mix;
pub mod phase;
pub mod record;
#[cfg(feature = "testing")]
pub mod testing;
pub mod units;
