// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Property tests: random writes to all registers and queues of each device.

use proptest::prelude::*;

use super::*;
use crate::devices::virtio::{
    balloon::Balloon,
    block::{Block, Disk},
    console::Console,
    net::{Net, Tap, mac_for},
};

/// Returns a device of each type, and the host's ends of their backends to keep alive.
fn devices() -> (Vec<Box<dyn VirtioDevice>>, impl Drop) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, vec![7; 1 << 16]).unwrap();
    let disk = Disk::open(&path, false).unwrap();
    let (tap, host) = Tap::pair();
    let (input, keyboard) = std::io::pipe().unwrap();
    host.send(&[1; 200]).unwrap();
    std::io::Write::write_all(&mut &keyboard, b"typed").unwrap();
    let devices: Vec<Box<dyn VirtioDevice>> = vec![
        rng(),
        Box::new(Block::new(disk, "disk")),
        Box::new(Net::new(tap, mac_for("pair"))),
        Box::new(Console::new(Some(input.into()), Box::new(std::io::sink()))),
        Box::new(Balloon::new().unwrap()),
    ];
    let backends: Box<dyn std::any::Any> = Box::new((folder, host, keyboard));
    (devices, backends)
}

/// Generates stores, most of them to existing registers with plausible values, so that they reach
/// states after the initialization.
fn stores() -> impl Strategy<Value = Vec<(u64, u64, usize)>> {
    let register = prop_oneof![
        8 => prop::sample::select(vec![
            0x14_u64, 0x20, 0x24, 0x30, 0x38, 0x44, 0x50, 0x64, 0x70, 0x80, 0x84, 0x90, 0x94,
            0xa0, 0xa4, 0xac, 0x100, 0x104,
        ]),
        1 => 0..0x1000_u64,
    ];
    let value = prop_oneof![
        4 => 0..16_u64,
        2 => prop::sample::select(vec![1_u64, 3, 11, 15, 0]),
        2 => (0..SIZE / 16).prop_map(|at| START + at * 16),
        1 => any::<u64>(),
    ];
    let size = prop_oneof![8 => Just(4_usize), 1 => prop::sample::select(vec![1_usize, 2, 8])];
    prop::collection::vec((register, value, size), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_device_can_be_activated_after_random_register_writes(stores in stores()) {
        let memory = memory();
        let (devices, _backends) = devices();
        for device in devices {
            let mut driver = Driver::new(&memory, device);
            for (offset, value, size) in &stores {
                let _ = driver.transport.write(*offset, &value.to_le_bytes()[..*size]);
                let _ = driver.transport.read(*offset, &mut [0; 8][..*size]);
            }
            driver.activate(0);
            prop_assert_eq!(driver.get(reg::VIRTIO_MMIO_STATUS) & 15, 15);
        }
    }

    #[test]
    fn a_device_can_be_activated_after_random_queue_contents(
        seed in prop::collection::vec(any::<u8>(), 64..512),
        heads in prop::collection::vec(0..20_u16, 1..16),
        features in any::<u32>(),
    ) {
        let memory = memory();
        let (devices, _backends) = devices();
        for device in devices {
            let mut driver = Driver::new(&memory, device);
            let features = driver.offered_features() & u64::from(features);
            driver.activate(features);
            for index in 0..driver.queues.len() {
                scribble(&driver, index, &seed, &heads);
                driver.notify(index);
            }
            driver.activate(features);
            prop_assert_eq!(driver.get(reg::VIRTIO_MMIO_STATUS) & 15, 15);
        }
    }
}

/// Fills the descriptors of a queue with addresses near the ends of memory and with unusual lengths
/// and flags, and makes some of them available.
fn scribble(driver: &Driver<'_>, index: usize, seed: &[u8], heads: &[u16]) {
    let queue = &driver.queues[index];
    for (slot, bytes) in (0..16_u64).zip(seed.chunks(8).cycle()) {
        let byte = |at: usize| u64::from(*bytes.get(at).unwrap_or(&0));
        let address = match byte(0) % 4 {
            0 => START + SIZE - byte(1),
            1 => START + byte(1) * 4096 + byte(2),
            2 => u64::MAX - byte(1),
            _ => START + 0x10_0000 + byte(1) * 16,
        };
        let length = match byte(3) % 4 {
            0 => u32::MAX,
            1 => 0,
            2 => 512 + 1,
            _ => u32::try_from(byte(4)).unwrap_or(0),
        };
        let at = GuestAddress(queue.desc_table_address.0 + slot * 16);
        driver.memory.write_obj(address, at).unwrap();
        let at = GuestAddress(at.0 + 8);
        driver.memory.write_obj(length, at).unwrap();
        let at = GuestAddress(at.0 + 4);
        driver.memory.write_obj([bytes[0] % 8, 0, bytes[0] % 17, 0], at).unwrap();
    }
    for (slot, head) in (0..16_u64).zip(heads) {
        let at = GuestAddress(queue.avail_address.0 + 4 + slot * 2);
        driver.memory.write_obj(head.to_le(), at).unwrap();
    }
    let count = u16::try_from(heads.len()).unwrap();
    queue.avail.idx().store(count.to_le());
}
