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

use std::{
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use rustix::event::epoll;
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use vmm_sys_util::eventfd::EventFd;

use super::{BackendError, ConfigSpace, DeviceError, DeviceProperties, Queues, VirtioDevice};
use crate::scoped_thread::borrow_event;

pub use backend::VsockBackend;
use backend::{ActiveBackend, refused};

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
    pub fn new(backend: VsockBackend) -> Result<Self, BackendError> {
        backend.set_owner()?;
        let failed = refused("creating its events");
        let event = || EventFd::new(libc::EFD_NONBLOCK).map_err(&failed);
        let (used, broken) = (event()?, event()?);
        let events = epoll_of([&used, &broken]).map_err(&failed)?;
        Ok(Self { backend, used, broken, events, active: None })
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

/// Tests that need `/dev/vhost-vsock` are skipped without it.
#[cfg(test)]
mod tests {
    use std::{mem, process};

    use vhost::VringConfigData;
    use vm_memory::{GuestAddress, GuestMemoryMmap};

    use super::{
        backend::{advice, is_within_one_region},
        *,
    };
    use crate::devices::virtio::testing::{Buffer, Driver, EVENT_IDX, wait_until};

    /// Opens the backend with a CID of this process, or skips the test on a host without it.
    fn backend(offset: u32) -> Option<VsockBackend> {
        if !std::path::Path::new("/dev/vhost-vsock").exists() {
            granule_types::testing::skip("this host has no /dev/vhost-vsock");
            return None;
        }
        Some(VsockBackend::open(process::id() + offset).unwrap())
    }

    /// Starts to connect to a port of a guest.
    fn connect(cid: u32, port: u32) -> OwnedFd {
        use std::os::fd::{AsRawFd as _, FromRawFd as _};
        let socket_type = libc::SOCK_STREAM | libc::SOCK_NONBLOCK;
        // SAFETY: the arguments are numbers.
        let fd = unsafe { libc::socket(libc::AF_VSOCK, socket_type, 0) };
        assert!(fd >= 0);
        // SAFETY: the descriptor is open and has no other owner.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: all zeros is a valid address.
        let mut address: libc::sockaddr_vm = unsafe { mem::zeroed() };
        address.svm_family = libc::sa_family_t::try_from(libc::AF_VSOCK).unwrap();
        (address.svm_cid, address.svm_port) = (cid, port);
        let size = libc::socklen_t::try_from(mem::size_of_val(&address)).unwrap();
        let pointer = (&raw const address).cast();
        // SAFETY: the address is valid for its size.
        let result = unsafe { libc::connect(socket.as_raw_fd(), pointer, size) };
        assert_eq!(result, -1);
        let error = io::Error::last_os_error();
        assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS), "{error}");
        socket
    }

    #[test]
    fn a_connection_interrupts_the_guest_before_and_after_a_reset() {
        let Some(backend) = backend(0) else { return };
        let cid = backend.cid;
        let mut driver = Driver::new(Box::new(Vsock::new(backend).unwrap()));

        for port in [1234, 1235] {
            driver.activate(EVENT_IDX);
            assert_eq!((driver.get(0x70), driver.get(0x100)), (15, cid));
            let address = driver.add(RECEIVE, &[Buffer::In(4096)])[0];
            driver.notify(RECEIVE);
            let _socket = connect(cid, port);
            let written = driver.wait_used(RECEIVE);
            wait_until("an interrupt", || driver.get(0x60) == 1);

            // Connection request (section 5.10.6): CID, port, operation.
            let header = driver.bytes(address, written);
            let number = |bytes: &[u8]| u32::from_le_bytes(*bytes.first_chunk().unwrap());
            assert_eq!(header.len(), 44);
            assert_eq!((number(&header[8..]), number(&header[20..])), (cid, port));
            assert_eq!(header[30..32], [1, 0]);
            driver.set(0x70, 0);
        }
    }

    #[test]
    fn an_invalid_packet_stops_the_device_until_its_reset() {
        let Some(backend) = backend(1 << 24) else {
            return;
        };
        let mut driver = Driver::start(Box::new(Vsock::new(backend).unwrap()), 0);

        // Shorter than a packet header.
        driver.add(TRANSMIT, &[Buffer::Out(vec![0; 8])]);
        driver.notify(TRANSMIT);
        driver.wait_needs_reset();
        driver.activate(0);

        assert_eq!(driver.get(0x70), 15);
    }

    #[test]
    fn a_cid_belongs_to_one_guest() {
        let Some(first) = backend(2 << 24) else {
            return;
        };

        let error = VsockBackend::open(first.cid).unwrap_err();
        let cid = first.cid;
        drop(first);

        let expected = format!("the CID {cid} is taken");
        assert!(error.to_string().contains(&expected), "{error}");
        VsockBackend::open(cid).unwrap();
    }

    #[test]
    fn a_missing_device_has_a_remedy_in_its_message() {
        let of = |number| advice(&io::Error::from_raw_os_error(number));

        assert!(of(libc::ENOENT).contains("modprobe vhost_vsock"));
        assert!(of(libc::EACCES).contains("root"));
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
