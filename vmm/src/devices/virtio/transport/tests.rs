// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use super::*;
use crate::devices::{
    MmioDevice,
    virtio::{
        rng::Rng,
        testing::{Buffer, Driver, EVENT_IDX, MEMORY_SIZE, MEMORY_START, VERSION_1},
    },
};

/// Checks that the device returns 16 random bytes.
fn check_device(driver: &mut Driver) {
    let (answers, written) = driver.request(0, &[Buffer::In(16)]);
    assert_eq!(written, 16);
    assert_ne!(answers, [[0; 16]]);
}

#[test]
fn a_driver_finds_activates_uses_and_resets_a_device() {
    let mut driver = Driver::new(Box::new(Rng));
    let identity = [0, 4, 8].map(|register| driver.read_register(register));
    assert_eq!(identity, [0x7472_6976, 2, 4]);
    assert_ne!(driver.offered_features() & VERSION_1, 0);

    driver.activate(EVENT_IDX);

    check_device(&mut driver);
    assert_eq!(driver.read_register(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 1);
    assert!(driver.irq.read().unwrap() > 0);
    assert!(driver.write_register(reg::VIRTIO_MMIO_INTERRUPT_ACK, 1));
    assert_eq!(driver.read_register(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 0);

    driver.write_register(reg::VIRTIO_MMIO_STATUS, 0);

    assert_eq!(driver.read_register(reg::VIRTIO_MMIO_STATUS), 0);
    assert_eq!(driver.read_register(reg::VIRTIO_MMIO_QUEUE_READY), 0);
    driver.activate(0);
    check_device(&mut driver);
}

#[test]
fn a_queue_event_notifies_its_queue() {
    let mut driver = Driver::start(Box::new(Rng), 0);
    let [event] = driver.transport.queue_events() else { panic!("the device has one queue") };
    let event = Arc::clone(event);

    driver.add_request(0, &[Buffer::In(8)]);
    event.write(1).unwrap();

    assert_eq!(driver.wait_used(0), 8);
}

#[test]
fn consecutive_requests_complete_in_order() {
    for features in [0, EVENT_IDX] {
        let mut driver = Driver::start(Box::new(Rng), features);
        for length in 1..200 {
            let (_, written) = driver.request(0, &[Buffer::In(length)]);
            assert_eq!(written, length);
        }
    }
}

#[test]
fn features_that_are_not_offered_are_rejected() {
    let mut driver = Driver::new(Box::new(Rng));
    for features in [0, VERSION_1 | 1] {
        driver.negotiate(features);

        assert_eq!(driver.read_register(reg::VIRTIO_MMIO_STATUS), 3);
    }
}

#[test]
fn an_invalid_queue_configuration_needs_a_reset() {
    for (register, value) in [
        (reg::VIRTIO_MMIO_QUEUE_DESC_HIGH, 7),
        (reg::VIRTIO_MMIO_QUEUE_USED_LOW, 2),
        (reg::VIRTIO_MMIO_QUEUE_NUM, 3),
        (reg::VIRTIO_MMIO_QUEUE_NUM, 0x1_0010),
        (reg::VIRTIO_MMIO_QUEUE_NUM, 0),
    ] {
        let mut driver = Driver::new(Box::new(Rng));
        driver.negotiate(VERSION_1);
        driver.write_register(register, value);
        driver.write_register(reg::VIRTIO_MMIO_QUEUE_READY, 1);

        driver.write_register(reg::VIRTIO_MMIO_STATUS, 15);

        assert_eq!(driver.read_register(reg::VIRTIO_MMIO_STATUS), 15 | 64);
        assert_eq!(driver.read_register(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 2);
        driver.activate(0);
        check_device(&mut driver);
    }
}

#[test]
fn an_invalid_queue_entry_needs_a_reset() {
    for step in ["a buffer beyond memory", "an available index beyond the size"] {
        let mut driver = Driver::start(Box::new(Rng), 0);
        if step.starts_with("a buffer") {
            driver.add_request(0, &[Buffer::In(16)]);
            driver.store(driver.queues[0].desc_table, MEMORY_START + MEMORY_SIZE - 8);
        } else {
            driver.store(driver.queues[0].avail_ring + 2, 17_u16);
        }

        driver.notify(0);
        driver.wait_needs_reset();

        assert!(!driver.has_used(0), "{step}");
        driver.activate(0);
        check_device(&mut driver);
    }
}

#[test]
fn writes_out_of_order_or_of_a_wrong_size_are_refused() {
    let mut driver = Driver::start(Box::new(Rng), 0);

    for (register, value) in [
        (reg::VIRTIO_MMIO_QUEUE_DESC_LOW, 0),
        (reg::VIRTIO_MMIO_DRIVER_FEATURES, 0),
        (reg::VIRTIO_MMIO_STATUS, 1),
        (reg::VIRTIO_MMIO_QUEUE_NOTIFY, 1),
        (reg::VIRTIO_MMIO_CONFIG, 1),
        (reg::VIRTIO_MMIO_MAGIC_VALUE, 1),
        (0x1000, 0),
    ] {
        assert!(!driver.write_register(register, value), "{register:#x}");
    }
    assert!(!driver.transport.write(0x70, &[0; 2]));
    assert!(!driver.transport.read(0, &mut [9; 8]));

    check_device(&mut driver);
}
