// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device tree that tells a guest what its machine is made of.
//!
//! Interrupts are given as the GIC's binding has them: kind (0 shared, 1 of a CPU's own), number
//! within the kind, trigger (1 rising edge, 4 high level). KVM's irqfd raises and lowers the line at
//! once, so devices' interrupts are edges.

use std::ops::Range;

use granule_types::units::{Bytes, GuestAddress};
use thiserror::Error;
use vm_fdt::FdtWriter;

use super::layout::FDT_MAX_SIZE;
use crate::devices::MmioDeviceInfo;

const GIC_PHANDLE: u32 = 1;
const CLOCK_PHANDLE: u32 = 2;
const ITS_PHANDLE: u32 = 3;

const SHARED: u32 = 0;
const PRIVATE: u32 = 1;
const EDGE_RISING: u32 = 1;
const LEVEL_HIGH: u32 = 4;

/// The CPU's own interrupts of the timers, as KVM wires them: secure, non-secure, virtual, hypervisor
/// (`Documentation/devicetree/bindings/timer/arm,arch_timer.yaml`).
const TIMERS: [u32; 4] = [13, 14, 11, 10];
/// The CPU's own interrupt of the PMU.
pub const PMU_PPI: u32 = 7;
/// What a 16550's rates are divided from: a PC's crystal.
const SERIAL_CLOCK: u32 = 1_843_200;
/// What the kernel keeps of its command line, with the zero behind it (`COMMAND_LINE_SIZE` in
/// `arch/arm64/include/uapi/asm/setup.h`).
const COMMAND_LINE: usize = 2048;

/// The GICv2 binding names up to 8 CPUs that a private interrupt goes to.
const GICV2_CPUS: usize = 8;

/// The interrupt controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gic {
    /// GICv3.
    V3 {
        /// The distributor.
        distributor: Range<u64>,
        /// All redistributors.
        redistributors: Range<u64>,
        /// The interrupt translation service.
        its: Option<Range<u64>>,
    },
    /// GICv2.
    V2 {
        /// The distributor.
        distributor: Range<u64>,
        /// The CPU interface.
        cpu_interface: Range<u64>,
    },
}

/// What a device tree is made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fdt<'a> {
    /// Pieces of memory.
    pub memory: &'a [(GuestAddress, Bytes)],
    /// Each vCPU's affinity (`MPIDR_EL1`, affinity fields only), the one that starts first.
    pub cpus: &'a [u64],
    /// Whether the vCPUs have a PMU.
    pub pmu: bool,
    /// The interrupt controller.
    pub gic: &'a Gic,
    /// Devices, the console first.
    pub devices: &'a [MmioDeviceInfo],
    /// The kernel's command line.
    pub command_line: &'a str,
    /// The initramfs.
    pub initrd: Option<Range<u64>>,
    /// What the guest's random numbers start from, where the host has some to give.
    pub seed: Option<&'a [u8]>,
}

/// Why there is no device tree.
#[derive(Debug, Error)]
pub enum FdtError {
    /// A value cannot stand in a tree.
    #[error("the device tree cannot be written: {0}")]
    Write(vm_fdt::Error),
    /// It is larger than the kernel takes.
    #[error(
        "the device tree takes {size} bytes and the kernel takes {FDT_MAX_SIZE} at most: use fewer \
             vCPUs or a shorter --cmdline"
    )]
    Large {
        /// Its size in bytes.
        size: usize,
    },
    /// The command line is longer than the kernel reads.
    #[error(
        "--cmdline: {length} bytes; arm64 Linux reads {} (COMMAND_LINE_SIZE)",
        COMMAND_LINE - 1
    )]
    CommandLine {
        /// Its length in bytes.
        length: usize,
    },
}

impl From<vm_fdt::Error> for FdtError {
    fn from(error: vm_fdt::Error) -> Self {
        Self::Write(error)
    }
}

impl Fdt<'_> {
    /// The tree as the kernel reads it.
    ///
    /// # Errors
    /// The command line holds a NUL, or the tree is too large.
    pub fn write(&self) -> Result<Vec<u8>, FdtError> {
        let length = self.command_line.len();
        if length >= COMMAND_LINE {
            return Err(FdtError::CommandLine { length });
        }
        let mut fdt = FdtWriter::new()?;
        let root = fdt.begin_node("")?;
        fdt.property_string("compatible", "linux,dummy-virt")?;
        fdt.property_string("model", "granule")?;
        fdt.property_u32("#address-cells", 2)?;
        fdt.property_u32("#size-cells", 2)?;
        fdt.property_u32("interrupt-parent", GIC_PHANDLE)?;
        self.chosen(&mut fdt)?;
        for (start, size) in self.memory {
            let node = fdt.begin_node(&format!("memory@{:x}", start.0))?;
            fdt.property_string("device_type", "memory")?;
            fdt.property_array_u64("reg", &[start.0, size.0])?;
            fdt.end_node(node)?;
        }
        self.cpus(&mut fdt)?;
        self.gic(&mut fdt)?;
        self.timers(&mut fdt)?;
        let clock = fdt.begin_node("apb-pclk")?;
        fdt.property_string("compatible", "fixed-clock")?;
        fdt.property_u32("#clock-cells", 0)?;
        fdt.property_u32("clock-frequency", 24_000_000)?;
        fdt.property_string("clock-output-names", "clk24mhz")?;
        fdt.property_phandle(CLOCK_PHANDLE)?;
        fdt.end_node(clock)?;
        for device in self.devices {
            self.device(&mut fdt, device)?;
        }
        fdt.end_node(root)?;
        let bytes = fdt.finish()?;
        if bytes.len() as u64 > FDT_MAX_SIZE.0 {
            return Err(FdtError::Large { size: bytes.len() });
        }
        Ok(bytes)
    }

    fn chosen(&self, fdt: &mut FdtWriter) -> Result<(), FdtError> {
        let chosen = fdt.begin_node("chosen")?;
        fdt.property_string("bootargs", self.command_line)?;
        if let Some(console) = self.devices.first() {
            fdt.property_string("stdout-path", &format!("/{}", node(console)))?;
        }
        if let Some(initrd) = &self.initrd {
            fdt.property_u64("linux,initrd-start", initrd.start)?;
            fdt.property_u64("linux,initrd-end", initrd.end)?;
        }
        if let Some(seed) = self.seed {
            // One half places the kernel (KASLR), the other feeds its random numbers.
            let (place, rest) = seed.split_at(seed.len().min(8));
            fdt.property("kaslr-seed", place)?;
            fdt.property("rng-seed", rest)?;
        }
        fdt.end_node(chosen)?;
        Ok(())
    }

    fn cpus(&self, fdt: &mut FdtWriter) -> Result<(), FdtError> {
        let cpus = fdt.begin_node("cpus")?;
        fdt.property_u32("#address-cells", 2)?;
        fdt.property_u32("#size-cells", 0)?;
        for affinity in self.cpus {
            let node = fdt.begin_node(&format!("cpu@{affinity:x}"))?;
            fdt.property_string("device_type", "cpu")?;
            fdt.property_string("compatible", "arm,armv8")?;
            fdt.property_u64("reg", *affinity)?;
            fdt.property_string("enable-method", "psci")?;
            fdt.end_node(node)?;
        }
        fdt.end_node(cpus)?;
        let psci = fdt.begin_node("psci")?;
        let versions = ["arm,psci-1.0", "arm,psci-0.2"].map(str::to_owned);
        fdt.property_string_list("compatible", versions.into())?;
        fdt.property_string("method", "hvc")?;
        fdt.end_node(psci)?;
        if self.pmu {
            let pmu = fdt.begin_node("pmu")?;
            fdt.property_string("compatible", "arm,armv8-pmuv3")?;
            fdt.property_array_u32("interrupts", &[PRIVATE, PMU_PPI, self.private(LEVEL_HIGH)])?;
            fdt.end_node(pmu)?;
        }
        Ok(())
    }

    fn gic(&self, fdt: &mut FdtWriter) -> Result<(), FdtError> {
        let (distributor, other) = match self.gic {
            Gic::V3 {
                distributor,
                redistributors,
                ..
            } => (distributor, redistributors),
            Gic::V2 {
                distributor,
                cpu_interface,
            } => (distributor, cpu_interface),
        };
        let node = fdt.begin_node(&format!("intc@{:x}", distributor.start))?;
        let compatible = match self.gic {
            Gic::V3 { .. } => "arm,gic-v3",
            Gic::V2 { .. } => "arm,cortex-a15-gic",
        };
        fdt.property_string("compatible", compatible)?;
        fdt.property_null("interrupt-controller")?;
        fdt.property_u32("#interrupt-cells", 3)?;
        let [first, second] = [distributor, other].map(|range| [range.start, length(range)]);
        fdt.property_array_u64("reg", &[first, second].concat())?;
        fdt.property_phandle(GIC_PHANDLE)?;
        fdt.property_u32("#address-cells", 2)?;
        fdt.property_u32("#size-cells", 2)?;
        fdt.property_null("ranges")?;
        if let Gic::V3 { its: Some(its), .. } = self.gic {
            let node = fdt.begin_node(&format!("msi-controller@{:x}", its.start))?;
            fdt.property_string("compatible", "arm,gic-v3-its")?;
            fdt.property_null("msi-controller")?;
            fdt.property_u32("#msi-cells", 1)?;
            fdt.property_array_u64("reg", &[its.start, length(its)])?;
            fdt.property_phandle(ITS_PHANDLE)?;
            fdt.end_node(node)?;
        }
        fdt.end_node(node)?;
        Ok(())
    }

    fn timers(&self, fdt: &mut FdtWriter) -> Result<(), FdtError> {
        let node = fdt.begin_node("timer")?;
        fdt.property_string("compatible", "arm,armv8-timer")?;
        fdt.property_null("always-on")?;
        let cells = TIMERS.map(|number| [PRIVATE, number, self.private(LEVEL_HIGH)]);
        fdt.property_array_u32("interrupts", &cells.concat())?;
        fdt.end_node(node)?;
        Ok(())
    }

    fn device(&self, fdt: &mut FdtWriter, device: &MmioDeviceInfo) -> Result<(), FdtError> {
        let is = |name: &str| device.compatible.contains(&name);
        let open = fdt.begin_node(&node(device))?;
        let names = device.compatible.iter().map(|&name| name.to_owned());
        fdt.property_string_list("compatible", names.collect())?;
        fdt.property_array_u64("reg", &[device.start.0, device.size])?;
        if let Some(number) = device.irq {
            fdt.property_array_u32("interrupts", &[SHARED, number, EDGE_RISING])?;
        }
        if is("arm,primecell") {
            fdt.property_array_u32("clocks", &[CLOCK_PHANDLE, CLOCK_PHANDLE])?;
            let names = ["uartclk", "apb_pclk"].map(str::to_owned);
            fdt.property_string_list("clock-names", names.into())?;
        }
        if is("ns16550a") {
            fdt.property_u32("clock-frequency", SERIAL_CLOCK)?;
        }
        if is("virtio,mmio") {
            fdt.property_null("dma-coherent")?;
        }
        fdt.end_node(open)?;
        Ok(())
    }

    /// The trigger of a CPU's own interrupt; GICv2's binding also names the CPUs it goes to.
    fn private(&self, trigger: u32) -> u32 {
        match self.gic {
            Gic::V3 { .. } => trigger,
            Gic::V2 { .. } => {
                let cpus = self.cpus.len().min(GICV2_CPUS);
                trigger | ((1 << cpus) - 1) << 8
            }
        }
    }
}

/// The name of a device's node.
fn node(device: &MmioDeviceInfo) -> String {
    format!("{}@{:x}", device.name, device.start.0)
}

const fn length(range: &Range<u64>) -> u64 {
    range.end - range.start
}

#[cfg(test)]
mod tests;
