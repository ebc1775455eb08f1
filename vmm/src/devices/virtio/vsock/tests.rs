// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What can be said without the host's device, and the device itself where the host has one.

use std::{
    mem, process,
    time::{Duration, Instant},
};

use vhost::VringConfigData;
use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::{
    backend::{advice, lies_in_one_piece},
    *,
};
use crate::devices::virtio::testing::{Buffer, Driver, EVENT_IDX, memory};

/// Opens the host's device for a CID of this process; skips the test on a host without it.
fn vhost(offset: u32) -> Option<VsockBackend> {
    if !std::path::Path::new("/dev/vhost-vsock").exists() {
        granule_types::testing::skip("this host has no /dev/vhost-vsock");
        return None;
    }
    Some(VsockBackend::open(process::id() + offset).unwrap())
}

/// Begins to connect to a guest's port.
fn connect(cid: u32, port: u32) -> OwnedFd {
    use std::os::fd::{AsRawFd as _, FromRawFd as _};
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK;
    // SAFETY: takes numbers.
    let fd = unsafe { libc::socket(libc::AF_VSOCK, kind, 0) };
    assert!(fd >= 0);
    // SAFETY: it is open and nobody else's.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: all zeros is a valid address.
    let mut address: libc::sockaddr_vm = unsafe { mem::zeroed() };
    address.svm_family = libc::sa_family_t::try_from(libc::AF_VSOCK).unwrap();
    (address.svm_cid, address.svm_port) = (cid, port);
    let size = libc::socklen_t::try_from(mem::size_of_val(&address)).unwrap();
    let place = (&raw const address).cast();
    // SAFETY: the address is valid for its size.
    let done = unsafe { libc::connect(socket.as_raw_fd(), place, size) };
    assert_eq!(done, -1);
    let error = io::Error::last_os_error();
    assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS), "{error}");
    socket
}

#[test]
fn a_connection_reaches_the_guest_which_is_interrupted_also_after_a_reset() {
    let Some(vhost) = vhost(0) else { return };
    let (cid, memory) = (vhost.cid(), memory());
    let mut driver = Driver::find(&memory, Box::new(Vsock::new(vhost).unwrap()));

    for port in [1234, 1235] {
        driver.set_up(EVENT_IDX);
        assert_eq!((driver.get(0x70), driver.get(0x100)), (15, cid));
        let place = driver.put(RECEIVE, &[Buffer::In(4096)])[0];
        driver.kick(RECEIVE);
        let _socket = connect(cid, port);
        let written = driver.wait(RECEIVE);
        let until = Instant::now() + Duration::from_secs(10);
        while driver.get(0x60) != 1 {
            assert!(Instant::now() < until, "no interrupt");
        }

        // A request to connect (section 5.10.6): to whom, to which port, what it is.
        let header = driver.bytes(place, written);
        let number = |bytes: &[u8]| u32::from_le_bytes(*bytes.first_chunk().unwrap());
        assert_eq!(header.len(), 44);
        assert_eq!((number(&header[8..]), number(&header[20..])), (cid, port));
        assert_eq!(header[30..32], [1, 0]);
        driver.set(0x70, 0);
    }
}

#[test]
fn what_the_kernel_can_make_nothing_of_stops_the_device_until_it_is_reset() {
    let Some(vhost) = vhost(1 << 24) else { return };
    let memory = memory();
    let mut driver = Driver::start(&memory, Box::new(Vsock::new(vhost).unwrap()), 0);

    // Shorter than a packet's header.
    driver.put(TRANSMIT, &[Buffer::Out(vec![0; 8])]);
    driver.kick(TRANSMIT);
    driver.wait_for_failure();
    driver.set_up(0);

    assert_eq!(driver.get(0x70), 15);
}

#[test]
fn a_cid_is_one_guests() {
    let Some(first) = vhost(2 << 24) else { return };

    let error = VsockBackend::open(first.cid()).unwrap_err();
    let cid = first.cid();
    drop(first);

    assert!(matches!(error, VsockError::Taken(taken) if taken == cid));
    VsockBackend::open(cid).unwrap();
}

#[test]
fn a_host_without_the_device_is_told_what_to_do() {
    let of = |number| advice(&io::Error::from_raw_os_error(number));

    assert!(of(libc::ENOENT).contains("modprobe vhost_vsock"));
    assert!(of(libc::EACCES).contains("root"));
    if !std::path::Path::new("/dev/vhost-vsock").exists() {
        let error = VsockBackend::open(3).unwrap_err();
        assert!(error.to_string().contains("modprobe"), "{error}");
    }
}

#[test]
fn a_ring_across_two_pieces_of_memory_is_not_for_the_kernel() {
    let pieces = [
        (GuestAddress(0), 0x1_0000),
        (GuestAddress(0x1_0000), 0x1_0000),
    ];
    let memory = GuestMemoryMmap::<()>::from_ranges(&pieces).unwrap();
    let valid = |desc_table_addr, avail_ring_addr, used_ring_addr| {
        let ring = VringConfigData {
            queue_max_size: 256,
            queue_size: 256,
            desc_table_addr,
            avail_ring_addr,
            used_ring_addr,
            ..VringConfigData::default()
        };
        lies_in_one_piece(&memory, &ring)
    };

    // The last place in a piece: 16, 2 and 8 bytes an entry, 6 more for a ring.
    assert!(valid(0xf000, 0x1_0000, 0x1_1000));
    assert!(valid(0x1000, 0xfdfa, 0x1_f7fa));
    assert!(!valid(0xf010, 0x1_0000, 0x1_1000));
    assert!(!valid(0x1000, 0xfdfc, 0x1_1000));
    assert!(!valid(0x1000, 0x2000, 0xf7fc));
    assert!(!valid(0x1000, 0x2000, 0x1_f7fc));
    assert!(!valid(0x1000, u64::MAX, 0x3000));
}
