// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! MMIO bus: dispatches accesses to devices by the address map of `vm-device`.
//!
//! Devices are added while the VM is built. The bus does not change after that, so vCPU threads
//! look up devices without a lock. Each device has its own lock.

use std::{collections::BTreeMap, fmt, sync::Arc};

use granule_types::units::GuestAddress;
use parking_lot::Mutex;
use thiserror::Error;
use vm_device::bus::{MmioAddress, MmioBus, MmioRange};

use super::{DeviceState, MmioDevice, MmioDeviceInfo, REGISTER_RANGE_SIZE, RestoreError};

/// Error returned when a device cannot be added to the bus: its registers exceed the address space
/// or overlap those of another device.
#[derive(Debug, Error)]
#[error(
    "'{name}' cannot have {REGISTER_RANGE_SIZE:#x} bytes of registers at {start:#x}",
    name = device.name, start = device.start.0
)]
pub struct BusError {
    /// The device.
    pub device: MmioDeviceInfo,
    /// Cause.
    pub source: vm_device::bus::Error,
}

/// Devices by guest-physical address.
#[derive(Default)]
pub struct Bus {
    devices: MmioBus<Arc<Mutex<dyn MmioDevice>>>,
    /// Descriptions of the devices, sorted by address.
    device_infos: Vec<MmioDeviceInfo>,
}

impl fmt::Debug for Bus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.device_infos).finish()
    }
}

impl Bus {
    /// Adds a device at the address in `info`.
    pub fn add(
        &mut self,
        info: MmioDeviceInfo,
        device: Arc<Mutex<dyn MmioDevice>>,
    ) -> Result<(), BusError> {
        let range = MmioRange::new(MmioAddress(info.start.0), REGISTER_RANGE_SIZE);
        if let Err(source) = range.and_then(|range| self.devices.register(range, device)) {
            return Err(BusError { device: info, source });
        }
        let index = self.device_infos.partition_point(|other| other.start < info.start);
        self.device_infos.insert(index, info);
        Ok(())
    }

    /// Returns the descriptions of the devices, sorted by address.
    pub fn device_infos(&self) -> impl Iterator<Item = &MmioDeviceInfo> {
        self.device_infos.iter()
    }

    /// Handles a load; an access that no device handles reads as zero.
    pub fn read(&self, address: GuestAddress, data: &mut [u8]) {
        data.fill(0);
        self.dispatch(address, data.len(), |device, offset| device.read(offset, data));
    }

    /// Handles a store.
    pub fn write(&self, address: GuestAddress, data: &[u8]) {
        self.dispatch(address, data.len(), |device, offset| device.write(offset, data));
    }

    /// Suspends all devices. Returns the states of those that have one, by name.
    ///
    /// # Errors
    /// A device cannot be part of a snapshot, with its name and the reason. All devices are
    /// suspended in any case.
    pub fn suspend(&self) -> Result<BTreeMap<String, DeviceState>, String> {
        let mut states = BTreeMap::new();
        let mut result = Ok(());
        for (info, device) in self.named_devices() {
            let suspended = device.lock().suspend();
            match suspended {
                Ok(state) => states.extend(state.map(|state| (info.name.clone(), state))),
                Err(reason) => result = result.and(Err(format!("{}: {reason}", info.name))),
            }
        }
        result.map(|()| states)
    }

    /// Sets the states of new devices to those of suspended ones. They are suspended afterwards.
    ///
    /// # Errors
    /// A state is missing, or is that of another device.
    pub fn restore(&self, states: &BTreeMap<String, DeviceState>) -> Result<(), RestoreError> {
        for (name, state) in states {
            let device = self.named_devices().find(|(info, _)| info.name == *name);
            let (_, device) = device.ok_or_else(|| state.refused_by("a VM without this device"))?;
            device.lock().restore(state).map_err(|error| error.of_device(name))?;
        }
        for (info, device) in self.named_devices() {
            // A device that has a state returns it when it is suspended.
            if !states.contains_key(&info.name) && device.lock().suspend() != Ok(None) {
                let error = RestoreError("the snapshot has no state of this device".to_owned());
                return Err(error.of_device(&info.name));
            }
        }
        Ok(())
    }

    /// Continues the work of all suspended devices.
    pub fn resume(&self) {
        self.named_devices().for_each(|(_, device)| device.lock().resume());
    }

    fn named_devices(
        &self,
    ) -> impl Iterator<Item = (&MmioDeviceInfo, &Arc<Mutex<dyn MmioDevice>>)> {
        self.device_infos.iter().filter_map(|info| {
            let (_, device) = self.devices.device(MmioAddress(info.start.0))?;
            Some((info, device))
        })
    }

    /// Calls `access` on the device whose registers contain all bytes of the access.
    fn dispatch(
        &self,
        address: GuestAddress,
        length: usize,
        access: impl FnOnce(&mut dyn MmioDevice, u64) -> bool,
    ) {
        let handled = self.devices.device(MmioAddress(address.0)).is_some_and(|(range, device)| {
            let offset = address.0 - range.base().0;
            let fits = matches!(length, 1 | 2 | 4 | 8) && length as u64 <= range.size() - offset;
            fits && access(&mut *device.lock(), offset)
        });
        if !handled {
            log::debug!("no device handles an access of {length} bytes at {:#x}", address.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::Rtc, *};

    /// Device whose registers read as their offset. It records stores and has no register 0xf.
    #[derive(Default)]
    struct RecordingDevice(Vec<(u64, Vec<u8>)>);

    impl MmioDevice for RecordingDevice {
        fn read(&mut self, offset: u64, data: &mut [u8]) -> bool {
            let exists = offset != 0xf;
            if exists {
                data.fill(u8::try_from(offset).unwrap());
            }
            exists
        }

        fn write(&mut self, offset: u64, data: &[u8]) -> bool {
            self.0.push((offset, data.to_vec()));
            true
        }
    }

    fn device_info(name: &str, start: u64) -> MmioDeviceInfo {
        MmioDeviceInfo::new(name, GuestAddress(start), None, &["test"])
    }

    fn recording_device() -> Arc<Mutex<RecordingDevice>> {
        Arc::default()
    }

    #[test]
    fn an_access_reaches_the_device_at_its_address() {
        let (low, high) = (recording_device(), recording_device());
        let mut bus = Bus::default();
        bus.add(device_info("high", 0x2000), high.clone()).unwrap();
        bus.add(device_info("low", 0x1000), low.clone()).unwrap();
        let mut data = [0; 2];

        bus.read(GuestAddress(0x1008), &mut data);
        bus.write(GuestAddress(0x200c), &[1, 2, 3, 4]);

        assert_eq!(data, [8, 8]);
        assert_eq!(low.lock().0, []);
        assert_eq!(high.lock().0, [(0xc, vec![1, 2, 3, 4])]);
        assert!(bus.device_infos().map(|info| &info.name).eq(["low", "high"]));
    }

    #[test]
    fn a_refused_access_reads_as_zero_and_writes_nothing() {
        let device = recording_device();
        let mut bus = Bus::default();
        bus.add(device_info("device", 0x1000), device.clone()).unwrap();

        for (address, size) in [(0x1004, 3), (0x1ffe, 4), (0x100f, 1), (0xff8, 8), (u64::MAX, 8)] {
            let mut data = [9; 8];
            bus.read(GuestAddress(address), &mut data[..size]);
            assert_eq!(data[..size], [0; 8][..size], "{address:#x}");
        }
        bus.write(GuestAddress(0x2000), &[1]);
        bus.write(GuestAddress(0x1ffc), &[1; 8]);
        bus.write(GuestAddress(0x1000), &[]);

        assert_eq!(device.lock().0, []);
    }

    #[test]
    fn overlapping_and_invalid_ranges_are_refused() {
        let mut bus = Bus::default();
        bus.add(device_info("one", 0x1000), recording_device()).unwrap();

        for (start, expected) in [
            (0x1fff, vm_device::bus::Error::DeviceOverlap),
            (1, vm_device::bus::Error::DeviceOverlap),
            (u64::MAX, vm_device::bus::Error::InvalidRange),
        ] {
            let error = bus.add(device_info("two", start), recording_device()).unwrap_err();
            assert_eq!(error.source, expected, "{error}");
        }
        bus.add(device_info("two", 0x2000), recording_device()).unwrap();
    }

    #[test]
    fn a_missing_state_and_that_of_a_missing_device_are_refused() {
        let mut bus = Bus::default();
        bus.add(device_info("clock", 0x1000), Arc::new(Mutex::new(Rtc::default()))).unwrap();
        bus.add(device_info("stateless", 0x2000), recording_device()).unwrap();
        let states = bus.suspend().unwrap();
        let renamed = states.values().map(|state| ("other".to_owned(), state.clone())).collect();

        assert_eq!(bus.restore(&states), Ok(()));
        let missing = bus.restore(&BTreeMap::new()).unwrap_err().to_string();
        let other = bus.restore(&renamed).unwrap_err().to_string();

        assert_eq!(missing, "clock: the snapshot has no state of this device");
        assert!(other.contains("a VM without this device"), "{other}");
    }
}
