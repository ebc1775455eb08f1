// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's interrupt controller, in the kernel: a GICv3 with an interrupt translation service
//! (ITS), or a GICv2 where the host has only that
//! (`Documentation/virt/kvm/devices/arm-vgic-v3.rst`, `arm-vgic-its.rst`, `arm-vgic.rst`).
//!
//! The order is the kernel's: all vCPUs first, then the controller, its addresses, its ITS, the
//! number of interrupts, and last its initialisation.

use kvm_bindings::{
    KVM_DEV_ARM_VGIC_CTRL_INIT, KVM_DEV_ARM_VGIC_GRP_ADDR, KVM_DEV_ARM_VGIC_GRP_CTRL,
    KVM_DEV_ARM_VGIC_GRP_NR_IRQS, KVM_VGIC_ITS_ADDR_TYPE, KVM_VGIC_V2_ADDR_TYPE_CPU,
    KVM_VGIC_V2_ADDR_TYPE_DIST, KVM_VGIC_V3_ADDR_TYPE_DIST, KVM_VGIC_V3_ADDR_TYPE_REDIST_REGION,
    kvm_create_device, kvm_device_attr, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_ITS,
    kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V2, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3,
};
use kvm_ioctls::{DeviceFd, VmFd};
use thiserror::Error;

use crate::{
    arch::aarch64::boot::{
        fdt::Gic,
        layout::{GIC_CPU_INTERFACE, GIC_DISTRIBUTOR, GIC_ITS, GIC_REDISTRIBUTORS},
    },
    kvm::KvmError,
};

const DISTRIBUTOR_SIZE: u64 = 0x1_0000;
const REDISTRIBUTOR_SIZE: u64 = 0x2_0000;
const ITS_SIZE: u64 = 0x2_0000;
const CPU_INTERFACE_SIZE: u64 = 0x2000;
/// As many vCPUs as a GICv2 can tell apart.
const GICV2_CPUS: u64 = 8;
/// Interrupts that are no device's: those of the CPUs themselves.
const PRIVATE_INTERRUPTS: u32 = 32;

/// Why there is no interrupt controller.
#[derive(Debug, Error)]
pub enum GicError {
    /// A call failed.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// Too many vCPUs for a GICv2.
    #[error(
        "this host's interrupt controller is a GICv2, which serves 8 vCPUs; {0} were asked for"
    )]
    TooMany(u64),
    /// Too many vCPUs for our addresses.
    #[error("there is room for {most} vCPUs, and {asked} were asked for")]
    Room {
        /// How many were asked for.
        asked: u64,
        /// How many there can be.
        most: u64,
    },
}

/// A controller. It works for as long as the VM does.
#[derive(Debug)]
pub struct Controller {
    /// What the device tree says of it.
    pub description: Gic,
    _devices: Vec<DeviceFd>,
}

/// Makes the controller for a VM whose vCPUs are made, with `interrupts` for devices.
///
/// # Errors
/// The host has none that serves so many vCPUs, or refuses.
pub fn make(vm: &VmFd, vcpus: u64, interrupts: u32) -> Result<Controller, GicError> {
    match create(vm, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3) {
        Ok(gic) => v3(vm, gic, vcpus, interrupts),
        // ENODEV: the host's own is older.
        Err(error) if error.errno() == libc::ENODEV => {
            let gic = create(vm, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V2).map_err(|error| {
                KvmError::call("making the interrupt controller (KVM_CREATE_DEVICE)", error)
            })?;
            v2(gic, vcpus, interrupts)
        }
        Err(error) => Err(KvmError::call("making a GICv3 (KVM_CREATE_DEVICE)", error).into()),
    }
}

fn v3(vm: &VmFd, gic: DeviceFd, vcpus: u64, interrupts: u32) -> Result<Controller, GicError> {
    let most = (GIC_REDISTRIBUTORS.end - GIC_REDISTRIBUTORS.start) / REDISTRIBUTOR_SIZE;
    if vcpus > most {
        return Err(GicError::Room { asked: vcpus, most });
    }
    let placing = "placing the interrupt controller";
    address(&gic, KVM_VGIC_V3_ADDR_TYPE_DIST, GIC_DISTRIBUTOR, placing)?;
    // One region for all: their number in the bits from 52 on.
    let region = vcpus << 52 | GIC_REDISTRIBUTORS.start;
    address(&gic, KVM_VGIC_V3_ADDR_TYPE_REDIST_REGION, region, placing)?;
    let its = create(vm, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_ITS)
        .inspect_err(|error| log::info!("the guest gets no ITS: {error}"))
        .ok();
    if let Some(its) = &its {
        address(its, KVM_VGIC_ITS_ADDR_TYPE, GIC_ITS, placing)?;
        initialise(its)?;
    }
    count(&gic, interrupts)?;
    initialise(&gic)?;
    let redistributors =
        GIC_REDISTRIBUTORS.start..GIC_REDISTRIBUTORS.start + vcpus * REDISTRIBUTOR_SIZE;
    Ok(Controller {
        description: Gic::V3 {
            distributor: GIC_DISTRIBUTOR..GIC_DISTRIBUTOR + DISTRIBUTOR_SIZE,
            redistributors,
            its: its.is_some().then_some(GIC_ITS..GIC_ITS + ITS_SIZE),
        },
        _devices: std::iter::once(gic).chain(its).collect(),
    })
}

fn v2(gic: DeviceFd, vcpus: u64, interrupts: u32) -> Result<Controller, GicError> {
    if vcpus > GICV2_CPUS {
        return Err(GicError::TooMany(vcpus));
    }
    let placing = "placing the interrupt controller";
    address(&gic, KVM_VGIC_V2_ADDR_TYPE_DIST, GIC_DISTRIBUTOR, placing)?;
    address(&gic, KVM_VGIC_V2_ADDR_TYPE_CPU, GIC_CPU_INTERFACE, placing)?;
    count(&gic, interrupts)?;
    initialise(&gic)?;
    Ok(Controller {
        description: Gic::V2 {
            distributor: GIC_DISTRIBUTOR..GIC_DISTRIBUTOR + DISTRIBUTOR_SIZE,
            cpu_interface: GIC_CPU_INTERFACE..GIC_CPU_INTERFACE + CPU_INTERFACE_SIZE,
        },
        _devices: vec![gic],
    })
}

fn create(vm: &VmFd, kind: u32) -> Result<DeviceFd, vmm_sys_util::errno::Error> {
    vm.create_device(&mut kvm_create_device {
        type_: kind,
        fd: 0,
        flags: 0,
    })
}

fn address(gic: &DeviceFd, kind: u32, value: u64, doing: &'static str) -> Result<(), KvmError> {
    set(
        gic,
        KVM_DEV_ARM_VGIC_GRP_ADDR,
        kind.into(),
        Some(&value),
        doing,
    )
}

/// Tells how many interrupts there are: a multiple of 32, at least 64.
fn count(gic: &DeviceFd, interrupts: u32) -> Result<(), KvmError> {
    let all = (PRIVATE_INTERRUPTS + interrupts.max(1)).next_multiple_of(32);
    let doing = "giving the interrupt controller its interrupts";
    set(gic, KVM_DEV_ARM_VGIC_GRP_NR_IRQS, 0, Some(&all), doing)
}

fn initialise(gic: &DeviceFd) -> Result<(), KvmError> {
    set::<u64>(
        gic,
        KVM_DEV_ARM_VGIC_GRP_CTRL,
        KVM_DEV_ARM_VGIC_CTRL_INIT.into(),
        None,
        "initialising the interrupt controller",
    )
}

fn set<T>(
    gic: &DeviceFd,
    group: u32,
    attr: u64,
    value: Option<&T>,
    doing: &'static str,
) -> Result<(), KvmError> {
    let attribute = kvm_device_attr {
        flags: 0,
        group,
        attr,
        addr: value.map_or(0, |value| std::ptr::from_ref(value).addr() as u64),
    };
    gic.set_device_attr(&attribute)
        .map_err(|error| KvmError::call(doing, error))
}
