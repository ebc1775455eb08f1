// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! vCPU registers by their KVM register IDs (`KVM_SET_ONE_REG`, `Documentation/virt/kvm/api.rst`).

use std::mem::offset_of;

use kvm_bindings::{
    KVM_REG_ARM_CORE, KVM_REG_ARM64, KVM_REG_ARM64_SYSREG, KVM_REG_SIZE_U64, kvm_regs, user_pt_regs,
};
use kvm_ioctls::VcpuFd;

use super::system_register::SystemRegister;
use crate::kvm::KvmError;

/// Register ID of the program counter.
const PC: u64 = {
    let offset = offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, pc);
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE as u64 | (offset / 4) as u64
};

/// Register ID of `x0`.
const X0: u64 = {
    let offset = offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, regs);
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE as u64 | (offset / 4) as u64
};

const fn id(register: SystemRegister) -> u64 {
    let [op0, op1, crn, crm, op2] = register.encoding;
    KVM_REG_ARM64
        | KVM_REG_SIZE_U64
        | KVM_REG_ARM64_SYSREG as u64
        | (op0 as u64) << 14
        | (op1 as u64) << 11
        | (crn as u64) << 7
        | (crm as u64) << 3
        | op2 as u64
}

fn get_id(vcpu: &VcpuFd, id: u64) -> Result<u64, KvmError> {
    let mut bytes = [0; 8];
    vcpu.get_one_reg(id, &mut bytes).map_err(|error| KvmError::call("KVM_GET_ONE_REG", error))?;
    Ok(u64::from_le_bytes(bytes))
}

fn set_id(vcpu: &VcpuFd, id: u64, value: u64) -> Result<(), KvmError> {
    vcpu.set_one_reg(id, &value.to_le_bytes())
        .map(|_| ())
        .map_err(|error| KvmError::call("KVM_SET_ONE_REG", error))
}

/// Returns a system register of a vCPU.
///
/// # Errors
/// The kernel's error.
pub fn get(vcpu: &VcpuFd, register: SystemRegister) -> Result<u64, KvmError> {
    get_id(vcpu, id(register))
}

/// Sets a system register of a vCPU.
///
/// # Errors
/// The kernel's error.
pub fn set(vcpu: &VcpuFd, register: SystemRegister, value: u64) -> Result<(), KvmError> {
    set_id(vcpu, id(register), value)
}

/// Returns the program counter.
///
/// # Errors
/// The kernel's error.
pub fn get_pc(vcpu: &VcpuFd) -> Result<u64, KvmError> {
    get_id(vcpu, PC)
}

/// Sets the program counter.
///
/// # Errors
/// The kernel's error.
pub fn set_pc(vcpu: &VcpuFd, value: u64) -> Result<(), KvmError> {
    set_id(vcpu, PC, value)
}

/// Sets `x0`.
///
/// # Errors
/// The kernel's error.
pub fn set_x0(vcpu: &VcpuFd, value: u64) -> Result<(), KvmError> {
    set_id(vcpu, X0, value)
}
