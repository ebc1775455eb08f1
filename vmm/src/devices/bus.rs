// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Finds the device behind an address.
//!
//! Devices are added while the machine is built; after that the bus is shared by all vCPU threads
//! and never changes, so finding a device takes no lock. Each device has a lock of its own.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use thiserror::Error;

use super::{MmioDevice, MmioDeviceInfo};

/// Why a device cannot be put on the bus.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BusError {
    /// It lies where another one is.
    #[error("the registers of '{name}' at {start:#x} overlap those of '{other}'")]
    Overlap {
        /// The device.
        name: String,
        /// Its first address.
        start: u64,
        /// The one that is there.
        other: String,
    },
    /// It has no registers, or they leave the address space.
    #[error("'{name}' cannot have {size:#x} bytes of registers at {start:#x}")]
    Range {
        /// The device.
        name: String,
        /// Its first address.
        start: u64,
        /// Its size in bytes.
        size: u64,
    },
}

/// Guest accesses that nothing took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RefusedAccesses {
    /// Accesses to addresses of no device.
    pub unclaimed: u64,
    /// Accesses of an odd size, past a device's end, or to a register that the device does not
    /// have.
    pub malformed: u64,
}

/// The devices by address.
#[derive(Default)]
pub struct Bus {
    /// Sorted by address.
    places: Vec<Place>,
    unclaimed: AtomicU64,
    malformed: AtomicU64,
}

struct Place {
    description: MmioDeviceInfo,
    device: Arc<Mutex<dyn MmioDevice>>,
}

impl fmt::Debug for Bus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.descriptions()).finish()
    }
}

impl Bus {
    /// An empty bus.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts a device where its description says.
    ///
    /// # Errors
    /// It has no room there.
    pub fn add(
        &mut self,
        description: MmioDeviceInfo,
        device: Arc<Mutex<dyn MmioDevice>>,
    ) -> Result<(), BusError> {
        let MmioDeviceInfo { start, size, .. } = description;
        let name = || description.name.clone();
        let Some(end) = start.checked_add(size).filter(|_| size > 0) else {
            let name = name();
            return Err(BusError::Range { name, start, size });
        };
        let at = self.places.partition_point(|place| place.start() < start);
        let before = at.checked_sub(1).and_then(|at| self.places.get(at));
        let other = before
            .filter(|place| place.end() > start)
            .or_else(|| self.places.get(at).filter(|place| place.start() < end));
        if let Some(other) = other {
            return Err(BusError::Overlap {
                name: name(),
                start,
                other: other.description.name.clone(),
            });
        }
        let place = Place {
            description,
            device,
        };
        self.places.insert(at, place);
        Ok(())
    }

    /// What is on the bus, sorted by address.
    pub fn descriptions(&self) -> impl Iterator<Item = &MmioDeviceInfo> {
        self.places.iter().map(|place| &place.description)
    }

    /// Answers a load from a guest-physical address; what nothing answers is zero.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some((place, offset)) = self.find(address, data.len()) {
            place.device.lock().read(offset, data);
        }
    }

    /// Takes a store to a guest-physical address.
    pub fn write(&self, address: u64, data: &[u8]) {
        if let Some((place, offset)) = self.find(address, data.len()) {
            place.device.lock().write(offset, data);
        }
    }

    /// How many accesses nothing took.
    #[must_use]
    pub fn refused(&self) -> RefusedAccesses {
        let devices = self
            .places
            .iter()
            .map(|place| place.device.lock().refused());
        RefusedAccesses {
            unclaimed: self.unclaimed.load(Ordering::Relaxed),
            malformed: self.malformed.load(Ordering::Relaxed) + devices.sum::<u64>(),
        }
    }

    fn find(&self, address: u64, length: usize) -> Option<(&Place, u64)> {
        let after = self
            .places
            .partition_point(|place| place.start() <= address);
        let place = after
            .checked_sub(1)
            .and_then(|at| self.places.get(at))
            .filter(|place| address < place.end());
        let Some(place) = place else {
            self.unclaimed.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        let room = place.end() - address;
        if !matches!(length, 1 | 2 | 4 | 8) || length as u64 > room {
            self.malformed.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some((place, address - place.start()))
    }
}

impl Place {
    fn start(&self) -> u64 {
        self.description.start
    }

    /// [`Bus::add`] has checked that there is one.
    fn end(&self) -> u64 {
        self.description.start + self.description.size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads as its offset, and keeps what was written.
    #[derive(Default)]
    struct Notes(Vec<(u64, Vec<u8>)>);

    impl MmioDevice for Notes {
        fn read(&mut self, offset: u64, data: &mut [u8]) {
            data.fill(u8::try_from(offset).unwrap());
        }

        fn write(&mut self, offset: u64, data: &[u8]) {
            self.0.push((offset, data.to_vec()));
        }
    }

    fn at(name: &str, start: u64, size: u64) -> MmioDeviceInfo {
        MmioDeviceInfo {
            name: name.to_owned(),
            start,
            size,
            irq: None,
            compatible: &["test"],
        }
    }

    fn notes() -> Arc<Mutex<Notes>> {
        Arc::default()
    }

    #[test]
    fn an_access_reaches_the_device_behind_its_address() {
        let (low, high) = (notes(), notes());
        let mut bus = Bus::new();
        bus.add(at("high", 0x2000, 0x10), high.clone()).unwrap();
        bus.add(at("low", 0x1000, 0x10), low.clone()).unwrap();
        let mut data = [0; 2];

        bus.read(0x1008, &mut data);
        bus.write(0x200c, &[1, 2, 3, 4]);

        assert_eq!(data, [8, 8]);
        assert_eq!(low.lock().0, []);
        assert_eq!(high.lock().0, [(0xc, vec![1, 2, 3, 4])]);
        assert_eq!(bus.refused(), RefusedAccesses::default());
    }

    #[test]
    fn what_no_device_takes_reads_as_zero_and_is_counted() {
        let device = notes();
        let mut bus = Bus::new();
        bus.add(at("device", 0x1000, 0x10), device.clone()).unwrap();
        let (mut odd, mut over, mut none) = ([9; 3], [9; 4], [9; 8]);

        bus.read(0x1004, &mut odd);
        bus.read(0x100e, &mut over);
        bus.read(0xff8, &mut none);
        bus.read(u64::MAX, &mut none);
        bus.write(0x1010, &[1]);
        bus.write(0x100c, &[1; 8]);
        bus.write(0x1000, &[]);

        assert_eq!((odd, over, none), ([0; 3], [0; 4], [0; 8]));
        assert_eq!(device.lock().0, []);
        let refused = RefusedAccesses {
            unclaimed: 3,
            malformed: 4,
        };
        assert_eq!(bus.refused(), refused);
    }

    #[test]
    fn devices_do_not_overlap() {
        let mut bus = Bus::new();
        bus.add(at("one", 0x1000, 0x100), notes()).unwrap();

        let inside = bus.add(at("two", 0x10ff, 1), notes());
        let around = bus.add(at("two", 0xfff, 2), notes());
        let empty = bus.add(at("two", 0, 0), notes());
        let past_the_end = bus.add(at("two", u64::MAX, 2), notes());
        let beside = bus.add(at("two", 0x1100, 1), notes());

        assert!(matches!(inside, Err(BusError::Overlap { .. })));
        assert!(matches!(around, Err(BusError::Overlap { .. })));
        assert!(matches!(empty, Err(BusError::Range { .. })));
        assert!(matches!(past_the_end, Err(BusError::Range { .. })));
        assert_eq!(beside, Ok(()));
    }
}
