// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A Linux guest's vCPUs: what the host's CPUs have is given to them (SVE, pointer authentication,
//! PMU), all but the first wait for the guest to switch them on by PSCI, and the first starts at
//! the kernel's entry with the device tree's address in `x0`
//! (`Documentation/arch/arm64/booting.rst`).

use kvm_bindings::{
    KVM_ARM_VCPU_PMU_V3, KVM_ARM_VCPU_PMU_V3_CTRL, KVM_ARM_VCPU_PMU_V3_INIT,
    KVM_ARM_VCPU_PMU_V3_IRQ, KVM_ARM_VCPU_POWER_OFF, KVM_ARM_VCPU_PSCI_0_2,
    KVM_ARM_VCPU_PTRAUTH_ADDRESS, KVM_ARM_VCPU_PTRAUTH_GENERIC, KVM_ARM_VCPU_SVE,
    KVM_CAP_ARM_NISV_TO_USER, kvm_device_attr, kvm_enable_cap, kvm_vcpu_init,
};
use kvm_ioctls::{Cap, VcpuFd, VmFd};

use super::{boot::fdt::PMU_PPI, registers, system_register::SystemRegister};
use crate::kvm::KvmError;

const MPIDR_EL1: SystemRegister = SystemRegister {
    name: "MPIDR_EL1",
    encoding: [3, 0, 0, 0, 5],
};
/// `MPIDR_EL1`'s affinity fields: Aff3 and Aff2 to Aff0.
const AFFINITY: u64 = 0xff_00ff_ffff;
/// The first of a CPU's own interrupts in the GIC's count.
const FIRST_PPI: u32 = 16;

/// What a guest's vCPUs have beyond the base architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VcpuFeatures {
    /// Performance counters.
    pub pmu: bool,
    sve: bool,
    pointer_authentication: bool,
}

impl VcpuFeatures {
    /// All that the host's KVM gives.
    pub fn of_host(vm: &VmFd) -> Self {
        let has = |cap| vm.check_extension(cap);
        Self {
            pmu: has(Cap::ArmPmuV3),
            sve: has(Cap::ArmSve),
            pointer_authentication: has(Cap::ArmPtrAuthAddress) && has(Cap::ArmPtrAuthGeneric),
        }
    }

    fn bits(self, first: bool) -> u32 {
        [
            (true, KVM_ARM_VCPU_PSCI_0_2),
            (!first, KVM_ARM_VCPU_POWER_OFF),
            (self.pmu, KVM_ARM_VCPU_PMU_V3),
            (self.sve, KVM_ARM_VCPU_SVE),
            (self.pointer_authentication, KVM_ARM_VCPU_PTRAUTH_ADDRESS),
            (self.pointer_authentication, KVM_ARM_VCPU_PTRAUTH_GENERIC),
        ]
        .into_iter()
        .filter(|(wanted, _)| *wanted)
        .fold(0, |bits, (_, feature)| bits | 1 << feature)
    }
}

/// Has KVM hand over an access to a device by an instruction that it does not decode, with the
/// address, where it can (Linux 5.5), instead of failing `KVM_RUN` with `ENOSYS`.
pub fn report_undecoded(vm: &VmFd) {
    let report = kvm_enable_cap {
        cap: KVM_CAP_ARM_NISV_TO_USER,
        ..Default::default()
    };
    if let Err(error) = vm.enable_cap(&report) {
        log::debug!("KVM_CAP_ARM_NISV_TO_USER: {error}");
    }
}

/// Makes vCPU `index`.
///
/// # Errors
/// The kernel refuses.
pub fn make_vcpu(vm: &VmFd, index: u32, features: VcpuFeatures) -> Result<VcpuFd, KvmError> {
    let fd = vm
        .create_vcpu(index.into())
        .map_err(|error| KvmError::call("making a vCPU (KVM_CREATE_VCPU)", error))?;
    let mut target = kvm_vcpu_init::default();
    vm.get_preferred_target(&mut target)
        .map_err(|error| KvmError::call("choosing the vCPU (KVM_ARM_PREFERRED_TARGET)", error))?;
    target.features[0] |= features.bits(index == 0);
    fd.vcpu_init(&target)
        .map_err(|error| KvmError::call("preparing a vCPU (KVM_ARM_VCPU_INIT)", error))?;
    if features.sve {
        let feature = KVM_ARM_VCPU_SVE.cast_signed();
        fd.vcpu_finalize(&feature)
            .map_err(|error| KvmError::call("giving a vCPU SVE (KVM_ARM_VCPU_FINALIZE)", error))?;
    }
    Ok(fd)
}

/// A vCPU's affinity, by which the guest calls it.
///
/// # Errors
/// The kernel refuses.
pub fn affinity(fd: &VcpuFd) -> Result<u64, KvmError> {
    Ok(registers::get(fd, MPIDR_EL1)? & AFFINITY)
}

/// Wires a vCPU's PMU to its interrupt; behind the interrupt controller's initialisation.
///
/// # Errors
/// The kernel refuses.
pub fn start_pmu(fd: &VcpuFd) -> Result<(), KvmError> {
    let interrupt = FIRST_PPI + PMU_PPI;
    let attribute = |attr: u32, addr| kvm_device_attr {
        flags: 0,
        group: KVM_ARM_VCPU_PMU_V3_CTRL,
        attr: attr.into(),
        addr,
    };
    let pointer = std::ptr::from_ref(&interrupt).addr() as u64;
    for attribute in [
        attribute(KVM_ARM_VCPU_PMU_V3_IRQ, pointer),
        attribute(KVM_ARM_VCPU_PMU_V3_INIT, 0),
    ] {
        fd.set_device_attr(&attribute)
            .map_err(|error| KvmError::call("giving a vCPU its PMU", error))?;
    }
    Ok(())
}

/// Has a vCPU start at `entry` with `argument` in `x0`; all other registers are at reset.
///
/// # Errors
/// The kernel refuses.
pub fn start_at(fd: &VcpuFd, entry: u64, argument: u64) -> Result<(), KvmError> {
    registers::set_x0(fd, argument)?;
    registers::set_pc(fd, entry)
}
