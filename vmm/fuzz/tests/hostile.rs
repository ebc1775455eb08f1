// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hostile guest: one thread writes random values to all registers and queues while the workers of
//! the devices run and another thread overwrites guest memory. Afterwards each device can be
//! activated after a reset, and the entropy device completes a request.
//!
//! `GRANULE_FUZZ_SEED` sets the seed; the host schedules the threads.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

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
use rand_core::{Rng as _, SeedableRng as _};
use rand_xoshiro::Xoshiro256StarStar;
use vm_memory::{Bytes as _, GuestAddress};

const ROUNDS: u32 = 3000;
// Registers of the transport (virtio 1.2, section 4.2.2).
const FEATURES: u64 = 0x20;
const FEATURES_SELECT: u64 = 0x24;
const QUEUE_SELECT: u64 = 0x30;
const QUEUE_SIZE: u64 = 0x38;
const QUEUE_READY: u64 = 0x44;
const NOTIFY: u64 = 0x50;
const STATUS: u64 = 0x70;
const ADDRESSES: [u64; 3] = [0x80, 0x90, 0xa0];

type Generator = Xoshiro256StarStar;

/// Returns a value as registers and descriptors contain them: a small number, a random number, or an
/// address in memory.
fn value(random: &mut Generator) -> u64 {
    match random.next_u64() % 4 {
        0 => random.next_u64() % 16,
        1 => random.next_u64(),
        _ => START + random.next_u64() % 0x4_0000,
    }
}

/// Returns a random element.
fn choose<T: Copy>(random: &mut Generator, options: &[T]) -> T {
    let index = random.next_u64() % options.len() as u64;
    options[usize::try_from(index).unwrap_or(0)]
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

/// Takes a device from reset to `DRIVER_OK` with the features `features`. `queue` returns the size
/// and the addresses of each queue.
fn activate(bus: &Bus, device: u64, features: u64, mut queue: impl FnMut(u32) -> [u64; 4]) {
    for status in [0, 1, 3] {
        set(bus, device, STATUS, status);
    }
    for (half, value) in [(0, features), (1, 1)] {
        set(bus, device, FEATURES_SELECT, half);
        set(bus, device, FEATURES, value);
    }
    set(bus, device, STATUS, 11);
    for index in 0..QUEUES[usize::try_from(device).unwrap_or(0)] {
        set(bus, device, QUEUE_SELECT, index.into());
        let [size, addresses @ ..] = queue(index);
        set(bus, device, QUEUE_SIZE, size);
        for (register, address) in ADDRESSES.into_iter().zip(addresses) {
            set(bus, device, register, address);
            set(bus, device, register + 4, address >> 32);
        }
        set(bus, device, QUEUE_READY, 1);
    }
    set(bus, device, STATUS, 15);
}

/// Writes random values of random sizes to the registers of randomly chosen devices.
fn write_random_registers(bus: &Bus, random: &mut Generator) {
    let devices: Vec<(u64, u64)> = bus.infos().map(|info| (info.start.0, info.size)).collect();
    for _ in 0..devices.len() {
        let (start, size) = choose(random, &devices);
        for offset in (0..size.min(0x140)).step_by(4) {
            let length = choose(random, &[4, 4, 4, 1, 2, 8]);
            if random.next_u64().is_multiple_of(4) {
                bus.read(GuestAddress(start + offset), &mut [0; 8][..length]);
            } else {
                bus.write(GuestAddress(start + offset), &value(random).to_le_bytes()[..length]);
            }
        }
    }
}

/// Activates a device with queues at random addresses, and notifies them.
fn activate_randomly(devices: &DeviceBus, random: &mut Generator) {
    let device = random.next_u64() % QUEUES.len() as u64;
    let any = random.next_u64();
    let wanted = choose(random, &[u64::MAX >> 32, any, 0, 1 << 29]);
    let offered = u64::from(get(&devices.bus, device, 0x10));
    activate(&devices.bus, device, wanted & offered, |_| {
        let size = 1 << (random.next_u64() % 9);
        let start = START + random.next_u64() % 0x3_0000 / 16 * 16;
        [size, start, start + size * 16, start + size * 20 + 16]
    });
    for _ in 0..random.next_u64() % 8 {
        set(&devices.bus, device, NOTIFY, random.next_u64() % 5);
    }
}

/// Writes a random descriptor to a random address.
fn write_random_memory(devices: &DeviceBus, random: &mut Generator) {
    let mut entry = value(random).to_le_bytes().to_vec();
    entry.extend((random.next_u64() % 0x2000).to_le_bytes());
    let [flags, next] = [random.next_u64() % 8, random.next_u64() % 256];
    entry.truncate(12);
    entry.extend([u8::try_from(flags).unwrap_or(0), 0]);
    entry.extend([u8::try_from(next).unwrap_or(0), 0]);
    let address = GuestAddress(START + random.next_u64() % 0x4_0000 / 16 * 16);
    // The end of memory has no space for it.
    let _ = devices.memory.map().write_slice(&entry, address);
}

/// Sends a request to the entropy device as a driver does, and returns whether it completes.
fn entropy_works(devices: &DeviceBus) -> bool {
    let (table, available, used, buffer) = (START, START + 0x1000, START + 0x2000, START + 0x3000);
    let map = devices.memory.map();
    map.write_slice(&[0; 0x4000], GuestAddress(START)).unwrap();
    activate(&devices.bus, ENTROPY, 0, |_| [8, table, available, used]);
    assert_eq!(get(&devices.bus, ENTROPY, STATUS), 15);
    map.write_obj(buffer, GuestAddress(table)).unwrap();
    map.write_obj(64u32, GuestAddress(table + 8)).unwrap();
    map.write_obj(2u16, GuestAddress(table + 12)).unwrap();
    map.write_obj(1u16, GuestAddress(available + 2)).unwrap();
    set(&devices.bus, ENTROPY, NOTIFY, 0);
    let deadline = Instant::now() + Duration::from_secs(60);
    while Instant::now() < deadline {
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
fn devices_work_after_random_writes_to_registers_and_memory() {
    let seed = std::env::var("GRANULE_FUZZ_SEED").map_or(1, |text| text.parse().unwrap());
    let devices = Arc::new(device_bus());
    let done = Arc::new(AtomicBool::new(false));
    let (memory, stop) = (Arc::clone(&devices), Arc::clone(&done));
    let other_cpu = thread::spawn(move || {
        let mut random = Generator::seed_from_u64(seed + 1);
        while !stop.load(Ordering::Relaxed) {
            (0..100).for_each(|_| write_random_memory(&memory, &mut random));
            thread::yield_now();
        }
    });
    let mut random = Generator::seed_from_u64(seed);

    for _ in 0..ROUNDS {
        write_random_registers(&devices.bus, &mut random);
        (0..4).for_each(|_| activate_randomly(&devices, &mut random));
    }
    done.store(true, Ordering::Relaxed);
    other_cpu.join().unwrap();

    let refused = devices.bus.refused();
    assert!(refused.malformed > 0, "{refused:?}");
    for device in 0..QUEUES.len() as u64 {
        let area = START + device * 0x8000;
        activate(&devices.bus, device, 0, |queue| {
            let start = area + u64::from(queue) * 0x1000;
            [8, start, start + 0x400, start + 0x800]
        });
        let status = get(&devices.bus, device, STATUS) & !64;
        assert_eq!(status, 15, "device {device} cannot be activated");
        set(&devices.bus, device, STATUS, 0);
    }
    assert!(entropy_works(&devices));
}
