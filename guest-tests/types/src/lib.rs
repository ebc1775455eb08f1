// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Types shared by Granule's crates: units, addresses, memory backings, guest modes, test phases
//! and their marks, and the records of `granule.result/1`.

pub mod backing;
pub mod guest_mode;
pub mod host;
pub mod mark;
pub mod phase;
pub mod record;
pub mod seed;
#[cfg(feature = "testing")]
pub mod testing;
pub mod units;
