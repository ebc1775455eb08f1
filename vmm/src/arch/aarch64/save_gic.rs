// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Saves and restores a GICv3 and its ITS (`Documentation/virt/kvm/devices/arm-vgic-v3.rst` and
//! `arm-vgic-its.rst`). KVM refuses each access with `EBUSY` while an ioctl on a vCPU is in
//! progress.

use std::collections::BTreeMap;

use kvm_bindings::{
    KVM_DEV_ARM_ITS_RESTORE_TABLES, KVM_DEV_ARM_ITS_SAVE_TABLES,
    KVM_DEV_ARM_VGIC_SAVE_PENDING_TABLES,
};
use kvm_ioctls::DeviceFd;

use super::{
    boot::fdt::Gic,
    gic::{InterruptController, control},
    gic_access::{Registers, incomplete_error, low_word},
    gic_registers::{
        GICD_IIDR, ICC_CTLR_EL1, PRIVATE_INTERRUPTS, cpu_interface, distributor, redistributor,
    },
    state::{GicState, GicVcpuState, HexBytes, HexNumber, ItsState, RegisterId},
};
use crate::kvm::KvmError;

/// Returns the state of the GIC of vCPUs with these affinities.
///
/// KVM writes the pending LPIs and the ITS tables to guest memory, so this precedes saving the
/// memory. The writes are in dirty bitmaps, but not in dirty rings.
///
/// # Errors
/// The GIC is a GICv2, or KVM refuses an access.
pub fn save_gic(
    controller: &InterruptController,
    affinities: &[u64],
) -> Result<GicState, KvmError> {
    check_version(controller)?;
    let gic = &controller.gic;
    let call = "KVM_SET_DEVICE_ATTR (KVM_DEV_ARM_VGIC_SAVE_PENDING_TABLES)";
    control(gic, KVM_DEV_ARM_VGIC_SAVE_PENDING_TABLES, call)?;
    let its = controller.its.as_ref().map(save_its).transpose()?;
    let registers = Registers::distributor(gic);
    let vcpus = affinities.iter().map(|&affinity| save_vcpu(gic, affinity));
    let levels = spi_levels(gic, affinities);
    let levels = (PRIVATE_INTERRUPTS..controller.interrupts)
        .step_by(32)
        .map(|first| Ok(low_word(levels.get(first.into())?)))
        .collect::<Result<Vec<u32>, KvmError>>()?;
    Ok(GicState {
        interrupts: controller.interrupts,
        iidr: HexNumber(registers.get(GICD_IIDR.into())?),
        distributor: registers.save(&distributor(controller.interrupts))?,
        levels: HexBytes::from_words(levels),
        vcpus: vcpus.collect::<Result<_, _>>()?,
        its,
    })
}

/// Restores the revisions and the CPU interfaces of a GIC that has the state of its creation. A host
/// with another GIC refuses them, and they need no guest memory.
///
/// # Errors
/// The GIC is a GICv2, does not have the saved structure, or does not accept a value.
pub fn restore_interfaces(
    controller: &InterruptController,
    affinities: &[u64],
    state: &GicState,
) -> Result<(), KvmError> {
    check_version(controller)?;
    check_structure(controller, affinities, state)?;
    set_interfaces(controller, state).map_err(|error| {
        KvmError::Unsupported(format!(
            "the snapshot cannot be restored: {error}. Restore it on a host with the same GIC"
        ))
    })
}

fn set_interfaces(controller: &InterruptController, state: &GicState) -> Result<(), KvmError> {
    Registers::distributor(&controller.gic).set(GICD_IIDR.into(), state.iidr.0)?;
    if let (Some(its), Some(state)) = (&controller.its, &state.its) {
        // It selects the entry sizes in the BASERs, and may precede all other registers of the ITS.
        Registers::its(its).set(GITS_IIDR, state.iidr.0)?;
    }
    state.vcpus.iter().try_for_each(|vcpu| restore_cpu_interface(&controller.gic, vcpu))
}

/// Restores the interrupts of a GIC whose interfaces are restored. Guest memory is restored before,
/// because KVM reads the pending LPIs and the ITS tables from it.
///
/// # Errors
/// The GIC does not accept a value.
pub fn restore_interrupts(
    controller: &InterruptController,
    affinities: &[u64],
    state: &GicState,
) -> Result<(), KvmError> {
    let gic = &controller.gic;
    for vcpu in &state.vcpus {
        Registers::redistributor(gic, vcpu.affinity.0)
            .restore(&redistributor(), &vcpu.redistributor)?;
    }
    Registers::distributor(gic).restore(&distributor(state.interrupts), &state.distributor)?;
    for vcpu in &state.vcpus {
        Registers::levels(gic, vcpu.affinity.0).set(0, vcpu.levels.0)?;
    }
    let words = (state.interrupts.saturating_sub(PRIVATE_INTERRUPTS) / 32) as usize;
    let levels = state.levels.words(words).ok_or_else(|| incomplete_error("SPI line levels"))?;
    for (first, word) in (PRIVATE_INTERRUPTS..).step_by(32).zip(levels) {
        spi_levels(gic, affinities).set(first.into(), word.into())?;
    }
    if let (Some(its), Some(state)) = (&controller.its, &state.its) {
        restore_its(its, state)?;
    }
    Ok(())
}

fn check_version(controller: &InterruptController) -> Result<(), KvmError> {
    match controller.description {
        Gic::V3 { .. } => Ok(()),
        Gic::V2 => Err(KvmError::Unsupported(
            "snapshots need a GICv3, and this host has a GICv2: use a host with a GICv3".to_owned(),
        )),
    }
}

fn check_structure(
    controller: &InterruptController,
    affinities: &[u64],
    state: &GicState,
) -> Result<(), KvmError> {
    let saved: Vec<u64> = state.vcpus.iter().map(|vcpu| vcpu.affinity.0).collect();
    let differences = [
        ("affinities", format!("{saved:x?}"), format!("{affinities:x?}")),
        ("interrupts", state.interrupts.to_string(), controller.interrupts.to_string()),
        ("ITS", state.its.is_some().to_string(), controller.its.is_some().to_string()),
    ];
    match differences.iter().find(|(_, saved, created)| saved != created) {
        None => Ok(()),
        Some((name, saved, created)) => Err(KvmError::Unsupported(format!(
            "the snapshot cannot be restored: {name} {saved} in the snapshot, {created} in this VM. \
             Restore it with the saved configuration, on a host with the same GIC"
        ))),
    }
}

fn save_vcpu(gic: &DeviceFd, affinity: u64) -> Result<GicVcpuState, KvmError> {
    let interface = Registers::cpu_interface(gic, affinity);
    let ctlr = interface.get(ICC_CTLR_EL1.operands())?;
    let registers = cpu_interface(ctlr)
        .into_iter()
        .map(|id| Ok((id, HexNumber(interface.get(id.operands())?))))
        .collect::<Result<BTreeMap<RegisterId, HexNumber>, KvmError>>()?;
    Ok(GicVcpuState {
        affinity: HexNumber(affinity),
        redistributor: Registers::redistributor(gic, affinity).save(&redistributor())?,
        cpu_interface: registers,
        levels: HexNumber(Registers::levels(gic, affinity).get(0)?),
    })
}

fn restore_cpu_interface(gic: &DeviceFd, vcpu: &GicVcpuState) -> Result<(), KvmError> {
    let interface = Registers::cpu_interface(gic, vcpu.affinity.0);
    let value = |id: RegisterId| {
        let missing = || incomplete_error(&format!("CPU interface register {id}"));
        vcpu.cpu_interface.get(&id).map(|value| value.0).ok_or_else(missing)
    };
    for id in cpu_interface(value(ICC_CTLR_EL1)?) {
        interface.set(id.operands(), value(id)?)?;
    }
    Ok(())
}

const GITS_CTLR: u64 = 0x0;
const GITS_IIDR: u64 = 0x4;
const GITS_CBASER: u64 = 0x80;
const GITS_CWRITER: u64 = 0x88;
const GITS_CREADR: u64 = 0x90;
const GITS_BASER: [u64; 8] = [0x100, 0x108, 0x110, 0x118, 0x120, 0x128, 0x130, 0x138];

fn save_its(its: &DeviceFd) -> Result<ItsState, KvmError> {
    let call = "KVM_SET_DEVICE_ATTR (KVM_DEV_ARM_ITS_SAVE_TABLES)";
    control(its, KVM_DEV_ARM_ITS_SAVE_TABLES, call)?;
    let registers = Registers::its(its);
    let get = |offset| registers.get(offset).map(HexNumber);
    let mut basers = [HexNumber(0); 8];
    for (value, offset) in basers.iter_mut().zip(GITS_BASER) {
        *value = get(offset)?;
    }
    Ok(ItsState {
        iidr: get(GITS_IIDR)?,
        ctlr: get(GITS_CTLR)?,
        cbaser: get(GITS_CBASER)?,
        creadr: get(GITS_CREADR)?,
        cwriter: get(GITS_CWRITER)?,
        basers,
    })
}

/// Restores an ITS, after its revision and the redistributors, in the order that `arm-vgic-its.rst`
/// requires.
fn restore_its(its: &DeviceFd, state: &ItsState) -> Result<(), KvmError> {
    let registers = Registers::its(its);
    // A write to CBASER resets CREADR.
    registers.set(GITS_CBASER, state.cbaser.0)?;
    for (offset, value) in GITS_BASER.into_iter().zip(state.basers) {
        registers.set(offset, value.0)?;
    }
    registers.set(GITS_CREADR, state.creadr.0)?;
    registers.set(GITS_CWRITER, state.cwriter.0)?;
    let call = "KVM_SET_DEVICE_ATTR (KVM_DEV_ARM_ITS_RESTORE_TABLES)";
    control(its, KVM_DEV_ARM_ITS_RESTORE_TABLES, call)?;
    registers.set(GITS_CTLR, state.ctlr.0)
}

/// Returns the line levels of the SPIs: KVM ignores the affinity, but it must be that of a vCPU.
fn spi_levels<'a>(gic: &'a DeviceFd, affinities: &[u64]) -> Registers<'a> {
    Registers::levels(gic, affinities.first().copied().unwrap_or(0))
}
