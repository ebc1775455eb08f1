// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device's interrupt, and why it is raised.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};
use vmm_sys_util::eventfd::EventFd;

/// The interrupt line and the reasons the driver has not acknowledged yet.
#[derive(Debug)]
pub struct Interrupt {
    line: EventFd,
    reasons: AtomicU32,
    needs_reset: AtomicBool,
}

impl Interrupt {
    /// An interrupt that `line` raises.
    #[must_use]
    pub const fn new(line: EventFd) -> Self {
        Self {
            line,
            reasons: AtomicU32::new(0),
            needs_reset: AtomicBool::new(false),
        }
    }

    /// A queue has used buffers.
    pub fn used(&self) {
        self.raise(VIRTIO_MMIO_INT_VRING);
    }

    /// The configuration space has changed.
    pub fn config_changed(&self) {
        self.raise(VIRTIO_MMIO_INT_CONFIG);
    }

    /// The device cannot go on until it is reset (virtio 1.2, section 2.1.2).
    pub fn needs_reset(&self) {
        self.needs_reset.store(true, Ordering::Release);
        self.config_changed();
    }

    pub(super) fn wants_reset(&self) -> bool {
        self.needs_reset.load(Ordering::Acquire)
    }

    pub(super) fn reasons(&self) -> u32 {
        self.reasons.load(Ordering::Acquire)
    }

    pub(super) fn acknowledge(&self, reasons: u32) {
        self.reasons.fetch_and(!reasons, Ordering::AcqRel);
    }

    pub(super) fn clear(&self) {
        self.reasons.store(0, Ordering::Release);
        self.needs_reset.store(false, Ordering::Release);
    }

    fn raise(&self, reason: u32) {
        self.reasons.fetch_or(reason, Ordering::AcqRel);
        // It fails only when the counter is full, and then the interrupt is pending anyway.
        let _ = self.line.write(1);
    }
}
