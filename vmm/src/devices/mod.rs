// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Emulated devices of a guest.
//!
//! A device answers a range of guest-physical addresses that no memslot covers, except the page of the
//! VM's generation. A guest access to that range ends `KVM_RUN` with an MMIO exit. The vCPU thread
//! passes the access to the [`Bus`], which finds the device and locks only that device: vCPUs that use
//! different devices do not contend. Interrupts take the opposite path through an eventfd that the
//! device manager registers as an irqfd, so that no device depends on KVM.
//!
//! A guest access cannot make the program fail: a load that no device handles returns zero, and a
//! store that no device handles has no effect.

mod bus;
mod clocks;
pub mod console_input;
pub mod console_output;
mod pl011;
pub mod serial;
mod state;
pub mod virtio;
mod vm_generation;

use granule_types::units::GuestAddress;

pub use bus::{Bus, BusError};
pub use clocks::{BootTimer, Rtc};
pub use pl011::Pl011;
pub use serial::Serial;
pub use state::{DeviceState, RestoreError};
pub use vm_generation::VmGeneration;

/// Size of a device's register range, in bytes; the distance between virtio devices.
pub const REGISTER_RANGE_SIZE: u64 = 0x1000;

/// Register interface of a device.
///
/// `offset` counts bytes from the first address of the device. The bus passes accesses of 1, 2,
/// 4 or 8 bytes that lie within the range of the device; a register may accept fewer sizes. Values
/// are little-endian. Both functions return whether the device has handled the access: `false`
/// reports a register that does not exist, does not accept this size, or cannot be accessed at this
/// time.
pub trait MmioDevice: Send {
    /// Handles a load. The caller zeroes `data`; the device leaves it unchanged if it has no such
    /// register.
    #[must_use]
    fn read(&mut self, offset: u64, data: &mut [u8]) -> bool;

    /// Handles a store.
    #[must_use]
    fn write(&mut self, offset: u64, data: &[u8]) -> bool;

    /// Stops the work of the device, which accesses no guest memory until [`Self::resume`], and
    /// returns its state; `None` if it has none.
    ///
    /// # Errors
    /// The state cannot be part of a snapshot, with the reason.
    fn suspend(&mut self) -> Result<Option<DeviceState>, String> {
        Ok(None)
    }

    /// Sets the state of a new device to that of a suspended one. It is suspended afterwards.
    ///
    /// # Errors
    /// The state is not that of such a device.
    fn restore(&mut self, state: &DeviceState) -> Result<(), RestoreError> {
        Err(state.refused_by("a device without a state"))
    }

    /// Continues the work of a suspended device. An interrupt that the guest has not handled is
    /// raised again, as that before the suspension may not have reached the guest.
    fn resume(&mut self) {}
}

/// Properties of a device that the device tree and the interrupt controller need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MmioDeviceInfo {
    /// Name, unique in the VM: `serial`, `disk0`.
    pub name: String,
    /// First guest-physical address of its registers, which take [`REGISTER_RANGE_SIZE`] bytes.
    pub start: GuestAddress,
    /// SPI of the device, counted from 0, if it has one. The SPI is edge-triggered: an irqfd
    /// without a resample event raises a pulse.
    pub irq: Option<u32>,
    /// `compatible` strings of its device tree node, the most specific one first.
    pub compatible: &'static [&'static str],
}

impl MmioDeviceInfo {
    /// Describes a device with these properties.
    pub fn new(
        name: &str,
        start: GuestAddress,
        irq: Option<u32>,
        compatible: &'static [&'static str],
    ) -> Self {
        Self { name: name.to_owned(), start, irq, compatible }
    }
}
