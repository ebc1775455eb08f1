// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The registers, by a well-meaning driver, by a wrong one, and by one that writes anything
//! anywhere.

use parking_lot::Mutex;
use proptest::prelude::*;
use vm_memory::Bytes as _;

use super::{
    super::{DeviceError, Queue},
    *,
};
use crate::devices::virtio::{
    balloon::Balloon,
    block::{Block, Disk},
    console::Console,
    net::{Net, mac_for},
    rng::Rng,
    testing::{Buffer, Driver, EVENT_IDX, SIZE, START, VERSION_1, memory},
};

fn rng() -> Box<dyn VirtioDevice> {
    Box::new(Rng::default())
}

/// The device gives 16 bytes, which are not all zeros.
fn works(driver: &mut Driver<'_>) {
    let (answers, written) = driver.ask(0, &[Buffer::In(16)]);
    assert_eq!(written, 16);
    assert_ne!(answers, [[0; 16]]);
}

#[test]
fn a_driver_finds_sets_up_and_uses_a_device() {
    let memory = memory();
    let mut driver = Driver::find(&memory, rng());
    let identity = [0, 4, 8].map(|register| driver.get(register));
    assert_eq!(identity, [0x7472_6976, 2, 4]);
    assert_ne!(driver.offered() & VERSION_1, 0);

    driver.set_up(EVENT_IDX);

    works(&mut driver);
    assert_eq!(driver.get(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 1);
    assert!(driver.irq.read().unwrap() > 0);
    driver.set(reg::VIRTIO_MMIO_INTERRUPT_ACK, 1);
    assert_eq!(driver.get(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 0);
    assert_eq!(driver.transport.refused(), 0);
}

#[test]
fn a_notification_may_come_by_an_event() {
    let memory = memory();
    let mut driver = Driver::start(&memory, rng(), 0);
    let notifiers: Vec<_> = driver.transport.notifiers().collect();
    assert_eq!(
        (notifiers.len(), notifiers[0].offset, notifiers[0].value),
        (1, 0x50, 0)
    );

    driver.put(0, &[Buffer::In(8)]);
    notifiers[0].event.write(1).unwrap();

    assert_eq!(driver.wait(0), 8);
}

/// Two queues, the first of which somebody else serves.
struct Half {
    config: ConfigSpace,
    taken: Arc<Mutex<Option<Queue>>>,
}

impl VirtioDevice for Half {
    fn device_type(&self) -> u32 {
        99
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &[16, 16]
    }

    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn activate(&mut self, _: u64, queues: &mut Queues) -> Result<(), DeviceError> {
        *self.taken.lock() = queues.take(0);
        Ok(())
    }

    fn process_queue(&mut self, queue: usize, queues: &mut Queues) -> Result<(), DeviceError> {
        let ring = queues.get(queue).unwrap();
        ring.drain(|_, _| Ok(0))
    }

    fn reset(&mut self) {
        *self.taken.lock() = None;
    }
}

#[test]
fn a_queue_that_somebody_else_serves_is_left_alone() {
    let (memory, taken) = (memory(), Arc::default());
    let device = Half {
        config: ConfigSpace::new(Vec::new(), 0..0),
        taken: Arc::clone(&taken),
    };
    let mut driver = Driver::start(&memory, Box::new(device), EVENT_IDX);

    driver.put(0, &[Buffer::In(8)]);
    driver.kick(0);
    driver.ask(1, &[Buffer::In(8)]);

    assert!(!driver.has_answer(0));
    let ring = taken.lock().take().unwrap();
    // The very event that the notification writes, not read by anyone.
    assert_eq!(ring.kick.read().unwrap(), 1);
    let notifier = driver.transport.notifiers().next().unwrap();
    assert!(Arc::ptr_eq(&ring.kick, &notifier.event));
}

#[test]
fn many_requests_in_a_row_come_back_in_order() {
    let memory = memory();
    for features in [0, EVENT_IDX] {
        let mut driver = Driver::start(&memory, rng(), features);
        for length in 1..200 {
            let (_, written) = driver.ask(0, &[Buffer::In(length)]);
            assert_eq!(written, length);
        }
    }
}

#[test]
fn a_reset_brings_the_device_back() {
    let memory = memory();
    let mut driver = Driver::start(&memory, rng(), EVENT_IDX);
    works(&mut driver);

    driver.set(reg::VIRTIO_MMIO_STATUS, 0);

    assert_eq!(driver.get(reg::VIRTIO_MMIO_STATUS), 0);
    assert_eq!(driver.get(reg::VIRTIO_MMIO_QUEUE_READY), 0);
    driver.set_up(0);
    works(&mut driver);
}

#[test]
fn features_that_were_not_offered_are_not_accepted() {
    let memory = memory();
    let mut driver = Driver::find(&memory, rng());
    for features in [0, VERSION_1 | 1] {
        driver.set(reg::VIRTIO_MMIO_STATUS, 0);
        driver.set(reg::VIRTIO_MMIO_STATUS, 1);
        driver.set(reg::VIRTIO_MMIO_STATUS, 3);
        driver.accept(features);

        driver.set(reg::VIRTIO_MMIO_STATUS, 11);

        assert_eq!(driver.get(reg::VIRTIO_MMIO_STATUS), 3);
    }
}

#[test]
fn queues_that_lie_nowhere_need_a_reset() {
    let memory = memory();
    for (register, value) in [
        (reg::VIRTIO_MMIO_QUEUE_DESC_HIGH, 7),
        (reg::VIRTIO_MMIO_QUEUE_USED_LOW, 2),
        (reg::VIRTIO_MMIO_QUEUE_NUM, 3),
        (reg::VIRTIO_MMIO_QUEUE_NUM, 0x1_0010),
        (reg::VIRTIO_MMIO_QUEUE_NUM, 0),
    ] {
        let mut driver = Driver::find(&memory, rng());
        for status in [1, 3] {
            driver.set(reg::VIRTIO_MMIO_STATUS, status);
        }
        driver.accept(VERSION_1);
        driver.set(reg::VIRTIO_MMIO_STATUS, 11);
        driver.set(register, value);
        driver.set(reg::VIRTIO_MMIO_QUEUE_READY, 1);

        driver.set(reg::VIRTIO_MMIO_STATUS, 15);

        assert_eq!(driver.get(reg::VIRTIO_MMIO_STATUS), 15 | 64);
        assert_eq!(driver.get(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 2);
        driver.set_up(0);
        works(&mut driver);
    }
}

#[test]
fn requests_that_lie_nowhere_need_a_reset() {
    let memory = memory();
    let mut driver = Driver::start(&memory, rng(), 0);
    driver.put(0, &[Buffer::In(16)]);
    let far = START + SIZE - 8;
    let table = driver.queues[0].desc_table_addr();
    driver.memory.write_obj(far, table).unwrap();

    driver.kick(0);
    driver.wait_for_failure();

    assert!(!driver.has_answer(0));
    driver.set_up(0);
    works(&mut driver);
}

#[test]
fn a_ring_that_is_ahead_of_itself_needs_a_reset() {
    let memory = memory();
    let mut driver = Driver::start(&memory, rng(), 0);
    driver.queues[0].avail().idx().store(17_u16.to_le());

    driver.kick(0);
    driver.wait_for_failure();

    driver.set_up(0);
    works(&mut driver);
}

#[test]
fn writes_at_the_wrong_time_or_of_the_wrong_size_are_refused_and_counted() {
    let memory = memory();
    let mut driver = Driver::start(&memory, rng(), 0);
    let refused = driver.transport.refused();

    driver.set(reg::VIRTIO_MMIO_QUEUE_DESC_LOW, 0);
    driver.set(reg::VIRTIO_MMIO_DRIVER_FEATURES, 0);
    driver.set(reg::VIRTIO_MMIO_STATUS, 1);
    driver.set(reg::VIRTIO_MMIO_QUEUE_NOTIFY, 1);
    driver.set(reg::VIRTIO_MMIO_CONFIG, 1);
    driver.set(reg::VIRTIO_MMIO_MAGIC_VALUE, 1);
    driver.transport.write(0x70, &[0; 2]);
    driver.transport.write(0x1000, &[0; 4]);
    let mut data = [9; 8];
    driver.transport.read(0, &mut data);

    assert_eq!(driver.transport.refused() - refused, 9);
    assert_eq!(data, [0; 8]);
    works(&mut driver);
}

/// Every kind of device, its other ends kept alive in the second part.
fn devices() -> (Vec<Box<dyn VirtioDevice>>, impl Drop) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, vec![7; 1 << 16]).unwrap();
    let disk = Disk::open(&path, false).unwrap();
    let (tap, host) = crate::devices::virtio::net::Tap::pair();
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
    (
        devices,
        Box::new((folder, host, keyboard)) as Box<dyn std::any::Any>,
    )
}

/// Mostly registers and values that mean something, so that the deeper states are reached.
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
    fn random_writes_to_any_register_do_no_harm(stores in stores()) {
        let memory = memory();
        let (devices, _others) = devices();
        for device in devices {
            let mut driver = Driver::find(&memory, device);
            for (offset, value, size) in &stores {
                driver.transport.write(*offset, &value.to_le_bytes()[..*size]);
                driver.transport.read(*offset, &mut [0; 8][..*size]);
            }
            driver.set_up(0);
            prop_assert_eq!(driver.get(reg::VIRTIO_MMIO_STATUS) & 15, 15);
        }
    }

    #[test]
    fn random_bytes_in_any_queue_do_no_harm(
        seed in prop::collection::vec(any::<u8>(), 64..512),
        heads in prop::collection::vec(0..20_u16, 1..16),
        features in any::<u32>(),
    ) {
        let memory = memory();
        let (devices, _others) = devices();
        for device in devices {
            let mut driver = Driver::find(&memory, device);
            let features = driver.offered() & u64::from(features);
            driver.set_up(features);
            for index in 0..driver.queues.len() {
                scribble(&driver, index, &seed, &heads);
                driver.kick(index);
            }
            // Whatever state it is in, a reset and an orderly start are possible.
            driver.set_up(features);
            prop_assert_eq!(driver.get(reg::VIRTIO_MMIO_STATUS) & 15, 15);
        }
    }
}

/// Fills a queue's descriptors with addresses near the ends of memory, odd lengths and flags, and
/// offers some of them.
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
        let at = vm_memory::GuestAddress(queue.desc_table_addr().0 + slot * 16);
        driver.memory.write_obj(address, at).unwrap();
        let at = vm_memory::GuestAddress(at.0 + 8);
        driver.memory.write_obj(length, at).unwrap();
        let at = vm_memory::GuestAddress(at.0 + 4);
        driver
            .memory
            .write_obj([bytes[0] % 8, 0, bytes[0] % 17, 0], at)
            .unwrap();
    }
    for (slot, head) in (0..16_u64).zip(heads) {
        let at = vm_memory::GuestAddress(queue.avail_addr().0 + 4 + slot * 2);
        driver.memory.write_obj(head.to_le(), at).unwrap();
    }
    let count = u16::try_from(heads.len()).unwrap();
    queue.avail().idx().store(count.to_le());
}
