// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of the network device with a pair of sockets in place of a tap.

use std::{
    net::UdpSocket,
    os::unix::net::{UnixDatagram, UnixStream},
    time::Duration,
};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_STATUS,
};

use super::*;
use crate::devices::{
    MmioDevice as _,
    virtio::testing::{Buffer, Driver, EVENT_IDX, MEMORY_START, queue_at, wait_until},
};

const MRG_RXBUF: u64 = 1 << VIRTIO_NET_F_MRG_RXBUF;

/// Returns a network device and the host's end of its tap.
fn net_device() -> (Box<Net>, UnixDatagram) {
    let (tap, host) = Tap::pair();
    host.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    (Box::new(Net::new(tap, mac_from_tap_name("tap0"))), host)
}

/// Returns a header without offloads and `length` bytes of content.
fn packet(length: usize) -> Vec<u8> {
    let content = (0..253).cycle().take(length);
    [0; HEADER_SIZE].into_iter().chain(content).collect()
}

#[test]
fn transmitted_packets_reach_the_tap_unchanged() {
    let (device, host) = net_device();
    let mut driver = Driver::start(device, EVENT_IDX);
    let sent = packet(1500);
    let (head, body) = sent.split_at(HEADER_SIZE);

    driver.request(1, &[Buffer::Out(head.to_vec()), Buffer::Out(body.to_vec())]);
    driver.request(1, &[Buffer::Out(packet(60))]);

    let mut bytes = [0; 2000];
    let length = host.recv(&mut bytes).unwrap();
    assert_eq!(bytes[..length], sent);
    let length = host.recv(&mut bytes).unwrap();
    assert_eq!(bytes[..length], packet(60));
}

#[test]
fn received_packets_are_copied_to_the_guest() {
    let (device, host) = net_device();
    let mut driver = Driver::start(device, EVENT_IDX);

    for length in [60, 1500, 9000] {
        host.send(&packet(length)).unwrap();
        let (answers, written) = driver.request(0, &[Buffer::In(12), Buffer::In(10000)]);

        let packet = packet(length);
        assert_eq!(written as usize, packet.len());
        assert_eq!(answers[0][..NUM_BUFFERS_OFFSET], packet[..NUM_BUFFERS_OFFSET]);
        assert_eq!(answers[0][NUM_BUFFERS_OFFSET..], [1, 0]);
        assert_eq!(answers[1][..length], packet[HEADER_SIZE..]);
    }
}

#[test]
fn a_packet_may_span_buffers_and_waits_for_them() {
    let (device, host) = net_device();
    let mut driver = Driver::start(device, MRG_RXBUF | EVENT_IDX);
    let sent = packet(2000);

    let first = driver.add_request(0, &[Buffer::In(1000)]);
    driver.notify(0);
    host.send(&sent).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert!(!driver.has_used(0));
    let second = driver.add_request(0, &[Buffer::In(1012)]);
    let third = driver.add_request(0, &[Buffer::In(1000)]);
    driver.notify(0);
    let written = [driver.wait_used(0), driver.wait_used(0)];

    let bytes = [driver.read_bytes(first[0], 1000), driver.read_bytes(second[0], 1012)].concat();
    assert_eq!(written, [1000, 1012]);
    assert_eq!(bytes[NUM_BUFFERS_OFFSET..HEADER_SIZE], [2, 0]);
    assert_eq!(bytes[HEADER_SIZE..], sent[HEADER_SIZE..]);
    host.send(&packet(100)).unwrap();
    assert_eq!(driver.wait_used(0), 112);
    assert_eq!(driver.read_bytes(third[0], 112)[NUM_BUFFERS_OFFSET..HEADER_SIZE], [1, 0]);
}

#[test]
fn the_last_packet_of_a_burst_is_delivered() {
    // A socket of this type keeps more packets than a datagram socket.
    let (family, packets) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let (tap, host) = socketpair(family, packets, SocketFlags::NONBLOCK, None).unwrap();
    let net = Net::new(Tap::from_fd(tap, "a pair"), mac_from_tap_name("tap0"));
    let mut driver = Driver::new(Box::new(net));
    driver.activate_with(EVENT_IDX, |index| {
        queue_at(MEMORY_START + u64::from(index) * 0x1_0000, QUEUE_SIZE)
    });
    for _ in 0..MAX_PACKETS_PER_POLL {
        rustix::io::write(&host, &packet(60)).unwrap();
    }

    for _ in 0..=MAX_PACKETS_PER_POLL {
        driver.add_request(0, &[Buffer::In(100)]);
    }
    driver.notify(0);

    for _ in 0..MAX_PACKETS_PER_POLL {
        assert_eq!(driver.wait_used(0), 72);
    }
}

#[test]
fn a_packet_larger_than_a_buffer_is_dropped() {
    let (device, host) = net_device();
    let mut driver = Driver::start(device, 0);
    driver.add_request(0, &[Buffer::In(100)]);
    driver.notify(0);

    host.send(&packet(100)).unwrap();
    host.send(&packet(60)).unwrap();

    assert_eq!(driver.wait_used(0), 72);
}

#[test]
fn a_receive_buffer_smaller_than_a_header_stops_the_device() {
    let (device, host) = net_device();
    let mut driver = Driver::start(device, 0);

    driver.add_request(0, &[Buffer::In(8)]);
    driver.notify(0);
    host.send(&packet(100)).unwrap();
    driver.wait_needs_reset();

    driver.activate(0);
    host.send(&packet(100)).unwrap();
    assert_eq!(driver.request(0, &[Buffer::In(200)]).1, 112);
}

#[test]
fn a_packet_that_cannot_be_read_leaves_the_link_up() {
    let tap = UdpSocket::bind("127.0.0.1:0").unwrap();
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    let (address, peer_address) = (tap.local_addr().unwrap(), peer.local_addr().unwrap());
    tap.connect(peer_address).unwrap();
    tap.set_nonblocking(true).unwrap();
    drop(peer);
    let net = Net::new(Tap::from_fd(tap.into(), "a socket"), mac_from_tap_name("tap0"));
    let mut driver = Driver::start(Box::new(net), 1 << VIRTIO_NET_F_STATUS);
    driver.add_request(0, &[Buffer::In(200)]);
    driver.notify(0);

    // No socket has the port, so the next read fails once.
    driver.request(1, &[Buffer::Out(packet(60))]);
    UdpSocket::bind(peer_address).unwrap().send_to(&packet(100), address).unwrap();

    assert_eq!(driver.wait_used(0), 112);
    assert_eq!(driver.read_register(0x104) >> 16, 1);
}

/// Checks that `remove`, which makes the tap disappear, takes the link down: the driver gets a
/// configuration interrupt, and its packets are dropped. Returns the driver.
fn check_link_loss(tap: Tap, remove: impl FnOnce()) -> Driver {
    let device = Box::new(Net::new(tap, mac_from_tap_name("tap0")));
    let mut driver = Driver::start(device, 1 << VIRTIO_NET_F_STATUS);
    driver.add_request(0, &[Buffer::In(2000)]);
    driver.notify(0);
    let link_before = driver.read_register(0x104) >> 16;
    let interrupt_before = driver.read_register(0x60) & 2;

    remove();
    // The device detects the loss by a failed read or write.
    driver.request(1, &[Buffer::Out(packet(60))]);
    wait_until("the link is down", || driver.read_register(0x104) >> 16 == 0);
    wait_until("a configuration interrupt", || driver.read_register(0x60) & 2 != 0);

    assert_eq!((link_before, interrupt_before), (1, 0));
    assert!(driver.irq.read().is_ok());
    assert_eq!(driver.request(1, &[Buffer::Out(packet(60))]).1, 0);
    assert_eq!(driver.read_register(0x70) & 64, 0, "the device continues");
    driver
}

#[test]
fn a_closed_descriptor_takes_the_link_down_until_a_restore() {
    let (tap, host) = UnixStream::pair().unwrap();
    tap.set_nonblocking(true).unwrap();

    let mut driver = check_link_loss(Tap::from_fd(tap.into(), "a stream"), || drop(host));
    let state = driver.transport.suspend().unwrap().unwrap();
    let (device, _host) = net_device();
    driver.replace_device(device, &state).unwrap();

    assert_eq!(driver.read_register(0x104) >> 16, 1);
    assert_eq!(driver.read_register(0x60) & 2, 2, "a configuration interrupt");
}

#[test]
fn a_link_that_was_down_is_up_after_a_restore_without_a_driver() {
    let (tap, host) = UnixStream::pair().unwrap();
    tap.set_nonblocking(true).unwrap();

    let mut driver = check_link_loss(Tap::from_fd(tap.into(), "a stream"), || drop(host));
    driver.write_register(0x70, 0);
    let state = driver.transport.suspend().unwrap().unwrap();
    let (device, _host) = net_device();
    driver.replace_device(device, &state).unwrap();

    assert_eq!(driver.read_register(0x104) >> 16, 1);
}

#[test]
fn a_deleted_tap_takes_the_link_down() {
    let name = format!("granule{}", std::process::id());
    let tap = match Tap::open(&name) {
        Ok(tap) => tap,
        Err(error) => {
            return granule_types::testing::skip(format_args!("cannot open a tap: {error}"));
        }
    };
    let ip = |arguments: &[&str]| {
        let status = std::process::Command::new("ip")
            .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
            .args(arguments)
            .status();
        status.is_ok_and(|status| status.success())
    };
    if !ip(&["link", "set", &name, "up"]) {
        return granule_types::testing::skip("'ip' is not installed or cannot set a link up");
    }

    check_link_loss(tap, || assert!(ip(&["link", "del", &name])));
}

#[test]
fn mac_addresses_are_local_and_differ_by_name() {
    let (one, two) = (mac_from_tap_name("tap0"), mac_from_tap_name("tap1"));

    assert_eq!((one[0], two[0]), (2, 2));
    assert_ne!(one, two);
    assert_eq!(one, mac_from_tap_name("tap0"));
}

#[test]
fn tap_offloads_follow_the_features_of_the_guest() {
    let tso4 = feature_bit(VIRTIO_NET_F_GUEST_CSUM) | feature_bit(VIRTIO_NET_F_GUEST_TSO4);

    assert_eq!(tap_offloads(0), 0);
    assert_eq!(tap_offloads(tso4), libc::TUN_F_CSUM | libc::TUN_F_TSO4);
}
