// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A queue in use: requests are taken out and given back, the driver is told when it wants to be.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use virtio_queue::{QueueOwnedT as _, QueueT as _};
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::EventFd;

use super::{DescriptorChain, DeviceError, Interrupt};
use crate::memory::GuestMemory;

/// Requests served before the thread looks around again, so that a driver that keeps on adding
/// requests cannot keep the device from being stopped.
const BATCH: usize = 1024;

/// What the driver says of a queue.
#[derive(Debug, Clone, Copy, Default)]
pub struct QueueConfig {
    /// The largest size that the device takes.
    pub most: u16,
    /// Its size in requests.
    pub size: u32,
    /// Whether the driver uses it.
    pub ready: bool,
    /// Guest-physical address of the descriptors.
    pub descriptors: u64,
    /// Guest-physical address of the ring of what is there to do.
    pub available: u64,
    /// Guest-physical address of the ring of what is done.
    pub used: u64,
}

impl QueueConfig {
    /// A queue that the driver has said nothing of.
    #[must_use]
    pub fn new(most: u16) -> Self {
        Self {
            most,
            size: most.into(),
            ..Self::default()
        }
    }

    /// The queue, if it is as it has to be.
    ///
    /// # Errors
    /// It lies outside memory or on a wrong boundary, or its size is none that it can have.
    pub fn ring(
        &self,
        event_idx: bool,
        memory: &Arc<GuestMemory>,
        kick: &Arc<EventFd>,
        interrupt: &Arc<Interrupt>,
    ) -> Result<Queue, DeviceError> {
        let size = u16::try_from(self.size).map_err(|_| virtio_queue::Error::InvalidSize)?;
        let mut queue = virtio_queue::Queue::new(self.most)?;
        queue.try_set_size(size)?;
        queue.try_set_desc_table_address(GuestAddress(self.descriptors))?;
        queue.try_set_avail_ring_address(GuestAddress(self.available))?;
        queue.try_set_used_ring_address(GuestAddress(self.used))?;
        queue.set_event_idx(event_idx);
        queue.set_ready(true);
        if !queue.is_valid(memory.map()) {
            return Err(virtio_queue::Error::FindMemoryRegion.into());
        }
        Ok(Queue {
            queue,
            memory: Arc::clone(memory),
            kick: Arc::clone(kick),
            interrupt: Arc::clone(interrupt),
            stop: Arc::default(),
        })
    }
}

/// A queue that the driver has set up.
#[derive(Debug)]
pub struct Queue {
    pub(super) queue: virtio_queue::Queue,
    memory: Arc<GuestMemory>,
    pub(super) kick: Arc<EventFd>,
    pub(super) interrupt: Arc<Interrupt>,
    /// Whether the device is to stop.
    stop: Arc<AtomicBool>,
}

impl Queue {
    /// The memory that the requests lie in.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Whether the device is to stop: who waits in the middle of a request looks at it.
    pub(super) fn stopping(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.stop)
    }

    /// Takes the next request out.
    ///
    /// # Errors
    /// The ring or the request is not what it has to be.
    pub fn pop(&mut self) -> Result<Option<DescriptorChain>, DeviceError> {
        let memory = self.memory.map();
        let next = self.queue.iter(memory)?.next();
        next.map(|chain| DescriptorChain::parse(chain, &self.memory))
            .transpose()
    }

    /// Puts the request taken out last back where it was.
    pub fn undo_pop(&mut self) {
        self.queue.go_to_previous_position();
    }

    /// Gives a request back with `written` bytes in its writable buffers. The driver is told by
    /// [`Queue::announce`].
    ///
    /// # Errors
    /// The ring is not what it has to be.
    pub fn finish(&mut self, head: u16, written: u32) -> Result<(), DeviceError> {
        self.queue.add_used(self.memory.map(), head, written)?;
        Ok(())
    }

    /// Interrupts the driver if it wants to know of what was given back.
    ///
    /// # Errors
    /// The ring is not what it has to be.
    pub fn announce(&mut self) -> Result<(), DeviceError> {
        if self.queue.needs_notification(self.memory.map())? {
            self.interrupt.used();
        }
        Ok(())
    }

    /// Wants to be told of new requests; says whether there are some already.
    ///
    /// # Errors
    /// The ring is not what it has to be.
    pub fn listen(&mut self) -> Result<bool, DeviceError> {
        Ok(self.queue.enable_notification(self.memory.map())?)
    }

    /// Serves what is in the queue: `serve` gets each request and says how many bytes it wrote.
    ///
    /// # Errors
    /// The ring or a request is not what it has to be, or `serve` fails.
    pub fn drain(
        &mut self,
        mut serve: impl FnMut(&GuestMemory, &DescriptorChain) -> Result<u32, DeviceError>,
    ) -> Result<(), DeviceError> {
        let memory = Arc::clone(&self.memory);
        let mut left = BATCH;
        loop {
            self.queue.disable_notification(memory.map())?;
            while let Some(chain) = self.pop()? {
                let written = serve(&memory, &chain)?;
                self.finish(chain.head(), written)?;
                self.announce()?;
                left -= 1;
                if left == 0 || self.stop.load(Ordering::Relaxed) {
                    // Come back soon.
                    let _ = self.kick.write(1);
                    return Ok(());
                }
            }
            if !self.listen()? {
                return Ok(());
            }
        }
    }
}

/// A device's queues. Those that the driver did not set up are not there.
#[derive(Debug)]
pub struct Queues(Vec<Option<Queue>>);

impl Queues {
    /// A device's queues in their order.
    #[must_use]
    pub const fn new(queues: Vec<Option<Queue>>) -> Self {
        Self(queues)
    }

    /// Has the queues be left between two requests once `stop` says so.
    pub(super) fn heed(&mut self, stop: &Arc<AtomicBool>) {
        for ring in self.0.iter_mut().flatten() {
            ring.stop = Arc::clone(stop);
        }
    }

    /// The queue of this number, if the driver uses it.
    pub fn get(&mut self, index: usize) -> Option<&mut Queue> {
        self.0.get_mut(index)?.as_mut()
    }

    /// Takes a queue out: from now on it is the taker's.
    pub fn take(&mut self, index: usize) -> Option<Queue> {
        self.0.get_mut(index)?.take()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Queue)> {
        let queues = self.0.iter().enumerate();
        queues.filter_map(|(index, ring)| Some((index, ring.as_ref()?)))
    }
}
