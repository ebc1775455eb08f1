// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of the vsock device; those that need `/dev/vhost-vsock` are skipped without it.

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
    let cid = backend.cid();
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

    let error = VsockBackend::open(first.cid()).unwrap_err();
    let cid = first.cid();
    drop(first);

    assert!(matches!(error, VsockError::CidInUse(used) if used == cid));
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
