// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The arm64 guest: its program (`payload`, built for arm64 only), its [`mailbox`]es, its stage-1
//! tables ([`stage1`]) and system registers ([`registers`]), and where all that lies ([`layout`]).

pub mod layout;
pub mod mailbox;
#[cfg(target_arch = "aarch64")]
pub mod payload;
pub mod registers;
pub mod stage1;
