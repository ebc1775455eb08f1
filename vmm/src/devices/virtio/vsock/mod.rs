// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Vsock (virtio 1.2, section 5.10): `AF_VSOCK` sockets between guest and host. An address is a
//! context identifier (CID; the host's CID is 2) and a port.
//!
//! The data path is in the host's kernel ([`VsockBackend`]), which waits for notifications of the
//! receive and transmit queues on the ioeventfds and accesses queues and buffers from its own
//! thread. The worker of this device does not serve these two queues. When the kernel signals used
//! buffers, the worker sets the cause in the interrupt status register, which the kernel cannot do,
//! and raises the interrupt. The event queue has one event, which a guest receives that continues from
//! a snapshot: its connections are gone, and it closes them and reads its CID again (section 5.10.6.7).
//!
//! The kernel is stopped before a reset completes, before the device is dropped, and when it
//! reports an invalid ring or packet; it accesses no guest memory afterwards. Pausing the VM only
//! stops its vCPUs: the kernel still writes arriving data to the buffers that the guest has
//! provided. Like all device writes, these are not in KVM's dirty log. While a snapshot is taken, the
//! kernel is stopped, and connections wait. Peers on the host detect a reboot of the guest when they
//! next send, and when this process ends.

mod backend;

use std::{os::fd::BorrowedFd, sync::Arc};

use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use vmm_sys_util::eventfd::EventFd;

use super::{
    BackendError, ConfigSpace, DeviceError, DeviceProperties, Queue, Queues, VirtioDevice,
};
use crate::scoped_thread::borrow_event;

pub use backend::VsockBackend;
use backend::{ActiveBackend, vsock_error};

const RECEIVE_QUEUE: usize = 0;
const TRANSMIT_QUEUE: usize = 1;
const EVENT_QUEUE: usize = 2;
/// The event of a guest whose connections are gone, `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`.
const TRANSPORT_RESET: u32 = 0;

/// Vsock device.
#[allow(missing_debug_implementations, reason = "its backend does not implement Debug")]
pub struct Vsock {
    backend: VsockBackend,
    /// Event that the kernel signals for used buffers.
    call_event: EventFd,
    /// Event that the kernel signals for an invalid ring or packet.
    err_event: EventFd,
    active_backend: Option<ActiveBackend>,
    /// The guest does not know yet that its connections are gone.
    owes_reset_event: bool,
}

impl Vsock {
    /// Creates the device of a VM with the CID of `backend`.
    pub fn new(backend: VsockBackend) -> Result<Self, BackendError> {
        backend.set_owner()?;
        let event = || EventFd::new(libc::EFD_NONBLOCK).map_err(vsock_error("creating its events"));
        let [call_event, err_event] = [event()?, event()?];
        Ok(Self { backend, call_event, err_event, active_backend: None, owes_reset_event: false })
    }
}

impl VirtioDevice for Vsock {
    fn properties(&self) -> DeviceProperties {
        let cid = u64::from(self.backend.cid).to_le_bytes();
        DeviceProperties {
            device_type: VIRTIO_ID_VSOCK,
            features: self.backend.features,
            queue_sizes: &[256, 256, 16],
            config: ConfigSpace::new(cid.to_vec(), 0..0),
        }
    }

    fn activate(&mut self, features: u64, queues: &mut Queues) -> Result<(), DeviceError> {
        let (Some(receive), Some(transmit)) =
            (queues[RECEIVE_QUEUE].take(), queues[TRANSMIT_QUEUE].take())
        else {
            let problem = "it uses the device without receive and transmit queues";
            return Err(DeviceError::Request(problem));
        };
        // Clears the events of an earlier activation.
        let _ = (self.call_event.read(), self.err_event.read());
        let queues = [receive, transmit];
        let active = self.backend.start(queues, features, &self.call_event, &self.err_event)?;
        self.active_backend = Some(active);
        Ok(())
    }

    /// Sends the event that the guest has to receive; other buffers stay in the event queue.
    fn process_queue(&mut self, index: usize, queue: &mut Queue) -> Result<(), DeviceError> {
        if index == EVENT_QUEUE
            && self.owes_reset_event
            && let Some(chain) = queue.pop()?
        {
            let written = chain.write(0, &TRANSPORT_RESET.to_le_bytes());
            queue.complete(chain.head_index, written)?;
            self.owes_reset_event = false;
        }
        Ok(())
    }

    fn backend_fds(&self) -> Vec<BorrowedFd<'_>> {
        match self.active_backend {
            Some(_) => [&self.call_event, &self.err_event].map(borrow_event).into(),
            None => Vec::new(),
        }
    }

    fn process_backend(&mut self, _: &mut Queues) -> Result<(), DeviceError> {
        if let (Ok(_), Some(active)) = (self.call_event.read(), &self.active_backend) {
            active.interrupt.signal_used();
        }
        if self.err_event.read().is_ok() {
            self.active_backend = None;
            let problem = "the host's kernel reports an invalid ring or packet (vhost)";
            return Err(DeviceError::Request(problem));
        }
        Ok(())
    }

    fn suspend(&mut self, queues: &mut Queues) -> Result<(), DeviceError> {
        let Some(active) = self.active_backend.take() else {
            return Ok(());
        };
        let interrupt = Arc::clone(&active.interrupt);
        for (place, queue) in queues.iter_mut().zip(active.stop()?) {
            *place = Some(queue);
        }
        // The worker has stopped before it has read the event.
        if self.call_event.read().is_ok() {
            interrupt.signal_used();
        }
        Ok(())
    }

    fn restored(&mut self) {
        self.owes_reset_event = true;
    }

    fn reset(&mut self) {
        self.active_backend = None;
        self.owes_reset_event = false;
    }
}

#[cfg(test)]
mod tests {
    use vhost::VringConfigData;
    use vm_memory::{GuestAddress, GuestMemoryMmap};

    use super::{
        backend::{advice, is_within_one_region},
        *,
    };
    use crate::devices::virtio::testing::{Buffer, Driver};

    #[test]
    fn an_invalid_packet_stops_the_device_until_its_reset() {
        if !std::path::Path::new("/dev/vhost-vsock").exists() {
            return granule_types::testing::skip("this host has no /dev/vhost-vsock");
        }
        let backend = VsockBackend::open(std::process::id()).unwrap();
        let mut driver = Driver::start(Box::new(Vsock::new(backend).unwrap()), 0);

        // A packet that is shorter than its header.
        driver.add_request(TRANSMIT_QUEUE, &[Buffer::Out(vec![0; 8])]);
        driver.notify(TRANSMIT_QUEUE);
        driver.wait_needs_reset();
        driver.activate(0);

        assert_eq!(driver.read_register(0x70), 15);
    }

    #[test]
    fn the_error_for_a_missing_device_contains_a_remedy() {
        let advice_for = |number| advice(&std::io::Error::from_raw_os_error(number));

        assert!(advice_for(libc::ENOENT).contains("modprobe vhost_vsock"));
        assert!(advice_for(libc::EACCES).contains("root"));
        if !std::path::Path::new("/dev/vhost-vsock").exists() {
            let error = VsockBackend::open(3).unwrap_err();
            assert!(error.to_string().contains("modprobe"), "{error}");
        }
    }

    #[test]
    fn a_ring_across_two_memory_regions_is_refused() {
        let regions = [(GuestAddress(0), 0x1_0000), (GuestAddress(0x1_0000), 0x1_0000)];
        let memory = GuestMemoryMmap::<()>::from_ranges(&regions).unwrap();
        let valid = |desc_table_addr, avail_ring_addr, used_ring_addr| {
            let ring = VringConfigData {
                queue_max_size: 256,
                queue_size: 256,
                desc_table_addr,
                avail_ring_addr,
                used_ring_addr,
                ..VringConfigData::default()
            };
            is_within_one_region(&memory, &ring)
        };

        // Last addresses within a region: 16, 2 and 8 bytes per entry, and 6 more for a ring.
        assert!(valid(0xf000, 0x1_0000, 0x1_1000));
        assert!(valid(0x1000, 0xfdfa, 0x1_f7fa));
        assert!(!valid(0xf010, 0x1_0000, 0x1_1000));
        assert!(!valid(0x1000, 0xfdfc, 0x1_1000));
        assert!(!valid(0x1000, 0x2000, 0xf7fc));
        assert!(!valid(0x1000, 0x2000, 0x1_f7fc));
        assert!(!valid(0x1000, u64::MAX, 0x3000));
    }
}
