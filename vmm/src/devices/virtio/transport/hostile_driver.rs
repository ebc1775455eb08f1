// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Test with a hostile driver: one thread resets and activates the devices with random features and
//! queues while their workers run, and another thread overwrites guest memory. Afterwards each
//! device can be activated, and the entropy device completes a request.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use granule_types::units::GuestAddress;
use rand_core::{Rng as _, SeedableRng as _};
use rand_xoshiro::Xoshiro256StarStar as Generator;
use vm_memory::Bytes as _;

use crate::{
    devices::virtio::{
        VirtioDevice,
        balloon::Balloon,
        block::{Block, Disk},
        console::Console,
        net::{Net, Tap, mac_from_tap_name},
        rng::Rng,
        testing::{Buffer, Driver, EVENT_IDX, MEMORY_SIZE, MEMORY_START, queue_at},
    },
    memory::GuestMemory,
};

const ROUNDS: u32 = 3000;
/// Size in bytes of the guest memory area for random queues.
const QUEUE_AREA_SIZE: u64 = 0x4_0000;

/// Returns a device of each type, and the host's ends of their backends, which must stay open.
fn create_devices() -> ([Box<dyn VirtioDevice>; 5], impl Drop) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, vec![7; 1 << 16]).unwrap();
    let disk = Disk::open(&path, false).unwrap();
    let (tap, host) = Tap::pair();
    let (input, keyboard) = std::io::pipe().unwrap();
    host.send(&[1; 200]).unwrap();
    std::io::Write::write_all(&mut &keyboard, b"typed").unwrap();
    let devices: [Box<dyn VirtioDevice>; 5] = [
        Box::new(Rng),
        Box::new(Block::new(disk, "disk")),
        Box::new(Net::new(tap, mac_from_tap_name("pair"))),
        Box::new(Console::new(Some(input.into()), Box::new(std::io::sink()), None)),
        Box::new(Balloon::default()),
    ];
    let backends: Box<dyn std::any::Any> = Box::new((folder, host, keyboard));
    (devices, backends)
}

fn random_below(random: &mut Generator, limit: u16) -> u16 {
    u16::try_from(random.next_u64() % u64::from(limit)).unwrap()
}

fn random_choice<T: Copy>(random: &mut Generator, options: &[T]) -> T {
    options[usize::from(random_below(random, u16::try_from(options.len()).unwrap()))]
}

/// Returns a descriptor address: in memory, near its end, small or random.
fn random_address(random: &mut Generator) -> u64 {
    match random_below(random, 5) {
        0 => random.next_u64() % 16,
        1 => random.next_u64(),
        2 => MEMORY_START + MEMORY_SIZE - random.next_u64() % 256,
        _ => MEMORY_START + random.next_u64() % QUEUE_AREA_SIZE,
    }
}

/// Activates a device with random features and queues at random addresses, and notifies them.
fn activate_randomly(driver: &mut Driver, random: &mut Generator) {
    let any = random.next_u64();
    let features =
        driver.offered_features() & random_choice(random, &[u64::MAX, any, 0, EVENT_IDX]);
    driver.activate_with(features, |_| {
        let start = MEMORY_START + random.next_u64() % 0x3_0000 / 16 * 16;
        queue_at(start, 1 << random_below(random, 9))
    });
    for _ in 0..random_below(random, 8) {
        driver.notify(random_below(random, 5).into());
    }
}

fn write_random_descriptor(memory: &GuestMemory, random: &mut Generator) {
    let any = random.next_u64() % 0x2000;
    let length = random_choice(random, &[any, any, any, 0, 513, u64::from(u32::MAX)]);
    let (flags, next) = (random.next_u64() % 8, random.next_u64() % 256);
    let descriptor = [random_address(random), length | flags << 32 | next << 48];
    let address = MEMORY_START + random.next_u64() % QUEUE_AREA_SIZE / 16 * 16;
    memory.map().write_obj(descriptor, GuestAddress(address)).unwrap();
}

#[test]
fn devices_work_after_random_queues_and_writes_to_memory() {
    let (devices, _backends) = create_devices();
    let mut drivers = devices.map(Driver::new);
    let memories = [0, 1, 2, 3, 4].map(|index| Arc::clone(&drivers[index].memory));
    let stop_requested = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&stop_requested);
    let other_cpu = thread::spawn(move || {
        let mut random = Generator::seed_from_u64(2);
        while !stop.load(Ordering::Relaxed) {
            for memory in memories.iter().cycle().take(100) {
                write_random_descriptor(memory, &mut random);
            }
            thread::yield_now();
        }
    });
    let mut random = Generator::seed_from_u64(1);

    for _ in 0..ROUNDS {
        for _ in 0..4 {
            activate_randomly(&mut drivers[usize::from(random_below(&mut random, 5))], &mut random);
        }
    }
    stop_requested.store(true, Ordering::Relaxed);
    other_cpu.join().unwrap();

    for (index, driver) in drivers.iter_mut().enumerate() {
        driver.write_register(0x70, 0);
        let zeros = vec![0; usize::try_from(QUEUE_AREA_SIZE).unwrap()];
        driver.memory.map().write_slice(&zeros, GuestAddress(MEMORY_START)).unwrap();
        driver.activate(0);
        assert_eq!(driver.read_register(0x70), 15, "device {index} cannot be activated");
    }
    let (answers, _) = drivers[0].request(0, &[Buffer::In(64)]);
    assert_ne!(answers, [[0; 64]]);
}
