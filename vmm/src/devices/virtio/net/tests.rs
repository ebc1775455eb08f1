// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A card whose tap is one end of a pair of sockets.

use std::{
    os::unix::net::{UnixDatagram, UnixStream},
    time::Duration,
};

use super::*;
use crate::devices::virtio::testing::{Buffer, Driver, EVENT_IDX, memory};

const MERGE: u64 = 1 << VIRTIO_NET_F_MRG_RXBUF;

fn card() -> (Box<Net>, UnixDatagram) {
    let (tap, host) = Tap::pair();
    host.set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    (Box::new(Net::new(tap, mac_for("tap0"))), host)
}

/// A header that asks for nothing, and bytes behind it.
fn packet(length: usize) -> Vec<u8> {
    let content = (0..253).cycle().take(length);
    [0; HEADER].into_iter().chain(content).collect()
}

#[test]
fn what_the_guest_sends_arrives_as_it_is() {
    let (memory, (card, host)) = (memory(), card());
    let mut driver = Driver::start(&memory, card, EVENT_IDX);
    let sent = packet(1500);
    let (head, body) = sent.split_at(HEADER);

    driver.ask(1, &[Buffer::Out(head.to_vec()), Buffer::Out(body.to_vec())]);
    driver.ask(1, &[Buffer::Out(packet(60))]);

    let mut bytes = [0; 2000];
    let length = host.recv(&mut bytes).unwrap();
    assert_eq!(bytes[..length], sent);
    let length = host.recv(&mut bytes).unwrap();
    assert_eq!(bytes[..length], packet(60));
}

#[test]
fn what_arrives_is_put_into_the_guests_buffers() {
    let (memory, (card, host)) = (memory(), card());
    let mut driver = Driver::start(&memory, card, EVENT_IDX);

    for length in [60, 1500, 9000] {
        host.send(&packet(length)).unwrap();
        let (answers, written) = driver.ask(0, &[Buffer::In(12), Buffer::In(10000)]);

        let packet = packet(length);
        assert_eq!(written as usize, packet.len());
        assert_eq!(answers[0][..BUFFERS], packet[..BUFFERS]);
        assert_eq!(answers[0][BUFFERS..], [1, 0]);
        assert_eq!(answers[1][..length], packet[HEADER..]);
    }
}

#[test]
fn a_packet_may_take_several_buffers_and_waits_for_them() {
    let (memory, (card, host)) = (memory(), card());
    let mut driver = Driver::start(&memory, card, MERGE | EVENT_IDX);
    let sent = packet(2000);

    let first = driver.put(0, &[Buffer::In(1000)]);
    driver.kick(0);
    host.send(&sent).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert!(!driver.has_answer(0));
    let second = driver.put(0, &[Buffer::In(1012)]);
    let third = driver.put(0, &[Buffer::In(1000)]);
    driver.kick(0);
    let written = [driver.wait(0), driver.wait(0)];

    let bytes = [driver.bytes(first[0], 1000), driver.bytes(second[0], 1012)].concat();
    assert_eq!(written, [1000, 1012]);
    assert_eq!(bytes[BUFFERS..HEADER], [2, 0]);
    assert_eq!(bytes[HEADER..], sent[HEADER..]);
    host.send(&packet(100)).unwrap();
    assert_eq!(driver.wait(0), 112);
    assert_eq!(driver.bytes(third[0], 112)[BUFFERS..HEADER], [1, 0]);
}

#[test]
fn a_buffer_too_small_for_a_packet_stops_the_device() {
    let (memory, (card, host)) = (memory(), card());
    let mut driver = Driver::start(&memory, card, 0);

    driver.put(0, &[Buffer::In(100)]);
    driver.kick(0);
    host.send(&packet(100)).unwrap();
    driver.wait_for_failure();

    driver.set_up(0);
    host.send(&packet(100)).unwrap();
    assert_eq!(driver.ask(0, &[Buffer::In(200)]).1, 112);
}

/// Has `vanish` take the tap away from a card at work, which is to lose its link: the driver is
/// told, and what it sends is dropped.
fn loses_its_link(tap: Tap, vanish: impl FnOnce()) {
    let memory = memory();
    let card = Box::new(Net::new(tap, mac_for("tap0")));
    let mut driver = Driver::start(&memory, card, 1 << VIRTIO_NET_F_STATUS);
    driver.put(0, &[Buffer::In(2000)]);
    driver.kick(0);
    let before = driver.get(0x104) >> 16;
    let told_before = driver.get(0x60) & 2;

    vanish();
    // The card notices by what it reads or by what it writes.
    driver.ask(1, &[Buffer::Out(packet(60))]);
    let until = std::time::Instant::now() + Duration::from_secs(10);
    while driver.get(0x104) >> 16 != 0 {
        assert!(std::time::Instant::now() < until, "the link stays up");
        std::thread::sleep(Duration::from_millis(1));
    }
    while driver.get(0x60) & 2 == 0 {
        assert!(std::time::Instant::now() < until, "the driver is not told");
        std::thread::sleep(Duration::from_millis(1));
    }

    assert_eq!((before, told_before), (1, 0));
    assert!(driver.irq.read().is_ok());
    assert_eq!(driver.ask(1, &[Buffer::Out(packet(60))]).1, 0);
    assert_eq!(driver.get(0x70) & 64, 0, "the device goes on");
}

/// Its other end closed, a stream reads as ended.
#[test]
fn a_stand_in_that_ends_takes_the_link_down() {
    let (tap, host) = UnixStream::pair().unwrap();
    tap.set_nonblocking(true).unwrap();

    loses_its_link(Tap::from_fd(tap.into(), "a stream"), || drop(host));
}

#[test]
fn a_tap_that_is_deleted_takes_the_link_down() {
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

    loses_its_link(tap, || assert!(ip(&["link", "del", &name])));
}

#[test]
fn addresses_are_local_and_differ_by_name() {
    let (one, two) = (mac_for("tap0"), mac_for("tap1"));

    assert_eq!((one[0], two[0]), (2, 2));
    assert_ne!(one, two);
    assert_eq!(one, mac_for("tap0"));
}

#[test]
fn the_tap_leaves_to_the_guest_what_the_guest_takes() {
    let tso4 = bit(VIRTIO_NET_F_GUEST_CSUM) | bit(VIRTIO_NET_F_GUEST_TSO4);

    assert_eq!(offloads(0), 0);
    assert_eq!(offloads(tso4), libc::TUN_F_CSUM | libc::TUN_F_TSO4);
}
