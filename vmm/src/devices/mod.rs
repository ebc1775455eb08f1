// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's devices.
//!
//! A device is a range of guest-physical addresses that no memory lies behind. The guest's access
//! to it leaves the vCPU's run loop, which hands it to the [`Bus`]; the bus finds the device and
//! takes that device's lock, so vCPUs that use different devices do not wait for each other.
//! Interrupts go the other way through an event file descriptor, which the machine registers with
//! KVM as an irqfd: no device knows about KVM.
//!
//! What a guest does to a register is never an error of this program. Accesses that no device
//! takes read as zero, write nothing, and are counted.

mod boot_timer;
mod bus;
pub mod console_input;
pub mod console_output;
mod pl011;
mod rtc;
pub mod serial;
#[cfg(test)]
mod testing;
pub mod virtio;

pub use boot_timer::BootTimer;
pub use bus::{Bus, BusError, RefusedAccesses};
pub use pl011::Pl011;
pub use rtc::Rtc;
pub use serial::Serial;

/// Registers of a device.
///
/// `offset` counts bytes from the device's first address. The bus passes on accesses of 1, 2, 4
/// or 8 bytes that lie within the device's range; which of these a register takes is the device's
/// affair. Values are little-endian.
pub trait MmioDevice: Send {
    /// Answers a load: all of `data` is written.
    fn read(&mut self, offset: u64, data: &mut [u8]);

    /// Takes a store.
    fn write(&mut self, offset: u64, data: &[u8]);

    /// How many accesses the device did not take: a size or an offset that it does not have.
    fn refused(&self) -> u64 {
        0
    }
}

/// What the device tree and the interrupt controller have to know about a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MmioDeviceInfo {
    /// Its name, unique in the machine: `serial`, `disk0`.
    pub name: String,
    /// Its first guest-physical address.
    pub start: u64,
    /// Its size in bytes.
    pub size: u64,
    /// Its shared peripheral interrupt, counted from 0, if it has one. It is edge-triggered: an
    /// irqfd without a resample event gives a pulse.
    pub irq: Option<u32>,
    /// Its `compatible` strings in the device tree, the most special one first.
    pub compatible: &'static [&'static str],
}
