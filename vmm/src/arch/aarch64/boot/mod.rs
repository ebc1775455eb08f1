// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a Linux guest on arm64 finds when it starts (the kernel's
//! `Documentation/arch/arm64/booting.rst`): a kernel [image], perhaps an initramfs, and a
//! [device tree](tree), each at its [place](layout) in guest memory.
//!
//! Nothing here needs KVM or an arm64 machine, so all of it is tested everywhere.

pub mod fdt;
pub mod image;
pub mod layout;
