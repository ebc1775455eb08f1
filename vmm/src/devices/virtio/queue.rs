// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Queue of a device: takes descriptor chains from the available ring, returns them through the
//! used ring and notifies the driver. `virtio-queue` accesses the rings.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use granule_types::units::{Bytes, GuestAddress};
use virtio_queue::{QueueOwnedT as _, QueueState, QueueT as _};
use vmm_sys_util::eventfd::EventFd;

use super::{DescriptorChain, DeviceError, Interrupt};
use crate::memory::GuestMemory;

/// Maximum number of chains served before the worker polls again. Without it, a driver that keeps
/// adding chains could prevent the device from stopping.
const MAX_CHAINS_PER_POLL: usize = 1024;

/// Queue that the driver has configured.
#[derive(Debug)]
pub struct Queue {
    pub(super) rings: virtio_queue::Queue,
    pub(super) memory: Arc<GuestMemory>,
    pub(super) kick_event: Arc<EventFd>,
    pub(super) interrupt: Arc<Interrupt>,
    /// Flag set when the device must stop; a backend that blocks within a request polls it.
    pub(super) stop_flag: Arc<AtomicBool>,
}

impl Queue {
    /// Builds the queue that the driver has configured.
    ///
    /// # Errors
    /// The size is invalid, or a ring is misaligned or outside of guest memory.
    pub fn new(
        config: QueueState,
        memory: &Arc<GuestMemory>,
        kick_event: &Arc<EventFd>,
        interrupt: &Arc<Interrupt>,
    ) -> Result<Self, DeviceError> {
        let rings = virtio_queue::Queue::try_from(config)?;
        if !rings.is_valid(memory.map()) {
            return Err(virtio_queue::Error::FindMemoryRegion.into());
        }
        // The device writes no ring but this one. The mark holds until the next snapshot, after which
        // the queues of all devices are built again.
        let used = GuestAddress(rings.used_ring());
        memory.mark_device_write(used, used_ring_size(rings.size()));
        Ok(Self {
            rings,
            memory: Arc::clone(memory),
            kick_event: Arc::clone(kick_event),
            interrupt: Arc::clone(interrupt),
            stop_flag: Arc::default(),
        })
    }

    /// Returns the configuration, with the positions of the device in the rings.
    pub(super) fn state(&self) -> QueueState {
        self.rings.state()
    }

    pub(super) fn pop(&mut self) -> Result<Option<DescriptorChain>, DeviceError> {
        let next = self.rings.iter(self.memory.map())?.next();
        next.map(|chain| DescriptorChain::parse(chain, &self.memory)).transpose()
    }

    /// Undoes the last pop: the chain is available again.
    pub(super) fn undo_pop(&mut self) {
        self.rings.go_to_previous_position();
    }

    /// Adds the chain with this head to the used ring, with the number of bytes written to it. The
    /// caller notifies the driver with [`Queue::signal_used`].
    pub(super) fn add_used(&mut self, head: u16, written: usize) -> Result<(), DeviceError> {
        // A chain is shorter than 4 GiB.
        let written = u32::try_from(written).unwrap_or(u32::MAX);
        Ok(self.rings.add_used(self.memory.map(), head, written)?)
    }

    /// Interrupts the driver if it has requested a notification.
    pub(super) fn signal_used(&mut self) -> Result<(), DeviceError> {
        if self.rings.needs_notification(self.memory.map())? {
            self.interrupt.signal_used();
        }
        Ok(())
    }

    /// Adds the chain with this head to the used ring and notifies the driver.
    pub(super) fn complete(&mut self, head: u16, written: usize) -> Result<(), DeviceError> {
        self.add_used(head, written)?;
        self.signal_used()
    }

    /// Enables notifications by the driver. Returns whether further chains are available.
    pub(super) fn enable_notification(&mut self) -> Result<bool, DeviceError> {
        Ok(self.rings.enable_notification(self.memory.map())?)
    }

    /// Passes each available chain to `serve`, which returns the number of bytes it wrote, or
    /// [`DeviceError::Stopped`] if the chain stays available.
    pub(super) fn serve_available(
        &mut self,
        mut serve: impl FnMut(&DescriptorChain) -> Result<usize, DeviceError>,
    ) -> Result<(), DeviceError> {
        let mut remaining = MAX_CHAINS_PER_POLL;
        loop {
            self.rings.disable_notification(self.memory.map())?;
            while let Some(chain) = self.pop()? {
                let written = match serve(&chain) {
                    Err(DeviceError::Stopped) => {
                        self.undo_pop();
                        return Ok(());
                    }
                    served => served?,
                };
                self.complete(chain.head_index, written)?;
                remaining -= 1;
                if remaining == 0 || self.stop_flag.load(Ordering::Relaxed) {
                    // Signals the queue again, so that the worker returns to it.
                    let _ = self.kick_event.write(1);
                    return Ok(());
                }
            }
            if !self.enable_notification()? {
                return Ok(());
            }
        }
    }
}

/// Returns the size of a used ring (virtio 1.2, section 2.7.8): flags, index, entries of eight bytes,
/// and the index of the next notification.
const fn used_ring_size(entries: u16) -> Bytes {
    Bytes(3 * 2 + 8 * entries as u64)
}

/// Queues of a device by index; `None` marks a queue that the driver does not use, or that another
/// thread or the host's kernel serves.
pub type Queues = [Option<Queue>];
