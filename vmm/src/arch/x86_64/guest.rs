// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Linux guests are not supported on x86_64: every function fails, and [`check_supported`] reports it
//! before anything is opened.

use std::sync::Arc;

use granule_types::units::{Bytes, GuestAddress};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use linux_loader::cmdline::Cmdline;
use thiserror::Error;
use vm_memory::GuestMemoryMmap;

use crate::{arch::description::VmDescription, memory::GuestRam};

/// Error returned on x86_64, where Linux guests are not supported.
#[derive(Debug, Error)]
#[error(
    "`granule run` boots arm64 guests and needs an arm64 host with KVM; `granule lab --guest` runs \
     it on an emulated host"
)]
pub struct GuestError;

/// A kernel image, which cannot exist on x86_64.
#[derive(Debug)]
pub enum Image {}

/// A boot layout, which cannot exist on x86_64.
#[derive(Debug)]
pub struct BootLayout {
    /// Range of the initramfs.
    pub initrd: Option<std::ops::Range<GuestAddress>>,
}

/// An interrupt controller, which cannot exist on x86_64.
#[derive(Debug)]
pub enum InterruptController {}

/// The vCPUs of a guest.
#[derive(Debug)]
pub struct GuestVcpus {
    /// The vCPUs, the boot vCPU first.
    pub fds: Vec<VcpuFd>,
}

/// Returns whether Linux guests are supported.
///
/// # Errors
/// [`GuestError`], always.
pub const fn check_supported() -> Result<(), GuestError> {
    Err(GuestError)
}

/// Parses a kernel image.
///
/// # Errors
/// [`GuestError`], always.
pub fn parse_image(_file: Vec<u8>) -> Result<Image, GuestError> {
    Err(GuestError)
}

/// Parses a kernel command line.
///
/// # Errors
/// [`GuestError`], always.
pub fn parse_command_line(_text: &str) -> Result<Cmdline, GuestError> {
    Err(GuestError)
}

/// Places the boot data in guest memory.
///
/// # Errors
/// None: `image` cannot exist.
pub fn boot_layout(
    image: &Image,
    _initrd: Option<Bytes>,
    _memory: Bytes,
) -> Result<BootLayout, GuestError> {
    match *image {}
}

/// Chooses the width of guest-physical addresses.
///
/// # Errors
/// [`GuestError`], always.
pub fn choose_ipa_bits(
    _kvm: &Kvm,
    _memory: &[Arc<GuestRam>],
    _requested: Option<u8>,
) -> Result<u8, GuestError> {
    Err(GuestError)
}

/// Enables optional capabilities of a VM.
///
/// # Errors
/// [`GuestError`], always.
pub fn configure_vm(_vm: &VmFd, _eager_split: Option<Bytes>) -> Result<(), GuestError> {
    Err(GuestError)
}

/// Creates the vCPUs of a VM.
///
/// # Errors
/// [`GuestError`], always.
pub fn create_vcpus(_vm: &VmFd, _count: u32) -> Result<GuestVcpus, GuestError> {
    Err(GuestError)
}

/// Creates the interrupt controller of a VM.
///
/// # Errors
/// [`GuestError`], always.
pub fn create_interrupt_controller(
    _vm: &VmFd,
    _vcpus: &GuestVcpus,
    _interrupts: u32,
) -> Result<InterruptController, GuestError> {
    Err(GuestError)
}

/// Copies the kernel into guest memory.
///
/// # Errors
/// None: `image` cannot exist.
pub fn load_kernel(
    _memory: &GuestMemoryMmap,
    image: &Image,
    _layout: &BootLayout,
) -> Result<(), GuestError> {
    match *image {}
}

/// Writes the device tree and sets the registers of the boot vCPU.
///
/// # Errors
/// None: `controller` cannot exist.
pub fn write_boot_data(
    _memory: &GuestMemoryMmap,
    _vm: &VmDescription,
    _vcpus: &GuestVcpus,
    controller: &InterruptController,
    _layout: &BootLayout,
) -> Result<(), GuestError> {
    match *controller {}
}
