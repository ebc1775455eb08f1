// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Device tree (FDT) of an arm64 guest.
//!
//! Interrupt specifiers follow the GIC binding: type (0 SPI, 1 PPI), number within the type,
//! trigger (1 rising edge, 4 level high). KVM's irqfd asserts and deasserts the line at once, so
//! device interrupts are edge-triggered.

use std::ops::Range;

use granule_types::units::{Bytes, GuestAddress};
use vm_fdt::FdtWriter;

use super::{
    BootError, FDT_MAX_SIZE, GIC_CPU_INTERFACE, GIC_DISTRIBUTOR, GIC_ITS, GIC_REDISTRIBUTOR_SIZE,
    GIC_REDISTRIBUTORS,
};
use crate::devices::{MmioDeviceInfo, REGISTER_RANGE_SIZE};

const GIC_PHANDLE: u32 = 1;
const CLOCK_PHANDLE: u32 = 2;
const ITS_PHANDLE: u32 = 3;

const GIC_SPI: u32 = 0;
const GIC_PPI: u32 = 1;
const IRQ_TYPE_EDGE_RISING: u32 = 1;
const IRQ_TYPE_LEVEL_HIGH: u32 = 4;

/// PPIs of the timers, as KVM wires them: secure, non-secure, virtual, hypervisor
/// (`Documentation/devicetree/bindings/timer/arm,arch_timer.yaml`).
const TIMER_PPIS: [u32; 4] = [13, 14, 11, 10];
/// PPI of the PMU.
pub const PMU_PPI: u32 = 7;
/// Clock of a 16550 in Hz.
const SERIAL_CLOCK_HZ: u32 = 1_843_200;
/// Maximum number of CPUs of a GICv2, and the width of the CPU mask in its interrupt specifiers.
pub const GICV2_MAX_CPUS: u64 = 8;

/// Interrupt controller at the addresses in [`boot`](super).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gic {
    /// GICv3.
    V3 {
        /// Indicates that the GIC has an interrupt translation service.
        has_its: bool,
    },
    /// GICv2.
    V2,
}

/// Content of a device tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fdt<'a> {
    /// Memory ranges, each `(start, size)`.
    pub memory: &'a [(GuestAddress, Bytes)],
    /// Affinity fields of each vCPU's `MPIDR_EL1`, the boot vCPU first.
    pub affinities: &'a [u64],
    /// Indicates that the vCPUs have a PMU.
    pub has_pmu: bool,
    /// Interrupt controller.
    pub gic: Gic,
    /// Devices, the console first.
    pub devices: &'a [MmioDeviceInfo],
    /// Kernel command line.
    pub command_line: &'a str,
    /// Range of the initramfs.
    pub initrd: Option<Range<GuestAddress>>,
    /// Random bytes for `kaslr-seed` and `rng-seed`, if the host's generator is initialised.
    pub seed: Option<&'a [u8]>,
}

impl Fdt<'_> {
    /// Serialises the device tree.
    ///
    /// # Errors
    /// A string holds a NUL, or the device tree is too large.
    pub fn write(&self) -> Result<Vec<u8>, BootError> {
        let mut fdt = FdtWriter::new()?;
        let root = fdt.begin_node("")?;
        fdt.property_string("compatible", "linux,dummy-virt")?;
        fdt.property_string("model", "granule")?;
        fdt.property_u32("#address-cells", 2)?;
        fdt.property_u32("#size-cells", 2)?;
        fdt.property_u32("interrupt-parent", GIC_PHANDLE)?;
        self.write_chosen(&mut fdt)?;
        for (start, size) in self.memory {
            let node = fdt.begin_node(&format!("memory@{:x}", start.0))?;
            fdt.property_string("device_type", "memory")?;
            fdt.property_array_u64("reg", &[start.0, size.0])?;
            fdt.end_node(node)?;
        }
        self.write_cpus(&mut fdt)?;
        self.write_gic(&mut fdt)?;
        self.write_timers(&mut fdt)?;
        let clock = fdt.begin_node("apb-pclk")?;
        fdt.property_string("compatible", "fixed-clock")?;
        fdt.property_u32("#clock-cells", 0)?;
        fdt.property_u32("clock-frequency", 24_000_000)?;
        fdt.property_string("clock-output-names", "clk24mhz")?;
        fdt.property_phandle(CLOCK_PHANDLE)?;
        fdt.end_node(clock)?;
        for device in self.devices {
            self.write_device(&mut fdt, device)?;
        }
        fdt.end_node(root)?;
        let bytes = fdt.finish()?;
        if bytes.len() as u64 > FDT_MAX_SIZE.0 {
            return Err(BootError::InvalidInput(format!(
                "the device tree has {} bytes; the kernel accepts {FDT_MAX_SIZE}: use fewer vCPUs \
                 or a shorter --cmdline",
                bytes.len()
            )));
        }
        Ok(bytes)
    }

    fn write_chosen(&self, fdt: &mut FdtWriter) -> Result<(), BootError> {
        let chosen = fdt.begin_node("chosen")?;
        fdt.property_string("bootargs", self.command_line)?;
        if let Some(console) = self.devices.first() {
            fdt.property_string("stdout-path", &format!("/{}", node_name(console)))?;
        }
        if let Some(initrd) = &self.initrd {
            fdt.property_u64("linux,initrd-start", initrd.start.0)?;
            fdt.property_u64("linux,initrd-end", initrd.end.0)?;
        }
        if let Some(seed) = self.seed {
            let (kaslr, rng) = seed.split_at(seed.len().min(8));
            fdt.property("kaslr-seed", kaslr)?;
            fdt.property("rng-seed", rng)?;
        }
        fdt.end_node(chosen)?;
        Ok(())
    }

    fn write_cpus(&self, fdt: &mut FdtWriter) -> Result<(), BootError> {
        let cpus = fdt.begin_node("cpus")?;
        fdt.property_u32("#address-cells", 2)?;
        fdt.property_u32("#size-cells", 0)?;
        for affinity in self.affinities {
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
        if self.has_pmu {
            let pmu = fdt.begin_node("pmu")?;
            fdt.property_string("compatible", "arm,armv8-pmuv3")?;
            fdt.property_array_u32("interrupts", &self.ppi_specifier(PMU_PPI))?;
            fdt.end_node(pmu)?;
        }
        Ok(())
    }

    fn write_gic(&self, fdt: &mut FdtWriter) -> Result<(), BootError> {
        let start = GIC_REDISTRIBUTORS.start;
        let end = GuestAddress(start.0 + self.affinities.len() as u64 * GIC_REDISTRIBUTOR_SIZE);
        let (compatible, other) = match self.gic {
            Gic::V3 { .. } => ("arm,gic-v3", start..end),
            Gic::V2 => ("arm,cortex-a15-gic", GIC_CPU_INTERFACE),
        };
        let node = fdt.begin_node(&format!("intc@{:x}", GIC_DISTRIBUTOR.start.0))?;
        fdt.property_string("compatible", compatible)?;
        fdt.property_null("interrupt-controller")?;
        fdt.property_u32("#interrupt-cells", 3)?;
        let reg = [GIC_DISTRIBUTOR, other].map(|range| start_and_size(&range));
        fdt.property_array_u64("reg", &reg.concat())?;
        fdt.property_phandle(GIC_PHANDLE)?;
        fdt.property_u32("#address-cells", 2)?;
        fdt.property_u32("#size-cells", 2)?;
        fdt.property_null("ranges")?;
        if self.gic == (Gic::V3 { has_its: true }) {
            let node = fdt.begin_node(&format!("msi-controller@{:x}", GIC_ITS.start.0))?;
            fdt.property_string("compatible", "arm,gic-v3-its")?;
            fdt.property_null("msi-controller")?;
            fdt.property_u32("#msi-cells", 1)?;
            fdt.property_array_u64("reg", &start_and_size(&GIC_ITS))?;
            fdt.property_phandle(ITS_PHANDLE)?;
            fdt.end_node(node)?;
        }
        fdt.end_node(node)?;
        Ok(())
    }

    fn write_timers(&self, fdt: &mut FdtWriter) -> Result<(), BootError> {
        let node = fdt.begin_node("timer")?;
        fdt.property_string("compatible", "arm,armv8-timer")?;
        fdt.property_null("always-on")?;
        let cells = TIMER_PPIS.map(|number| self.ppi_specifier(number));
        fdt.property_array_u32("interrupts", &cells.concat())?;
        fdt.end_node(node)?;
        Ok(())
    }

    fn write_device(&self, fdt: &mut FdtWriter, device: &MmioDeviceInfo) -> Result<(), BootError> {
        let is_compatible = |name: &str| device.compatible.contains(&name);
        let node = fdt.begin_node(&node_name(device))?;
        let names = device.compatible.iter().map(|&name| name.to_owned());
        fdt.property_string_list("compatible", names.collect())?;
        fdt.property_array_u64("reg", &[device.start.0, REGISTER_RANGE_SIZE])?;
        if let Some(number) = device.irq {
            fdt.property_array_u32("interrupts", &[GIC_SPI, number, IRQ_TYPE_EDGE_RISING])?;
        }
        if is_compatible("arm,primecell") {
            fdt.property_array_u32("clocks", &[CLOCK_PHANDLE, CLOCK_PHANDLE])?;
            let names = ["uartclk", "apb_pclk"].map(str::to_owned);
            fdt.property_string_list("clock-names", names.into())?;
        }
        if is_compatible("ns16550a") {
            fdt.property_u32("clock-frequency", SERIAL_CLOCK_HZ)?;
        }
        if is_compatible("virtio,mmio") {
            fdt.property_null("dma-coherent")?;
        }
        fdt.end_node(node)?;
        Ok(())
    }

    /// Returns the specifier of a level-triggered PPI; the GICv2 binding adds a CPU mask.
    fn ppi_specifier(&self, number: u32) -> [u32; 3] {
        let cpu_mask = match self.gic {
            Gic::V3 { .. } => 0,
            Gic::V2 => (1 << (self.affinities.len() as u64).min(GICV2_MAX_CPUS)) - 1,
        };
        [GIC_PPI, number, IRQ_TYPE_LEVEL_HIGH | cpu_mask << 8]
    }
}

fn node_name(device: &MmioDeviceInfo) -> String {
    format!("{}@{:x}", device.name, device.start.0)
}

const fn start_and_size(range: &Range<GuestAddress>) -> [u64; 2] {
    [range.start.0, range.end.0 - range.start.0]
}

#[cfg(test)]
mod tests;
