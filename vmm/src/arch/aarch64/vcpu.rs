// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! vCPUs of a Linux guest. They have the host CPU's features (SVE, pointer authentication, PMU).
//! The first vCPU starts at the kernel's entry point with the address of the device tree in `x0`
//! (`Documentation/arch/arm64/booting.rst`). The guest powers on the others through PSCI.
//!
//! Registers are accessed by their KVM register IDs (`KVM_SET_ONE_REG`,
//! `Documentation/virt/kvm/api.rst`).

use std::mem::offset_of;

use granule_types::units::GuestAddress;
use kvm_bindings::{
    KVM_ARM_VCPU_PMU_V3, KVM_ARM_VCPU_PMU_V3_CTRL, KVM_ARM_VCPU_PMU_V3_INIT,
    KVM_ARM_VCPU_PMU_V3_IRQ, KVM_ARM_VCPU_POWER_OFF, KVM_ARM_VCPU_PSCI_0_2,
    KVM_ARM_VCPU_PTRAUTH_ADDRESS, KVM_ARM_VCPU_PTRAUTH_GENERIC, KVM_ARM_VCPU_SVE,
    KVM_CAP_ARM_NISV_TO_USER, KVM_REG_ARM_CORE, KVM_REG_ARM64, KVM_REG_SIZE_U64, kvm_device_attr,
    kvm_regs, kvm_vcpu_init, user_pt_regs,
};
use kvm_ioctls::{Cap, VcpuFd, VmFd};

use super::{boot::fdt::PMU_PPI, state::RegisterId};
use crate::kvm::{KvmError, ioctls::enable_capability};

const MPIDR_EL1: u64 = system_register_id([3, 0, 0, 0, 5]);
/// Affinity fields of `MPIDR_EL1`: Aff3 and Aff2 to Aff0.
const AFFINITY_MASK: u64 = 0xff_00ff_ffff;
const FIRST_PPI_INTID: u32 = 16;

/// PMU bit of `kvm_vcpu_init.features[0]`.
pub const PMU_FEATURE: u32 = 1 << KVM_ARM_VCPU_PMU_V3;
const SVE_FEATURE: u32 = 1 << KVM_ARM_VCPU_SVE;
const PTRAUTH_FEATURES: u32 = 1 << KVM_ARM_VCPU_PTRAUTH_ADDRESS | 1 << KVM_ARM_VCPU_PTRAUTH_GENERIC;

/// Returns the bits of `kvm_vcpu_init.features[0]` for PSCI and all optional features that the host
/// supports.
pub fn host_features(vm: &VmFd) -> u32 {
    let has = |cap| vm.check_extension(cap);
    let mut features = 1 << KVM_ARM_VCPU_PSCI_0_2;
    for (supported, feature) in [
        (has(Cap::ArmPmuV3), PMU_FEATURE),
        (has(Cap::ArmSve), SVE_FEATURE),
        (has(Cap::ArmPtrAuthAddress) && has(Cap::ArmPtrAuthGeneric), PTRAUTH_FEATURES),
    ] {
        features |= if supported { feature } else { 0 };
    }
    features
}

/// Enables `KVM_EXIT_ARM_NISV` (Linux 5.5): a device access without a valid syndrome (ISV 0) exits
/// with its address instead of failing `KVM_RUN` with `ENOSYS`.
pub fn enable_nisv_exits(vm: &VmFd) {
    if let Err(error) = enable_capability(vm, KVM_CAP_ARM_NISV_TO_USER, 0) {
        log::debug!("KVM_CAP_ARM_NISV_TO_USER: {error}");
    }
}

/// Creates vCPU `index`. Each vCPU but the first starts powered off.
pub fn create_vcpu(vm: &VmFd, index: u32, features: u32) -> Result<VcpuFd, KvmError> {
    let fd =
        vm.create_vcpu(index.into()).map_err(|error| KvmError::call("KVM_CREATE_VCPU", error))?;
    let mut target = kvm_vcpu_init::default();
    vm.get_preferred_target(&mut target)
        .map_err(|error| KvmError::call("KVM_ARM_PREFERRED_TARGET", error))?;
    let powered_off = if index == 0 { 0 } else { 1 << KVM_ARM_VCPU_POWER_OFF };
    target.features[0] |= features | powered_off;
    fd.vcpu_init(&target).map_err(|error| KvmError::call("KVM_ARM_VCPU_INIT", error))?;
    if features & SVE_FEATURE != 0 {
        let feature = KVM_ARM_VCPU_SVE.cast_signed();
        fd.vcpu_finalize(&feature)
            .map_err(|error| KvmError::call("KVM_ARM_VCPU_FINALIZE (SVE)", error))?;
    }
    Ok(fd)
}

/// Returns the affinity of a vCPU, which identifies it in PSCI calls and the device tree.
pub fn mpidr_affinity(fd: &VcpuFd) -> Result<u64, KvmError> {
    Ok(get_register(fd, MPIDR_EL1)? & AFFINITY_MASK)
}

/// Connects the PMU of a vCPU to its PPI. The GIC must be initialised.
pub fn init_pmu(fd: &VcpuFd) -> Result<(), KvmError> {
    let interrupt = FIRST_PPI_INTID + PMU_PPI;
    let attribute = |attr: u32, addr| kvm_device_attr {
        flags: 0,
        group: KVM_ARM_VCPU_PMU_V3_CTRL,
        attr: attr.into(),
        addr,
    };
    let pointer = std::ptr::from_ref(&interrupt).expose_provenance() as u64;
    for attribute in
        [attribute(KVM_ARM_VCPU_PMU_V3_IRQ, pointer), attribute(KVM_ARM_VCPU_PMU_V3_INIT, 0)]
    {
        fd.set_device_attr(&attribute)
            .map_err(|error| KvmError::call("KVM_SET_DEVICE_ATTR (PMU)", error))?;
    }
    Ok(())
}

/// Sets the entry point of a vCPU, and `x0` to the address of the device tree; all other registers
/// keep their reset values.
pub fn set_entry_point(fd: &VcpuFd, pc: GuestAddress, fdt: GuestAddress) -> Result<(), KvmError> {
    set_register(fd, X0_ID, fdt.0)?;
    set_pc(fd, pc.0)
}

const PC_ID: u64 = core_register_id(offset_of!(user_pt_regs, pc));
const X0_ID: u64 = core_register_id(offset_of!(user_pt_regs, regs));

/// Returns the ID of a core register from its offset in `user_pt_regs`.
const fn core_register_id(offset: usize) -> u64 {
    let offset = offset_of!(kvm_regs, regs) + offset;
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE as u64 | (offset / 4) as u64
}

/// Returns the ID of a system register from the operands op0, op1, CRn, CRm and op2 of `MRS`.
pub const fn system_register_id(operands: [u8; 5]) -> u64 {
    RegisterId::system(operands).number()
}

/// Returns the program counter of a vCPU, or `None` if it cannot be read.
pub fn program_counter(vcpu: &VcpuFd) -> Option<u64> {
    get_register(vcpu, PC_ID).ok()
}

/// Sets the program counter of a vCPU.
pub fn set_pc(vcpu: &VcpuFd, value: u64) -> Result<(), KvmError> {
    set_register(vcpu, PC_ID, value)
}

/// Returns the value of register `id` of a vCPU.
pub fn get_register(vcpu: &VcpuFd, id: u64) -> Result<u64, KvmError> {
    let mut bytes = [0; 8];
    vcpu.get_one_reg(id, &mut bytes).map_err(|error| KvmError::call("KVM_GET_ONE_REG", error))?;
    Ok(u64::from_le_bytes(bytes))
}

/// Sets register `id` of a vCPU.
pub fn set_register(vcpu: &VcpuFd, id: u64, value: u64) -> Result<(), KvmError> {
    vcpu.set_one_reg(id, &value.to_le_bytes())
        .map(drop)
        .map_err(|error| KvmError::call("KVM_SET_ONE_REG", error))
}
