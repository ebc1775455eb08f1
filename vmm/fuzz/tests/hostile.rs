// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest that writes random values to every register and every queue, with the devices' real
//! threads at work, while another of its CPUs scribbles over its memory. Afterwards nothing has
//! died: after a reset each device takes up work again, and one shows that it does it.
//!
//! `GRANULE_FUZZ_SEED` says where the random numbers begin; the order of the threads is the host's.

#![allow(clippy::unwrap_used, reason = "a failed test tells where")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use granule_fuzz::{
    bus::{DeviceBus, ENTROPY, QUEUES, VIRTIO, VIRTIO_STEP, device_bus},
    guest::START,
};
use granule_vmm::devices::Bus;
use vm_memory::{Bytes as _, GuestAddress};

const ROUNDS: u32 = 3000;
/// Registers of virtio's transport (virtio 1.2, section 4.2.2).
const FEATURES: u64 = 0x20;
const FEATURES_SELECT: u64 = 0x24;
const QUEUE_SELECT: u64 = 0x30;
const QUEUE_SIZE: u64 = 0x38;
const QUEUE_READY: u64 = 0x44;
const NOTIFY: u64 = 0x50;
const STATUS: u64 = 0x70;
const ADDRESSES: [u64; 3] = [0x80, 0x90, 0xa0];

/// Marsaglia's xorshift.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Numbers as registers and descriptors have them: small, anything, or an address in memory.
    fn value(&mut self) -> u64 {
        match self.next() % 4 {
            0 => self.next() % 16,
            1 => self.next(),
            _ => START + self.next() % 0x4_0000,
        }
    }
}

fn address(device: u64, register: u64) -> GuestAddress {
    GuestAddress(VIRTIO + device * VIRTIO_STEP + register)
}

fn set(bus: &Bus, device: u64, register: u64, value: u64) {
    let [a, b, c, d, ..] = value.to_le_bytes();
    bus.write(address(device, register), &[a, b, c, d]);
}

fn get(bus: &Bus, device: u64, register: u64) -> u32 {
    let mut word = [0; 4];
    bus.read(address(device, register), &mut word);
    u32::from_le_bytes(word)
}

/// From reset to `DRIVER_OK`: each queue at an address that `place` gives, with what `offer` leaves
/// of the features.
fn set_up(bus: &Bus, device: u64, offer: u64, mut place: impl FnMut(u32) -> [u64; 4]) {
    for status in [0, 1, 3] {
        set(bus, device, STATUS, status);
    }
    for (half, value) in [(0, offer), (1, 1)] {
        set(bus, device, FEATURES_SELECT, half);
        set(bus, device, FEATURES, value);
    }
    set(bus, device, STATUS, 11);
    for queue in 0..QUEUES[usize::try_from(device).unwrap_or(0)] {
        set(bus, device, QUEUE_SELECT, queue.into());
        let [size, places @ ..] = place(queue);
        set(bus, device, QUEUE_SIZE, size);
        for (register, address) in ADDRESSES.into_iter().zip(places) {
            set(bus, device, register, address);
            set(bus, device, register + 4, address >> 32);
        }
        set(bus, device, QUEUE_READY, 1);
    }
    set(bus, device, STATUS, 15);
}

/// Random values to every register of every device, in every size, in a random order of devices.
fn scribble_on_registers(bus: &Bus, random: &mut Random) {
    let devices: Vec<(u64, u64)> = bus.infos().map(|info| (info.start.0, info.size)).collect();
    for _ in 0..devices.len() {
        let (start, size) = devices[usize::try_from(random.next()).unwrap_or(0) % devices.len()];
        for offset in (0..size.min(0x140)).step_by(4) {
            let length = [4, 4, 4, 1, 2, 8][usize::try_from(random.next() % 6).unwrap_or(0)];
            if random.next().is_multiple_of(4) {
                bus.read(GuestAddress(start + offset), &mut [0; 8][..length]);
            } else {
                bus.write(
                    GuestAddress(start + offset),
                    &random.value().to_le_bytes()[..length],
                );
            }
        }
    }
}

/// Sets a device up with queues somewhere in memory, and notifies them.
fn use_at_random(devices: &DeviceBus, random: &mut Random) {
    let device = random.next() % QUEUES.len() as u64;
    let offer = [u64::MAX >> 32, random.next(), 0, 1 << 29][(random.next() % 4) as usize];
    let offered = u64::from(get(&devices.bus, device, 0x10));
    set_up(&devices.bus, device, offer & offered, |_| {
        let size = 1 << (random.next() % 9);
        let place = START + random.next() % 0x3_0000 / 16 * 16;
        [size, place, place + size * 16, place + size * 20 + 16]
    });
    for _ in 0..random.next() % 8 {
        set(&devices.bus, device, NOTIFY, random.next() % 5);
    }
}

/// Descriptors and indices of a guest gone mad, as fast as they can be written.
fn scribble_on_memory(devices: &DeviceBus, random: &mut Random) {
    let mut entry = random.value().to_le_bytes().to_vec();
    entry.extend((random.next() % 0x2000).to_le_bytes());
    let [flags, next] = [random.next() % 8, random.next() % 256];
    entry.truncate(12);
    entry.extend([u8::try_from(flags).unwrap_or(0), 0]);
    entry.extend([u8::try_from(next).unwrap_or(0), 0]);
    let place = GuestAddress(START + random.next() % 0x4_0000 / 16 * 16);
    // At the very end there is no room for it.
    let _ = devices.memory.map().write_slice(&entry, place);
}

/// A request for random numbers, as a driver makes it; says whether it was answered.
fn entropy_works(devices: &DeviceBus) -> bool {
    let (table, available, used, buffer) = (START, START + 0x1000, START + 0x2000, START + 0x3000);
    let map = devices.memory.map();
    map.write_slice(&[0; 0x4000], GuestAddress(START)).unwrap();
    set_up(&devices.bus, ENTROPY, 0, |_| [8, table, available, used]);
    assert_eq!(get(&devices.bus, ENTROPY, STATUS), 15);
    map.write_obj(buffer, GuestAddress(table)).unwrap();
    map.write_obj(64u32, GuestAddress(table + 8)).unwrap();
    map.write_obj(2u16, GuestAddress(table + 12)).unwrap();
    map.write_obj(1u16, GuestAddress(available + 2)).unwrap();
    set(&devices.bus, ENTROPY, NOTIFY, 0);
    let until = Instant::now() + Duration::from_secs(60);
    while Instant::now() < until {
        if map.read_obj::<u16>(GuestAddress(used + 2)).unwrap() == 1 {
            let mut bytes = [0; 64];
            map.read_slice(&mut bytes, GuestAddress(buffer)).unwrap();
            return bytes != [0; 64];
        }
        thread::sleep(Duration::from_millis(1));
    }
    false
}

#[test]
fn a_guest_gone_mad_does_no_harm() {
    let seed = std::env::var("GRANULE_FUZZ_SEED").map_or(1, |text| text.parse().unwrap());
    let devices = Arc::new(device_bus());
    let done = Arc::new(AtomicBool::new(false));
    let (memory, stop) = (Arc::clone(&devices), Arc::clone(&done));
    let other_cpu = thread::spawn(move || {
        let mut random = Random(seed + 1);
        while !stop.load(Ordering::Relaxed) {
            (0..100).for_each(|_| scribble_on_memory(&memory, &mut random));
            thread::yield_now();
        }
    });
    let mut random = Random(seed);

    for _ in 0..ROUNDS {
        scribble_on_registers(&devices.bus, &mut random);
        (0..4).for_each(|_| use_at_random(&devices, &mut random));
    }
    done.store(true, Ordering::Relaxed);
    other_cpu.join().unwrap();

    let refused = devices.bus.refused();
    assert!(refused.malformed > 0, "{refused:?}");
    for device in 0..QUEUES.len() as u64 {
        let area = START + device * 0x8000;
        set_up(&devices.bus, device, 0, |queue| {
            let place = area + u64::from(queue) * 0x1000;
            [8, place, place + 0x400, place + 0x800]
        });
        let status = get(&devices.bus, device, STATUS) & !64;
        assert_eq!(status, 15, "device {device} is lost");
        set(&devices.bus, device, STATUS, 0);
    }
    assert!(entropy_works(&devices));
}
