// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Linux guests are not supported on x86_64: every function fails. [`check_supported`] reports the
//! error before any file is opened. The functions mirror those of `arch::aarch64::guest`.

#![allow(missing_docs, reason = "documented in arch::aarch64::guest")]

use std::{fs::File, sync::Arc};

use granule_types::units::Bytes;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use crate::{
    arch::{VmDescription, aarch64::state::MachineState},
    kvm::KvmError,
    memory::{GuestMap, GuestRam},
};

pub use crate::arch::aarch64::boot::{BootError, BootLayout, image::Image, parse_command_line};

/// vCPUs of a guest.
#[derive(Debug)]
pub struct GuestVcpus {
    /// The vCPUs, the boot vCPU first.
    pub fds: Vec<VcpuFd>,
    /// A vCPU that never runs.
    pub helper: Option<VcpuFd>,
    /// Interrupt controller.
    pub controller: InterruptController,
}

/// The interrupt controller of a guest.
#[derive(Debug)]
pub struct InterruptController(());

fn unsupported_error() -> KvmError {
    KvmError::Unsupported(
        "`granule run` boots arm64 guests and needs an arm64 host with KVM; `granule lab guest` \
         runs it on an emulated host"
            .to_owned(),
    )
}

pub fn check_supported() -> Result<(), KvmError> {
    Err(unsupported_error())
}

pub fn create_vm(
    _kvm: &Kvm,
    _memory: &[Arc<GuestRam>],
    _requested: Option<u8>,
) -> Result<(VmFd, u8), KvmError> {
    Err(unsupported_error())
}

pub fn enable_eager_split(_vm: &VmFd, _chunk: Bytes) -> Result<(), KvmError> {
    Err(unsupported_error())
}

pub fn create_vcpus(
    _vm: &VmFd,
    _count: u32,
    _has_helper: bool,
    _interrupts: u32,
) -> Result<GuestVcpus, KvmError> {
    Err(unsupported_error())
}

pub fn write_boot_data(
    _memory: &GuestMap,
    _kernel: (&Image, &File),
    _vm: &VmDescription,
    _vcpus: &GuestVcpus,
    _layout: &BootLayout,
) -> Result<(), BootError> {
    Err(unsupported_error().into())
}

pub fn save_machine(
    _vcpus: &[&VcpuFd],
    _controller: &InterruptController,
) -> Result<MachineState, KvmError> {
    Err(unsupported_error())
}

pub fn restore_vcpus(
    _vcpus: &[VcpuFd],
    _controller: &InterruptController,
    _state: &MachineState,
) -> Result<(), KvmError> {
    Err(unsupported_error())
}

pub fn restore_counter(_vcpus: &[VcpuFd], _state: &MachineState) -> Result<(), KvmError> {
    Err(unsupported_error())
}

pub fn counter(_vcpu: &VcpuFd) -> Result<u64, KvmError> {
    Err(unsupported_error())
}

pub fn set_counter(_vcpu: &VcpuFd, _value: u64) -> Result<(), KvmError> {
    Err(unsupported_error())
}

pub fn restore_interrupts(
    _vcpus: &[VcpuFd],
    _controller: &InterruptController,
    _state: &MachineState,
) -> Result<(), KvmError> {
    Err(unsupported_error())
}
