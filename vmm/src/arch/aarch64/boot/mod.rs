// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Boot data of a Linux guest on arm64 (`Documentation/arch/arm64/booting.rst`): kernel [image],
//! [command line](command_line), [device tree](fdt) and their [addresses](layout).
//!
//! These modules need neither KVM nor an arm64 host, so they are tested on every host.

pub mod command_line;
pub mod fdt;
pub mod image;
pub mod layout;
