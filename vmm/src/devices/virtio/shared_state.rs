// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Shared state of a device, its transport and its handles: the interrupt, and the configuration
//! space (virtio 1.2, section 2.5).

use std::{
    ops::Range,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use parking_lot::Mutex;
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};
use vmm_sys_util::eventfd::EventFd;

/// Interrupt line and the causes that the driver has not acknowledged.
#[derive(Debug)]
pub struct Interrupt {
    line: EventFd,
    status: AtomicU32,
    needs_reset: AtomicBool,
}

impl Interrupt {
    /// Creates an interrupt that `line` raises.
    pub const fn new(line: EventFd) -> Self {
        Self { line, status: AtomicU32::new(0), needs_reset: AtomicBool::new(false) }
    }

    pub(super) fn signal_used(&self) {
        self.raise(VIRTIO_MMIO_INT_VRING);
    }

    pub(super) fn signal_config(&self) {
        self.raise(VIRTIO_MMIO_INT_CONFIG);
    }

    /// Reports that the device has stopped until the driver resets it (virtio 1.2, section 2.1.2).
    pub(super) fn set_needs_reset(&self) {
        self.needs_reset.store(true, Ordering::Release);
        self.signal_config();
    }

    pub(super) fn needs_reset(&self) -> bool {
        self.needs_reset.load(Ordering::Acquire)
    }

    pub(super) fn status(&self) -> u32 {
        self.status.load(Ordering::Acquire)
    }

    pub(super) fn acknowledge(&self, causes: u32) {
        self.status.fetch_and(!causes, Ordering::AcqRel);
    }

    pub(super) fn clear(&self) {
        self.status.store(0, Ordering::Release);
        self.needs_reset.store(false, Ordering::Release);
    }

    /// Sets the causes of an interrupt that was raised before a snapshot was taken.
    pub(super) fn restore(&self, status: u32, needs_reset: bool) {
        self.status.store(status, Ordering::Release);
        self.needs_reset.store(needs_reset, Ordering::Release);
    }

    /// Raises the interrupt again if the driver has not acknowledged all causes.
    pub(super) fn raise_again(&self) {
        if self.status() != 0 {
            let _ = self.line.write(1);
        }
    }

    fn raise(&self, cause: u32) {
        self.status.fetch_or(cause, Ordering::AcqRel);
        // The write fails only if the counter is full; the interrupt is then pending already.
        let _ = self.line.write(1);
    }
}

/// Configuration space: bytes that the driver reads and may partly write. The device may change
/// them while the driver runs. Clones share the space.
#[derive(Debug, Clone)]
pub struct ConfigSpace(Arc<ConfigState>);

#[derive(Debug)]
struct ConfigState {
    bytes: Mutex<Vec<u8>>,
    driver_writable_range: Range<usize>,
    generation: AtomicU32,
    interrupt: OnceLock<Arc<Interrupt>>,
}

impl ConfigSpace {
    /// Creates a space with these contents; the driver may write `driver_writable_range`.
    pub fn new(bytes: Vec<u8>, driver_writable_range: Range<usize>) -> Self {
        Self(Arc::new(ConfigState {
            bytes: Mutex::new(bytes),
            driver_writable_range,
            generation: AtomicU32::new(0),
            interrupt: OnceLock::new(),
        }))
    }

    /// Sets the interrupt for changes of the space. Each transport calls this once.
    pub(super) fn set_interrupt(&self, interrupt: Arc<Interrupt>) {
        let _ = self.0.interrupt.set(interrupt);
    }

    pub(super) fn generation(&self) -> u32 {
        self.0.generation.load(Ordering::Acquire)
    }

    /// Copies the bytes at `offset` to `data`, with zeros past the end of the space. Returns
    /// whether the space covers all of `data`.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> bool {
        data.fill(0);
        let bytes = self.0.bytes.lock();
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let found = bytes.get(offset..).unwrap_or_default();
        let count = found.len().min(data.len());
        data[..count].copy_from_slice(&found[..count]);
        count == data.len()
    }

    /// Returns the contents.
    pub(super) fn bytes(&self) -> Vec<u8> {
        self.0.bytes.lock().clone()
    }

    /// Replaces the contents, before the driver runs. Returns whether the size is the same.
    pub(super) fn replace(&self, contents: &[u8]) -> bool {
        let mut bytes = self.0.bytes.lock();
        let fits = bytes.len() == contents.len();
        if fits {
            bytes.copy_from_slice(contents);
        }
        fits
    }

    /// Returns the little-endian number at `offset`, or 0 past the end.
    pub(super) fn read_u32(&self, offset: u64) -> u32 {
        let mut word = [0; 4];
        self.read(offset, &mut word);
        u32::from_le_bytes(word)
    }

    /// Performs a write by the driver; returns whether the driver may write there.
    pub(super) fn write_by_driver(&self, offset: u64, data: &[u8]) -> bool {
        let writable = self.0.driver_writable_range.clone();
        let start = usize::try_from(offset).ok().and_then(|at| at.checked_sub(writable.start));
        let mut bytes = self.0.bytes.lock();
        let target = start.and_then(|start| bytes.get_mut(writable)?.get_mut(start..));
        let target = target.and_then(|target| target.get_mut(..data.len()));
        target.map(|target| target.copy_from_slice(data)).is_some()
    }

    /// Changes the contents on behalf of the device and interrupts the driver.
    pub(super) fn update(&self, offset: usize, data: &[u8]) {
        if let Some(target) = self.0.bytes.lock().get_mut(offset..offset + data.len()) {
            target.copy_from_slice(data);
            self.0.generation.fetch_add(1, Ordering::AcqRel);
        }
        if let Some(interrupt) = self.0.interrupt.get() {
            interrupt.signal_config();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_past_the_end_return_zeros() {
        let config = ConfigSpace::new(vec![1, 2, 3], 0..0);

        for (offset, bytes, whole) in
            [(1, [2, 3], true), (2, [3, 0], false), (u64::MAX, [0; 2], false)]
        {
            let mut data = [9; 2];
            assert_eq!(config.read(offset, &mut data), whole, "{offset}");
            assert_eq!(data, bytes, "{offset}");
        }
    }

    #[test]
    fn the_driver_writes_only_its_range() {
        let config = ConfigSpace::new(vec![0; 8], 4..8);

        assert!(config.write_by_driver(4, &[1; 4]));
        for offset in [3, 7, u64::MAX] {
            assert!(!config.write_by_driver(offset, &[2; 2]), "{offset}");
        }

        let mut bytes = [9; 8];
        config.read(0, &mut bytes);
        assert_eq!(bytes, [0, 0, 0, 0, 1, 1, 1, 1]);
    }
}
