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
use vmm_sys_util::errno;

use crate::{
    arch::aarch64::{
        boot::{
            GIC_CPU_INTERFACE, GIC_DISTRIBUTOR, GIC_ITS, GIC_REDISTRIBUTOR_SIZE,
            GIC_REDISTRIBUTORS,
            fdt::{GICV2_MAX_CPUS, Gic},
        },
        gic_registers::PRIVATE_INTERRUPTS,
    },
    kvm::KvmError,
};

/// The interrupt controller of a VM. KVM frees it with the VM, which exists until all its file
/// descriptors are closed, also those of the controller.
#[derive(Debug)]
pub struct InterruptController {
    /// Description for the device tree.
    pub description: Gic,
    /// Number of SGIs, PPIs and SPIs, a multiple of 32.
    pub interrupts: u32,
    pub(super) gic: DeviceFd,
    /// Interrupt translation service of a GICv3.
    pub(super) its: Option<DeviceFd>,
}

/// Creates the interrupt controller of a VM, with `interrupts` SPIs for devices. All vCPUs must
/// exist, and with `has_helper` one more, which the guest does not see.
pub fn create_gic(
    vm: &VmFd,
    vcpus: u64,
    has_helper: bool,
    interrupts: u32,
) -> Result<InterruptController, KvmError> {
    match create_device(vm, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3) {
        Ok(gic) => configure_v3(vm, gic, vcpus, has_helper, interrupts),
        // ENODEV: the host has no GICv3.
        Err(error) if error.errno() == libc::ENODEV => {
            let gic = create_device(vm, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V2)
                .map_err(|error| KvmError::call("KVM_CREATE_DEVICE (GICv2)", error))?;
            configure_v2(gic, vcpus, has_helper, interrupts)
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
    gic: DeviceFd,
    vcpus: u64,
    has_helper: bool,
    interrupts: u32,
) -> Result<InterruptController, KvmError> {
    let space = (GIC_REDISTRIBUTORS.end.0 - GIC_REDISTRIBUTORS.start.0) / GIC_REDISTRIBUTOR_SIZE;
    // A gap separates the helper's redistributor from the others, the last of which is marked.
    let limit = if has_helper { space - 2 } else { space };
    if vcpus > limit {
        return Err(KvmError::Unsupported(format!(
            "--vcpus {vcpus}: the address map has space for the redistributors of {limit}"
        )));
    }
    set_address(&gic, KVM_VGIC_V3_ADDR_TYPE_DIST, GIC_DISTRIBUTOR.start)?;
    // One region holds the redistributors that the guest sees; bits 63:52 of its address encode
    // their number, bits 11:0 the index of the region.
    let region = GuestAddress(vcpus << 52 | GIC_REDISTRIBUTORS.start.0);
    set_address(&gic, KVM_VGIC_V3_ADDR_TYPE_REDIST_REGION, region)?;
    if has_helper {
        let last = GIC_REDISTRIBUTORS.end.0 - GIC_REDISTRIBUTOR_SIZE;
        let region = GuestAddress(1 << 52 | last | 1);
        set_address(&gic, KVM_VGIC_V3_ADDR_TYPE_REDIST_REGION, region)?;
    }
    let its = create_device(vm, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_ITS)
        .inspect_err(|error| log::info!("the guest has no ITS: {error}"))
        .ok();
    if let Some(its) = &its {
        set_address(its, KVM_VGIC_ITS_ADDR_TYPE, GIC_ITS.start)?;
        initialize(its)?;
    }
    let interrupts = set_interrupt_count(&gic, interrupts)?;
    initialize(&gic)?;
    let description = Gic::V3 { has_its: its.is_some() };
    Ok(InterruptController { description, interrupts, gic, its })
}

fn configure_v2(
    gic: DeviceFd,
    vcpus: u64,
    has_helper: bool,
    interrupts: u32,
) -> Result<InterruptController, KvmError> {
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
    set_address(&gic, KVM_VGIC_V2_ADDR_TYPE_DIST, GIC_DISTRIBUTOR.start)?;
    set_address(&gic, KVM_VGIC_V2_ADDR_TYPE_CPU, GIC_CPU_INTERFACE.start)?;
    let interrupts = set_interrupt_count(&gic, interrupts)?;
    initialize(&gic)?;
    Ok(InterruptController { description: Gic::V2, interrupts, gic, its: None })
}

fn create_device(vm: &VmFd, kind: u32) -> Result<DeviceFd, errno::Error> {
    vm.create_device(&mut kvm_create_device { type_: kind, fd: 0, flags: 0 })
}

fn set_address(gic: &DeviceFd, kind: u32, address: GuestAddress) -> Result<(), KvmError> {
    set_attribute(gic, KVM_DEV_ARM_VGIC_GRP_ADDR, kind.into(), Some(address.0))
        .map_err(|error| KvmError::call("KVM_SET_DEVICE_ATTR (KVM_DEV_ARM_VGIC_GRP_ADDR)", error))
}

/// Sets the number of interrupts, a multiple of 32 and at least 64, and returns it.
fn set_interrupt_count(gic: &DeviceFd, interrupts: u32) -> Result<u32, KvmError> {
    let all = (PRIVATE_INTERRUPTS + interrupts.max(1)).next_multiple_of(32);
    set_attribute(gic, KVM_DEV_ARM_VGIC_GRP_NR_IRQS, 0, Some(all.into())).map_err(|error| {
        KvmError::call("KVM_SET_DEVICE_ATTR (KVM_DEV_ARM_VGIC_GRP_NR_IRQS)", error)
    })?;
    Ok(all)
}

fn initialize(device: &DeviceFd) -> Result<(), KvmError> {
    let call = "KVM_SET_DEVICE_ATTR (KVM_DEV_ARM_VGIC_CTRL_INIT)";
    control(device, KVM_DEV_ARM_VGIC_CTRL_INIT, call)
}

/// Requests an operation of a GIC or an ITS (`KVM_DEV_ARM_VGIC_GRP_CTRL`). `call` names it in
/// errors.
pub(super) fn control(
    device: &DeviceFd,
    operation: u32,
    call: &'static str,
) -> Result<(), KvmError> {
    set_attribute(device, KVM_DEV_ARM_VGIC_GRP_CTRL, operation.into(), None)
        .map_err(|error| KvmError::call(call, error))
}

/// Returns the value of an attribute, of 32 or 64 bits.
pub(super) fn get_attribute(device: &DeviceFd, group: u32, attr: u64) -> errno::Result<u64> {
    // The kernel writes a value of 32 bits to the lower half: arm64 hosts are little-endian.
    let mut value = 0_u64;
    let addr = std::ptr::from_mut(&mut value).expose_provenance() as u64;
    let mut attribute = kvm_device_attr { flags: 0, group, attr, addr };
    // SAFETY: `addr` points to `value`, and no attribute of a GIC or an ITS exceeds 8 bytes.
    unsafe { device.get_device_attr(&mut attribute) }?;
    Ok(value)
}

/// Sets an attribute. Its value has 32 or 64 bits, or is `None` if the attribute has none.
pub(super) fn set_attribute(
    device: &DeviceFd,
    group: u32,
    attr: u64,
    value: Option<u64>,
) -> errno::Result<()> {
    let addr = value.as_ref().map_or(0, |value| std::ptr::from_ref(value).expose_provenance());
    device.set_device_attr(&kvm_device_attr { flags: 0, group, attr, addr: addr as u64 })
}
