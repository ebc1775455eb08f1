// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Interrupt of a virtio device.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

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
    #[must_use]
    pub const fn new(line: EventFd) -> Self {
        Self { line, status: AtomicU32::new(0), needs_reset: AtomicBool::new(false) }
    }

    /// Reports used buffers in a queue.
    pub fn signal_used(&self) {
        self.raise(VIRTIO_MMIO_INT_VRING);
    }

    /// Reports a change of the configuration space.
    pub fn signal_config(&self) {
        self.raise(VIRTIO_MMIO_INT_CONFIG);
    }

    /// Reports that the device has stopped until the driver resets it (virtio 1.2, section 2.1.2).
    pub fn set_needs_reset(&self) {
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

    fn raise(&self, cause: u32) {
        self.status.fetch_or(cause, Ordering::AcqRel);
        // A full counter means that the interrupt is pending.
        let _ = self.line.write(1);
    }
}
