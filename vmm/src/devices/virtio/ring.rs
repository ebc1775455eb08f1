// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A queue in use: requests are taken out and given back, the driver is told when it wants to be.

use std::sync::Arc;

use virtio_queue::{Queue, QueueOwnedT as _, QueueT as _};
use vmm_sys_util::eventfd::EventFd;

use super::{Chain, DeviceError, Interrupt};
use crate::memory::GuestMemory;

/// Requests served before the thread looks around again, so that a driver that keeps on adding
/// requests cannot keep the device from being stopped.
const BATCH: usize = 1024;

/// A queue that the driver has set up.
#[derive(Debug)]
pub struct Ring {
    pub(super) queue: Queue,
    pub(super) memory: Arc<GuestMemory>,
    pub(super) kick: Arc<EventFd>,
    pub(super) interrupt: Arc<Interrupt>,
}

impl Ring {
    /// The memory that the requests lie in.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Takes the next request out.
    ///
    /// # Errors
    /// The ring or the request is not what it has to be.
    pub fn pop(&mut self) -> Result<Option<Chain>, DeviceError> {
        let memory = self.memory.map();
        let next = self.queue.iter(memory)?.next();
        next.map(|chain| Chain::parse(chain, &self.memory))
            .transpose()
    }

    /// Puts the request taken out last back where it was.
    pub fn undo_pop(&mut self) {
        self.queue.go_to_previous_position();
    }

    /// Gives a request back with `written` bytes in its writable buffers. The driver is told by
    /// [`Ring::announce`].
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
        mut serve: impl FnMut(&GuestMemory, &Chain) -> Result<u32, DeviceError>,
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
                if left == 0 {
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
pub struct Rings(pub(super) Vec<Option<Ring>>);

impl Rings {
    /// The queue of this number, if the driver uses it.
    pub fn get(&mut self, index: usize) -> Option<&mut Ring> {
        self.0.get_mut(index)?.as_mut()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Ring)> {
        let rings = self.0.iter().enumerate();
        rings.filter_map(|(index, ring)| Some((index, ring.as_ref()?)))
    }
}
