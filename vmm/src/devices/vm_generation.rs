// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Generation of a VM: 16 random bytes, and an interrupt when they have changed.
//!
//! VMs that are restored from one snapshot have the same random state. Each has another generation.
//! Linux compares it when it handles the interrupt, and reseeds its generator if it has changed
//! (`drivers/virt/vmgenid.c`, by the device tree since 6.10). The bytes are in a
//! [`ReadOnlyPage`](crate::kvm::read_only_page::ReadOnlyPage), because an exit cannot emulate the loads
//! by which the guest copies them: this device answers no access. A generation is not secret.

use granule_types::units::GuestAddress;
use vmm_sys_util::eventfd::EventFd;

use super::{DeviceState, MmioDevice, MmioDeviceInfo, RestoreError};

/// The interrupt of a generation. A restored device raises it once, when it is resumed: a pulse, as the
/// guest configures an edge-triggered SPI.
#[derive(Debug)]
pub struct VmGeneration {
    interrupt: EventFd,
    has_changed: bool,
}

impl VmGeneration {
    /// Name of the device, also in the device tree.
    pub const NAME: &str = "vmgenid";

    /// Creates the device of a VM that boots.
    pub const fn new(interrupt: EventFd) -> Self {
        Self { interrupt, has_changed: false }
    }

    /// Describes the device for the device tree.
    pub fn describe(start: GuestAddress, interrupt: u32) -> MmioDeviceInfo {
        MmioDeviceInfo::new(Self::NAME, start, Some(interrupt), &["microsoft,vmgenid"])
    }
}

impl MmioDevice for VmGeneration {
    fn read(&mut self, _: u64, _: &mut [u8]) -> bool {
        false
    }

    fn write(&mut self, _: u64, _: &[u8]) -> bool {
        false
    }

    fn suspend(&mut self) -> Result<Option<DeviceState>, String> {
        Ok(Some(DeviceState::VmGeneration))
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), RestoreError> {
        let DeviceState::VmGeneration = state else {
            return Err(state.refused_by("the generation of a VM"));
        };
        self.has_changed = true;
        Ok(())
    }

    fn resume(&mut self) {
        if std::mem::take(&mut self.has_changed)
            && let Err(error) = self.interrupt.write(1)
        {
            log::warn!("the interrupt of the VM's generation cannot be raised: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device() -> (EventFd, VmGeneration) {
        let interrupt = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        (interrupt.try_clone().unwrap(), VmGeneration::new(interrupt))
    }

    #[test]
    fn only_the_first_resume_after_a_restore_raises_the_interrupt() {
        let (interrupt, mut device) = device();

        device.resume();
        assert!(interrupt.read().is_err());
        let state = device.suspend().unwrap().unwrap();
        device.restore(&state).unwrap();
        device.resume();
        assert_eq!(interrupt.read().unwrap(), 1);
        device.resume();

        assert!(interrupt.read().is_err());
    }

    #[test]
    fn the_state_of_another_device_is_refused() {
        let (_, mut device) = device();
        let state = crate::devices::Rtc::default().suspend().unwrap().unwrap();

        let error = device.restore(&state).unwrap_err().to_string();

        assert_eq!(error, "the state of a real-time clock does not fit the generation of a VM");
    }
}
