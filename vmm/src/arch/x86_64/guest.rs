// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Linux guests are not supported on x86_64: every function fails, and [`check_supported`] reports
//! it before anything is opened. The functions mirror those of `arch::aarch64::guest`.

#![allow(missing_docs, reason = "documented in arch::aarch64::guest")]

use std::sync::Arc;

use granule_types::units::Bytes;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use thiserror::Error;
use vm_memory::GuestMemoryMmap;

use crate::{arch::VmDescription, memory::GuestRam};

pub use crate::arch::aarch64::boot::{BootError, BootLayout, image::Image, parse_command_line};

/// Error returned on x86_64, where Linux guests are not supported.
#[derive(Debug, Error)]
#[error(
    "`granule run` boots arm64 guests and needs an arm64 host with KVM; `granule lab --guest` runs \
     it on an emulated host"
)]
pub struct GuestError;

/// An interrupt controller, which cannot exist on x86_64.
#[derive(Debug)]
pub enum InterruptController {}

/// The vCPUs of a guest.
#[derive(Debug)]
pub struct GuestVcpus {
    /// The vCPUs, the boot vCPU first.
    pub fds: Vec<VcpuFd>,
}

/// Refuses every guest.
pub const fn check_supported() -> Result<(), GuestError> {
    Err(GuestError)
}

pub fn choose_ipa_bits(
    _kvm: &Kvm,
    _memory: &[Arc<GuestRam>],
    _requested: Option<u8>,
) -> Result<u8, GuestError> {
    Err(GuestError)
}

pub fn configure_vm(_vm: &VmFd, _eager_split: Option<Bytes>) -> Result<(), GuestError> {
    Err(GuestError)
}

pub fn create_vcpus(_vm: &VmFd, _count: u32) -> Result<GuestVcpus, GuestError> {
    Err(GuestError)
}

pub fn create_interrupt_controller(
    _vm: &VmFd,
    _vcpus: &GuestVcpus,
    _interrupts: u32,
) -> Result<InterruptController, GuestError> {
    Err(GuestError)
}

pub const fn load_kernel(
    _memory: &GuestMemoryMmap,
    _image: &Image,
    _layout: &BootLayout,
) -> Result<(), GuestError> {
    Err(GuestError)
}

pub fn write_boot_data(
    _memory: &GuestMemoryMmap,
    _vm: &VmDescription,
    _vcpus: &GuestVcpus,
    controller: &InterruptController,
    _layout: &BootLayout,
) -> Result<(), GuestError> {
    match *controller {}
}
