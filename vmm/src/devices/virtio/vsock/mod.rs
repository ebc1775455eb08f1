// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Vsock (virtio 1.2, section 5.10): `AF_VSOCK` sockets between guest and host. An address is a
//! context identifier (CID; that of the host is 2) and a port.
//!
//! The data path is in the host's kernel ([`VsockBackend`]), which waits for the notifications of
//! the receive and transmit queues on the ioeventfds and accesses queues and buffers from its own
//! thread. The worker of this device therefore does not serve these two queues. It does what the
//! kernel cannot do for MMIO registers: the kernel signals an event for used buffers, and the
//! interrupt status register must name the cause before the interrupt is raised. The third queue,
//! for events, stays empty: its only event is for a migrated guest.
//!
//! The kernel is stopped before a reset completes, before the device is dropped, and when it reports
//! an invalid ring or packet; it accesses no guest memory from then on. (It also reports a packet
//! for which it has no memory. As with any device, the driver must reset the device then.) A paused
//! VM only stops its vCPUs: data that arrives meanwhile is written to the buffers that the guest has
//! provided. Like all writes of devices, these are not in the dirty log of KVM.
//!
//! Connections are in the kernel too. Peers on the host notice a reboot of the guest when they next
//! send, and when this process ends.

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

use super::{ConfigSpace, DeviceError, DeviceProperties, Queues, VirtioDevice};
use crate::scoped_thread::borrow_event;

use backend::ActiveBackend;
pub use backend::{VsockBackend, VsockError};

/// Index of the receive queue.
const RECEIVE: usize = 0;
/// Index of the transmit queue.
const TRANSMIT: usize = 1;

/// Vsock device.
#[allow(missing_debug_implementations, reason = "its backend has none")]
pub struct Vsock {
    backend: VsockBackend,
    /// Signalled by the kernel for used buffers.
    used: EventFd,
    /// Signalled by the kernel for an invalid ring or packet.
    broken: EventFd,
    /// Epoll descriptor of both events.
    events: OwnedFd,
    active: Option<ActiveBackend>,
}

impl Vsock {
    /// Creates the device of a VM with the CID of `backend`.
    ///
    /// # Errors
    /// The kernel refuses this process, or the host is out of file descriptors.
    pub fn new(backend: VsockBackend) -> Result<Self, VsockError> {
        backend.set_owner()?;
        let failed = VsockError::call("creating its events");
        let event = || EventFd::new(libc::EFD_NONBLOCK).map_err(&failed);
        let (used, broken) = (event()?, event()?);
        let events = epoll_of([&used, &broken]).map_err(&failed)?;
        Ok(Self { backend, used, broken, events, active: None })
    }
}

impl VirtioDevice for Vsock {
    fn properties(&self) -> DeviceProperties {
        let cid = u64::from(self.backend.cid()).to_le_bytes();
        DeviceProperties {
            device_type: VIRTIO_ID_VSOCK,
            features: self.backend.features(),
            queue_sizes: &[256, 256, 16],
            config: ConfigSpace::new(cid.to_vec(), 0..0),
        }
    }

    fn activate(&mut self, features: u64, queues: &mut Queues) -> Result<(), DeviceError> {
        let (Some(receive), Some(transmit)) = (queues.take(RECEIVE), queues.take(TRANSMIT)) else {
            let problem = "it uses the device without receive and transmit queues";
            return Err(DeviceError::Request(problem));
        };
        // Events left by an earlier activation.
        let _ = (self.used.read(), self.broken.read());
        let queues = [receive, transmit];
        let active = self.backend.start(queues, features, &self.used, &self.broken)?;
        self.active = Some(active);
        Ok(())
    }

    /// Leaves the buffers in the event queue: there are no events.
    fn process_queue(&mut self, _: usize, _: &mut Queues) -> Result<(), DeviceError> {
        Ok(())
    }

    fn backend_fd(&self) -> Option<BorrowedFd<'_>> {
        self.active.is_some().then(|| self.events.as_fd())
    }

    fn process_backend(&mut self, _: &mut Queues) -> Result<(), DeviceError> {
        if let (Ok(_), Some(active)) = (self.used.read(), &self.active) {
            active.interrupt().signal_used();
        }
        if self.broken.read().is_ok() {
            self.active = None;
            let problem = "the host's kernel reports an invalid ring or packet (vhost)";
            return Err(DeviceError::Request(problem));
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.active = None;
    }
}

/// Returns a descriptor that is readable while one of the events is.
fn epoll_of(events: [&EventFd; 2]) -> io::Result<OwnedFd> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for event in events {
        let data = epoll::EventData::new_u64(0);
        epoll::add(&epoll, borrow_event(event), data, epoll::EventFlags::IN)?;
    }
    Ok(epoll)
}
