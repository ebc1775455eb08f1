// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device's configuration space (virtio 1.2, section 2.5): bytes that the driver reads, some of
//! which it may write, and which the device may change while the driver runs.

use std::{
    ops::Range,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use parking_lot::Mutex;

use super::Interrupt;

/// The bytes, shared by the device, its transport and whoever controls the device.
#[derive(Debug, Clone)]
pub struct ConfigSpace(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    bytes: Mutex<Vec<u8>>,
    writable: Range<usize>,
    generation: AtomicU32,
    interrupt: OnceLock<Arc<Interrupt>>,
}

impl ConfigSpace {
    /// A space with these contents, of which the driver may write the range given.
    #[must_use]
    pub fn new(bytes: Vec<u8>, writable: Range<usize>) -> Self {
        Self(Arc::new(Shared {
            bytes: Mutex::new(bytes),
            writable,
            generation: AtomicU32::new(0),
            interrupt: OnceLock::new(),
        }))
    }

    pub(super) fn announce_by(&self, interrupt: Arc<Interrupt>) {
        // A device has one transport for life.
        let _ = self.0.interrupt.set(interrupt);
    }

    pub(super) fn generation(&self) -> u32 {
        self.0.generation.load(Ordering::Acquire)
    }

    /// Copies what is there from `offset` on; bytes past the end are zero. Says whether all was
    /// there.
    pub fn read(&self, offset: usize, data: &mut [u8]) -> bool {
        data.fill(0);
        let bytes = self.0.bytes.lock();
        let found = bytes.get(offset..).unwrap_or_default();
        let count = found.len().min(data.len());
        data[..count].copy_from_slice(&found[..count]);
        count == data.len()
    }

    /// The little-endian number at `offset`, or 0.
    #[must_use]
    pub fn read_u32(&self, offset: usize) -> u32 {
        let mut word = [0; 4];
        self.read(offset, &mut word);
        u32::from_le_bytes(word)
    }

    /// The driver's write. Says whether it may write there.
    pub(super) fn write_by_driver(&self, offset: usize, data: &[u8]) -> bool {
        let Some(end) = offset.checked_add(data.len()) else {
            return false;
        };
        let allowed = &self.0.writable;
        if offset < allowed.start || end > allowed.end {
            return false;
        }
        match self.0.bytes.lock().get_mut(offset..end) {
            Some(place) => place.copy_from_slice(data),
            None => return false,
        }
        true
    }

    /// Changes the contents from the device's side, and tells the driver.
    pub fn change(&self, offset: usize, data: &[u8]) {
        if let Some(place) = self.0.bytes.lock().get_mut(offset..offset + data.len()) {
            place.copy_from_slice(data);
            self.0.generation.fetch_add(1, Ordering::AcqRel);
        }
        if let Some(interrupt) = self.0.interrupt.get() {
            interrupt.config_changed();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_past_the_end_give_zeros() {
        let config = ConfigSpace::new(vec![1, 2, 3], 0..0);
        let (mut inside, mut over, mut past) = ([9; 2], [9; 2], [9; 2]);

        let whole = [
            config.read(1, &mut inside),
            config.read(2, &mut over),
            config.read(usize::MAX, &mut past),
        ];

        assert_eq!((inside, over, past), ([2, 3], [3, 0], [0, 0]));
        assert_eq!(whole, [true, false, false]);
    }

    #[test]
    fn the_driver_writes_where_it_may() {
        let config = ConfigSpace::new(vec![0; 8], 4..8);

        let done = [
            config.write_by_driver(4, &[1; 4]),
            config.write_by_driver(3, &[2; 2]),
            config.write_by_driver(7, &[2; 2]),
            config.write_by_driver(usize::MAX, &[2]),
        ];

        let mut bytes = [9; 8];
        config.read(0, &mut bytes);
        assert_eq!(bytes, [0, 0, 0, 0, 1, 1, 1, 1]);
        assert_eq!(done, [true, false, false, false]);
    }
}
