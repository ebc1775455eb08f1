// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Saves and restores vCPUs (`KVM_GET_REG_LIST`, `KVM_GET_ONE_REG`, `KVM_GET_MP_STATE` and
//! `KVM_GET_VCPU_EVENTS`, `Documentation/virt/kvm/api.rst`).
//!
//! Restoring the virtual counter hides the time in which the VM did not run, or was paused. The physical
//! counter is not restored: it is the host's.

use kvm_bindings::{kvm_mp_state, kvm_vcpu_events, kvm_vcpu_events__bindgen_ty_1};
use kvm_ioctls::VcpuFd;
use vmm_sys_util::errno;

use super::{
    state::{
        HexBytes, HexNumber, RegisterId, RegisterMismatch, VcpuEvents, VcpuState, clears_mask,
        writes,
    },
    vcpu::{get_register, set_register},
};
use crate::kvm::{KvmError, ioctls::register_list};

/// `KVM_REG_ARM_TIMER_CNT`, the virtual counter. The KVM ABI swaps its encoding with that of
/// `KVM_REG_ARM_TIMER_CVAL` (`asm/kvm.h` of the kernel).
const VIRTUAL_COUNTER: RegisterId = RegisterId::system([3, 3, 14, 3, 2]);
/// `KVM_REG_ARM_PTIMER_CNT`, the physical counter.
const PHYSICAL_COUNTER: RegisterId = RegisterId::system([3, 3, 14, 0, 1]);

/// Returns the state of a vCPU. After `KVM_EXIT_MMIO` the vCPU must have entered `KVM_RUN` again,
/// with `immediate_exit` if it is not to run: KVM completes the access there.
///
/// # Errors
/// A register cannot be read.
pub fn save_vcpu(vcpu: &VcpuFd) -> Result<VcpuState, KvmError> {
    let registers = list_registers(vcpu)?
        .into_iter()
        .map(|id| {
            let value = read(vcpu, id).map_err(|error| KvmError::Register {
                register: id.to_string(),
                access: "read",
                source: error.into(),
            })?;
            Ok((id, value))
        })
        .collect::<Result<_, KvmError>>()?;
    // A reset that PSCI requested changes the power state when the registers are read.
    let mp_state =
        vcpu.get_mp_state().map_err(|error| KvmError::call("KVM_GET_MP_STATE", error))?.mp_state;
    let exception = vcpu
        .get_vcpu_events()
        .map_err(|error| KvmError::call("KVM_GET_VCPU_EVENTS", error))?
        .exception;
    let events = VcpuEvents {
        serror_pending: exception.serror_pending != 0,
        serror_has_esr: exception.serror_has_esr != 0,
        ext_dabt_pending: exception.ext_dabt_pending != 0,
        serror_esr: HexNumber(exception.serror_esr),
    };
    Ok(VcpuState { mp_state, events, registers })
}

/// Restores the state of a vCPU that has not run, but for the virtual counter.
///
/// # Errors
/// This host does not have the same registers, or does not accept a value; the error lists all
/// these registers.
pub fn restore_vcpu(vcpu: &VcpuFd, state: &VcpuState) -> Result<(), KvmError> {
    let mut mismatches = Vec::new();
    for (&id, saved) in &state.registers {
        if id == PHYSICAL_COUNTER || id == VIRTUAL_COUNTER {
            continue;
        }
        mismatches.extend(restore_register(vcpu, id, saved));
    }
    // Listed afterwards, because the restored ID registers hide registers of disabled features.
    for id in list_registers(vcpu)? {
        if !state.registers.contains_key(&id) && id != PHYSICAL_COUNTER {
            mismatches.push(RegisterMismatch { id, saved: None, host: read(vcpu, id).ok() });
        }
    }
    if !mismatches.is_empty() {
        return Err(mismatch_error(&mismatches));
    }
    vcpu.set_mp_state(kvm_mp_state { mp_state: state.mp_state })
        .map_err(|error| KvmError::call("KVM_SET_MP_STATE", error))?;
    let events = &state.events;
    let exception = kvm_vcpu_events__bindgen_ty_1 {
        serror_pending: events.serror_pending.into(),
        serror_has_esr: events.serror_has_esr.into(),
        ext_dabt_pending: events.ext_dabt_pending.into(),
        serror_esr: events.serror_esr.0,
        ..kvm_vcpu_events__bindgen_ty_1::default()
    };
    vcpu.set_vcpu_events(&kvm_vcpu_events { exception, ..kvm_vcpu_events::default() })
        .map_err(|error| KvmError::call("KVM_SET_VCPU_EVENTS", error))
}

/// Restores the virtual counter, which is one for the VM and runs from then on.
///
/// # Errors
/// This host does not accept the value.
pub fn restore_counter(vcpu: &VcpuFd, state: &VcpuState) -> Result<(), KvmError> {
    let saved = state.registers.get(&VIRTUAL_COUNTER);
    match saved.and_then(|saved| restore_register(vcpu, VIRTUAL_COUNTER, saved)) {
        None => Ok(()),
        Some(mismatch) => Err(mismatch_error(&[mismatch])),
    }
}

/// Returns the virtual counter of a VM by one of its vCPUs.
///
/// # Errors
/// It cannot be read.
pub fn counter(vcpu: &VcpuFd) -> Result<u64, KvmError> {
    get_register(vcpu, VIRTUAL_COUNTER.number())
}

/// Sets the virtual counter of a VM, which runs from then on.
///
/// # Errors
/// It cannot be set.
pub fn set_counter(vcpu: &VcpuFd, value: u64) -> Result<(), KvmError> {
    set_register(vcpu, VIRTUAL_COUNTER.number(), value)
}

/// Sets a register unless it has the value: the kernel refuses to set constants such as
/// `KVM_REG_ARM64_SVE_VLS`.
fn restore_register(vcpu: &VcpuFd, id: RegisterId, saved: &HexBytes) -> Option<RegisterMismatch> {
    let host = read(vcpu, id).ok();
    if host.as_ref() == Some(saved) || clears_mask(id) && host.is_some() {
        return None;
    }
    // The length is checked because the ioctl reads the size in the ID.
    let is_set = saved.0.len() == id.size()
        && writes(id, saved).iter().all(|(id, value)| {
            value.0.len() == id.size() && vcpu.set_one_reg(id.number(), &value.0).is_ok()
        });
    (!is_set).then(|| RegisterMismatch { id, saved: Some(saved.clone()), host })
}

fn mismatch_error(mismatches: &[RegisterMismatch]) -> KvmError {
    let registers: Vec<String> = mismatches.iter().map(RegisterMismatch::to_string).collect();
    KvmError::Unsupported(format!(
        "the registers of the snapshot cannot be restored: {}. Restore it on a host with the same \
         CPU, and a kernel that is not older and has the same registers",
        registers.join("; ")
    ))
}

fn list_registers(vcpu: &VcpuFd) -> Result<Vec<RegisterId>, KvmError> {
    let ids = register_list(vcpu).map_err(|error| KvmError::call("KVM_GET_REG_LIST", error))?;
    Ok(ids.into_iter().map(RegisterId::new).collect())
}

fn read(vcpu: &VcpuFd, id: RegisterId) -> Result<HexBytes, errno::Error> {
    let mut bytes = vec![0; id.size()];
    vcpu.get_one_reg(id.number(), &mut bytes)?;
    Ok(HexBytes(bytes))
}
