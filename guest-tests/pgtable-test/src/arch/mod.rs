// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What differs from one architecture to the next: the guest, and what only this host can tell. The
//! logic of each builds and is tested on every host; only programs need an assembler of their own.

pub mod aarch64;
pub mod x86_64;

/// Of the architecture that has modes of every width and granule, for tests of what all share.
#[cfg(test)]
pub(crate) use aarch64::abi as abi_of_every_mode;
#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::cache;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::cache;
