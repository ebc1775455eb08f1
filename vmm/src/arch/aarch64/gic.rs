// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! In-kernel interrupt controller: a GICv3 with an interrupt translation service (ITS), or a
//! GICv2 on a host without GICv3 (`Documentation/virt/kvm/devices/arm-vgic-v3.rst`,
//! `arm-vgic-its.rst`, `arm-vgic.rst`).
//!
//! KVM requires this order: create all vCPUs, create the controller, set its addresses, create the
//! ITS, set the number of interrupts, initialise the controller.

use granule_types::units::GuestAddress;
use kvm_bindings::{
    KVM_DEV_ARM_VGIC_CTRL_INIT, KVM_DEV_ARM_VGIC_GRP_ADDR, KVM_DEV_ARM_VGIC_GRP_CTRL,
    KVM_DEV_ARM_VGIC_GRP_NR_IRQS, KVM_VGIC_ITS_ADDR_TYPE, KVM_VGIC_V2_ADDR_TYPE_CPU,
    KVM_VGIC_V2_ADDR_TYPE_DIST, KVM_VGIC_V3_ADDR_TYPE_DIST, KVM_VGIC_V3_ADDR_TYPE_REDIST_REGION,
    kvm_create_device, kvm_device_attr, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_ITS,
    kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V2, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3,
};
use kvm_ioctls::{DeviceFd, VmFd};

use crate::{
    arch::aarch64::boot::{
        GIC_CPU_INTERFACE, GIC_DISTRIBUTOR, GIC_ITS, GIC_REDISTRIBUTOR_SIZE, GIC_REDISTRIBUTORS,
        fdt::{GICV2_MAX_CPUS, Gic},
    },
    kvm::KvmError,
};

/// Number of SGIs and PPIs, which precede the SPIs.
const PRIVATE_INTERRUPT_COUNT: u32 = 32;

/// Creates the interrupt controller of a VM, with `interrupts` SPIs for devices. All vCPUs must
/// exist, and with `has_helper` one more, which the guest does not see. KVM frees the controller
/// with the VM.
pub fn create_gic(
    vm: &VmFd,
    vcpus: u64,
    has_helper: bool,
    interrupts: u32,
) -> Result<Gic, KvmError> {
    match create_device(vm, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3) {
        Ok(gic) => configure_v3(vm, &gic, vcpus, has_helper, interrupts),
        // ENODEV: the host has no GICv3.
        Err(error) if error.errno() == libc::ENODEV => {
            let gic = create_device(vm, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V2)
                .map_err(|error| KvmError::call("KVM_CREATE_DEVICE (GICv2)", error))?;
            configure_v2(&gic, vcpus, has_helper, interrupts)
        }
        Err(error) => Err(KvmError::call("KVM_CREATE_DEVICE (GICv3)", error)),
    }
}

/// Returns the version of the interrupt controller that [`create_gic`] would create. The VM must
/// have none, and keeps the one that this call creates.
pub fn gic_version(vm: &VmFd) -> Option<u8> {
    let kinds = [
        (kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3, 3),
        (kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V2, 2),
    ];
    kinds.into_iter().find(|(kind, _)| create_device(vm, *kind).is_ok()).map(|(_, version)| version)
}

fn configure_v3(
    vm: &VmFd,
    gic: &DeviceFd,
    vcpus: u64,
    has_helper: bool,
    interrupts: u32,
) -> Result<Gic, KvmError> {
    let space = (GIC_REDISTRIBUTORS.end.0 - GIC_REDISTRIBUTORS.start.0) / GIC_REDISTRIBUTOR_SIZE;
    // A gap separates the helper's redistributor from the others, the last of which is marked.
    let limit = if has_helper { space - 2 } else { space };
    if vcpus > limit {
        return Err(KvmError::Unsupported(format!(
            "--vcpus {vcpus}: the address map has space for the redistributors of {limit}"
        )));
    }
    set_address(gic, KVM_VGIC_V3_ADDR_TYPE_DIST, GIC_DISTRIBUTOR.start)?;
    // One region holds the redistributors that the guest sees; bits 63:52 of its address encode
    // their number, bits 11:0 the index of the region.
    let region = GuestAddress(vcpus << 52 | GIC_REDISTRIBUTORS.start.0);
    set_address(gic, KVM_VGIC_V3_ADDR_TYPE_REDIST_REGION, region)?;
    if has_helper {
        let last = GIC_REDISTRIBUTORS.end.0 - GIC_REDISTRIBUTOR_SIZE;
        let region = GuestAddress(1 << 52 | last | 1);
        set_address(gic, KVM_VGIC_V3_ADDR_TYPE_REDIST_REGION, region)?;
    }
    let its = create_device(vm, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_ITS)
        .inspect_err(|error| log::info!("the guest has no ITS: {error}"))
        .ok();
    if let Some(its) = &its {
        set_address(its, KVM_VGIC_ITS_ADDR_TYPE, GIC_ITS.start)?;
        initialize(its)?;
    }
    set_interrupt_count(gic, interrupts)?;
    initialize(gic)?;
    Ok(Gic::V3 { has_its: its.is_some() })
}

fn configure_v2(
    gic: &DeviceFd,
    vcpus: u64,
    has_helper: bool,
    interrupts: u32,
) -> Result<Gic, KvmError> {
    if has_helper && vcpus == GICV2_MAX_CPUS {
        return Err(KvmError::Unsupported(format!(
            "--prefault stage2,background=on: this host has a GICv2, which supports \
             {GICV2_MAX_CPUS} vCPUs, and the option needs one of them: request less --vcpus"
        )));
    }
    if vcpus > GICV2_MAX_CPUS {
        return Err(KvmError::Unsupported(format!(
            "--vcpus {vcpus}: this host has a GICv2, which supports {GICV2_MAX_CPUS} vCPUs"
        )));
    }
    set_address(gic, KVM_VGIC_V2_ADDR_TYPE_DIST, GIC_DISTRIBUTOR.start)?;
    set_address(gic, KVM_VGIC_V2_ADDR_TYPE_CPU, GIC_CPU_INTERFACE.start)?;
    set_interrupt_count(gic, interrupts)?;
    initialize(gic)?;
    Ok(Gic::V2)
}

fn create_device(vm: &VmFd, kind: u32) -> Result<DeviceFd, vmm_sys_util::errno::Error> {
    vm.create_device(&mut kvm_create_device { type_: kind, fd: 0, flags: 0 })
}

fn set_address(gic: &DeviceFd, kind: u32, address: GuestAddress) -> Result<(), KvmError> {
    let call = "KVM_SET_DEVICE_ATTR (KVM_DEV_ARM_VGIC_GRP_ADDR)";
    let group = KVM_DEV_ARM_VGIC_GRP_ADDR;
    set_attribute(gic, group, kind.into(), Some(&address.0), call)
}

/// Sets the number of interrupts, a multiple of 32 and at least 64.
fn set_interrupt_count(gic: &DeviceFd, interrupts: u32) -> Result<(), KvmError> {
    let all = (PRIVATE_INTERRUPT_COUNT + interrupts.max(1)).next_multiple_of(32);
    let call = "KVM_SET_DEVICE_ATTR (KVM_DEV_ARM_VGIC_GRP_NR_IRQS)";
    set_attribute(gic, KVM_DEV_ARM_VGIC_GRP_NR_IRQS, 0, Some(&all), call)
}

fn initialize(gic: &DeviceFd) -> Result<(), KvmError> {
    set_attribute::<u64>(
        gic,
        KVM_DEV_ARM_VGIC_GRP_CTRL,
        KVM_DEV_ARM_VGIC_CTRL_INIT.into(),
        None,
        "KVM_SET_DEVICE_ATTR (KVM_DEV_ARM_VGIC_CTRL_INIT)",
    )
}

fn set_attribute<T>(
    gic: &DeviceFd,
    group: u32,
    attr: u64,
    value: Option<&T>,
    call: &'static str,
) -> Result<(), KvmError> {
    let attribute = kvm_device_attr {
        flags: 0,
        group,
        attr,
        addr: value.map_or(0, |value| std::ptr::from_ref(value).addr() as u64),
    };
    gic.set_device_attr(&attribute).map_err(|error| KvmError::call(call, error))
}
