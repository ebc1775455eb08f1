// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Access to the registers of a GICv3 and its ITS from user space
//! (`Documentation/virt/kvm/devices/arm-vgic-v3.rst` and `arm-vgic-its.rst`).

use kvm_bindings::{
    KVM_DEV_ARM_VGIC_GRP_CPU_SYSREGS, KVM_DEV_ARM_VGIC_GRP_DIST_REGS,
    KVM_DEV_ARM_VGIC_GRP_ITS_REGS, KVM_DEV_ARM_VGIC_GRP_LEVEL_INFO,
    KVM_DEV_ARM_VGIC_GRP_REDIST_REGS, KVM_DEV_ARM_VGIC_LINE_LEVEL_INFO_SHIFT,
    KVM_DEV_ARM_VGIC_V3_MPIDR_SHIFT, VGIC_LEVEL_INFO_LINE_LEVEL,
};
use kvm_ioctls::DeviceFd;

use super::{
    gic::{get_attribute, set_attribute},
    gic_registers::RegisterRange,
    state::{HexBytes, HexNumber, RegisterRanges},
};
use crate::kvm::KvmError;

/// A group of registers of a device.
#[derive(Debug, Clone, Copy)]
pub struct Registers<'a> {
    device: &'a DeviceFd,
    name: &'static str,
    group: u32,
    /// Bits that each attribute has besides the offset.
    attribute_base: u64,
}

impl<'a> Registers<'a> {
    /// Returns the distributor registers.
    pub fn distributor(device: &'a DeviceFd) -> Self {
        let group = KVM_DEV_ARM_VGIC_GRP_DIST_REGS;
        Self { device, name: "GICv3 distributor", group, attribute_base: 0 }
    }

    /// Returns the redistributor registers of the vCPU with an affinity.
    pub fn redistributor(device: &'a DeviceFd, affinity: u64) -> Self {
        let group = KVM_DEV_ARM_VGIC_GRP_REDIST_REGS;
        let attribute_base = affinity_bits(affinity);
        Self { device, name: "GICv3 redistributor", group, attribute_base }
    }

    /// Returns the CPU interface registers, whose offsets are the operands of `MRS`.
    pub fn cpu_interface(device: &'a DeviceFd, affinity: u64) -> Self {
        let group = KVM_DEV_ARM_VGIC_GRP_CPU_SYSREGS;
        let attribute_base = affinity_bits(affinity);
        Self { device, name: "GICv3 CPU interface", group, attribute_base }
    }

    /// Returns the line levels, 32 in a word, whose offset is the first INTID.
    pub fn levels(device: &'a DeviceFd, affinity: u64) -> Self {
        let info = u64::from(VGIC_LEVEL_INFO_LINE_LEVEL) << KVM_DEV_ARM_VGIC_LINE_LEVEL_INFO_SHIFT;
        let group = KVM_DEV_ARM_VGIC_GRP_LEVEL_INFO;
        let attribute_base = affinity_bits(affinity) | info;
        Self { device, name: "GICv3 line levels", group, attribute_base }
    }

    /// Returns the registers of an ITS.
    pub fn its(device: &'a DeviceFd) -> Self {
        let group = KVM_DEV_ARM_VGIC_GRP_ITS_REGS;
        Self { device, name: "GICv3 ITS", group, attribute_base: 0 }
    }

    /// Returns the value of the register at `offset`.
    pub fn get(&self, offset: u64) -> Result<u64, KvmError> {
        get_attribute(self.device, self.group, self.attribute_base | offset).map_err(|error| {
            let register = format!("{} register {offset:#x}", self.name);
            KvmError::Register { register, access: "read", source: error.into() }
        })
    }

    /// Sets the register at `offset`.
    pub fn set(&self, offset: u64, value: u64) -> Result<(), KvmError> {
        let attr = self.attribute_base | offset;
        set_attribute(self.device, self.group, attr, Some(value)).map_err(|error| {
            let register = format!("{} register {offset:#x} = {value:#x}", self.name);
            KvmError::Register { register, access: "set", source: error.into() }
        })
    }

    /// Returns the values of 32-bit registers.
    pub fn save(&self, ranges: &[RegisterRange]) -> Result<RegisterRanges, KvmError> {
        let mut saved = RegisterRanges::new();
        for range in ranges {
            let words = (0..range.count)
                .map(|index| Ok(low_word(self.get((range.offset + 4 * index).into())?)))
                .collect::<Result<Vec<u32>, KvmError>>()?;
            saved.insert(HexNumber(range.offset.into()), HexBytes::from_words(words));
        }
        Ok(saved)
    }

    /// Sets 32-bit registers to saved values, in the order of `ranges`.
    pub fn restore(
        &self,
        ranges: &[RegisterRange],
        saved: &RegisterRanges,
    ) -> Result<(), KvmError> {
        for range in ranges {
            let words = saved
                .get(&HexNumber(range.offset.into()))
                .and_then(|bytes| bytes.words(range.count as usize))
                .ok_or_else(|| {
                    incomplete_error(&format!("{} registers {:#x}", self.name, range.offset))
                })?;
            for (index, word) in (0_u64..).zip(words) {
                // SGIs are enabled after creation.
                if let Some(clear) = range.clear_offset {
                    self.set(u64::from(clear) + 4 * index, (!word).into())?;
                }
                self.set(u64::from(range.offset) + 4 * index, word.into())?;
            }
        }
        Ok(())
    }
}

/// Returns an affinity of `MPIDR_EL1` as attribute bits: Aff3 to Aff0 in bits 63:32.
const fn affinity_bits(affinity: u64) -> u64 {
    let packed = (affinity >> 32 & 0xff) << 24 | affinity & 0xff_ffff;
    packed << KVM_DEV_ARM_VGIC_V3_MPIDR_SHIFT
}

/// Returns the value of an attribute of 32 bits.
pub fn low_word(value: u64) -> u32 {
    u32::try_from(value & u64::from(u32::MAX)).unwrap_or(u32::MAX)
}

/// Returns the error of a snapshot without `registers`.
pub fn incomplete_error(registers: &str) -> KvmError {
    KvmError::Unsupported(format!(
        "the snapshot cannot be restored: it lacks the {registers}; save it again"
    ))
}
