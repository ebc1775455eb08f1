// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What all guests share: how they talk with the host ([`mailbox`]), their own translation tables
//! ([`tables`]), their [`program`], where everything lies ([`layout`]), and which places they choose
//! at random ([`random_walk`]). What differs is in [`crate::arch`].

pub mod layout;
pub mod mailbox;
pub mod program;
pub mod random_walk;
pub mod tables;
