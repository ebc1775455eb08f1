// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sockets between guest and host (virtio 1.2, section 5.10): `AF_VSOCK`, whose addresses are a
//! number for the machine (its CID; the host's is 2) and a port.
//!
//! The data path is the host kernel's ([`VsockBackend`]). It waits for the driver's notifications of the
//! first two queues by itself, on the events that KVM signals, and reads and writes queues and
//! buffers from a thread of its own. So both queues are taken from this device's thread, which is
//! left with what the kernel cannot do behind MMIO registers: the kernel says by an event that
//! there are used buffers, and the register that tells the driver why it is interrupted has to say
//! so before the interrupt. The third queue, of events, is here and stays empty: its one event is
//! for a guest that was moved to another host.
//!
//! The kernel is stopped before a reset is over, before the device goes, and where it finds fault
//! with a ring or a packet (which it says of a packet that it has no memory for, too: the sockets end
//! then, as with any device, until the driver resets it); it touches no guest memory from then on. A machine that is paused has vCPUs that
//! stand still, no more: what arrives meanwhile is written into the buffers that the guest has
//! given. Like all that a device writes, it is in no dirty log of KVM's.
//!
//! Connections are the kernel's too. The host's ends of a guest that has reset itself learn of it
//! when they send something, and when this process ends.

mod backend;
#[cfg(test)]
mod tests;

use std::{
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use rustix::event::epoll;
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use vmm_sys_util::eventfd::EventFd;

use super::{ConfigSpace, DeviceError, Queues, VirtioDevice};
use crate::scoped_thread::borrow_event;

use backend::ActiveBackend;
pub use backend::{VsockBackend, VsockError};

/// For the guest to receive by.
const RECEIVE: usize = 0;
/// For the guest to send by.
const TRANSMIT: usize = 1;

/// Requests that fit into a queue that data passes through, and into that of events.
const QUEUE: u16 = 256;
const EVENTS: u16 = 16;

/// The device.
#[derive(Debug)]
pub struct Vsock {
    vhost: VsockBackend,
    config: ConfigSpace,
    /// The kernel has used buffers.
    used: EventFd,
    /// The kernel cannot use a ring or a packet.
    broken: EventFd,
    /// Both of them, as one thing to wait for.
    either: OwnedFd,
    running: Option<ActiveBackend>,
}

impl Vsock {
    /// The device of a machine, whose address `vhost` has.
    ///
    /// # Errors
    /// The kernel refuses to work for this process, or has no descriptor to give.
    pub fn new(vhost: VsockBackend) -> Result<Self, VsockError> {
        vhost.belong_to_this_process()?;
        let event = || EventFd::new(libc::EFD_NONBLOCK);
        let (used, broken) = (
            event().map_err(VsockError::Event)?,
            event().map_err(VsockError::Event)?,
        );
        let either = wait_for([&used, &broken]).map_err(VsockError::Event)?;
        let cid = u64::from(vhost.cid()).to_le_bytes();
        Ok(Self {
            vhost,
            config: ConfigSpace::new(cid.to_vec(), 0..0),
            used,
            broken,
            either,
            running: None,
        })
    }
}

impl VirtioDevice for Vsock {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn features(&self) -> u64 {
        self.vhost.features()
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE, QUEUE, EVENTS]
    }

    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn activate(&mut self, features: u64, queues: &mut Queues) -> Result<(), DeviceError> {
        let (Some(receive), Some(transmit)) = (queues.take(RECEIVE), queues.take(TRANSMIT)) else {
            let problem = "it uses the device without the queues to receive and to send by";
            return Err(DeviceError::Request(problem));
        };
        // What an earlier start has left; empty, mostly.
        let _ = (self.used.read(), self.broken.read());
        let queues = [receive, transmit];
        let running = self.vhost.run(queues, features, &self.used, &self.broken)?;
        self.running = Some(running);
        Ok(())
    }

    fn process_queue(&mut self, _: usize, _: &mut Queues) -> Result<(), DeviceError> {
        // Buffers for events, of which there are none.
        Ok(())
    }

    fn backend_fd(&self) -> Option<BorrowedFd<'_>> {
        self.running.is_some().then(|| self.either.as_fd())
    }

    fn process_backend(&mut self, _: &mut Queues) -> Result<(), DeviceError> {
        if let (Ok(_), Some(running)) = (self.used.read(), &self.running) {
            running.interrupt().used();
        }
        if self.broken.read().is_ok() {
            self.running = None;
            let problem = "the host's kernel can make nothing of a ring or a packet (vhost)";
            return Err(DeviceError::Request(problem));
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.running = None;
    }
}

/// What can be read as long as one of the events can.
fn wait_for(events: [&EventFd; 2]) -> io::Result<OwnedFd> {
    let either = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for event in events {
        let nothing = epoll::EventData::new_u64(0);
        epoll::add(&either, borrow_event(event), nothing, epoll::EventFlags::IN)?;
    }
    Ok(either)
}
