// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use std::{env, sync::mpsc, thread};

use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{CpuSet, sched_getaffinity},
};

use super::*;
use crate::{
    affinity::{first_cpu, pin_thread},
    devices::{
        DeviceState, MmioDevice,
        virtio::{
            DeviceProperties, VirtioDevice,
            rng::Rng,
            testing::{
                Buffer, Driver, EVENT_IDX, MEMORY_SIZE, MEMORY_START, VERSION_1,
                child_test_command, wait_until,
            },
        },
    },
    memory::PageSet,
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
    // The interrupt follows the answer.
    wait_until("the interrupt", || driver.irq.read().is_ok_and(|count| count > 0));
    assert_eq!(driver.read_register(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 1);
    assert!(driver.write_register(reg::VIRTIO_MMIO_INTERRUPT_ACK, 1));
    assert_eq!(driver.read_register(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 0);

    driver.write_register(reg::VIRTIO_MMIO_STATUS, 0);

    assert_eq!(driver.read_register(reg::VIRTIO_MMIO_STATUS), 0);
    assert_eq!(driver.read_register(reg::VIRTIO_MMIO_QUEUE_READY), 0);
    driver.activate(0);
    check_device(&mut driver);
}

/// Entropy device that sends the CPUs of its thread.
struct DeviceOnCpus(mpsc::Sender<CpuSet>);

impl VirtioDevice for DeviceOnCpus {
    fn properties(&self) -> DeviceProperties {
        Rng.properties()
    }

    fn process_queue(&mut self, _: usize, _: &mut Queue) -> Result<(), DeviceError> {
        self.0.send(sched_getaffinity(None).unwrap()).unwrap();
        Ok(())
    }
}

#[test]
fn a_device_that_a_pinned_vcpu_activates_runs_on_all_cpus() {
    let all = sched_getaffinity(None).unwrap();
    let cpu = first_cpu();
    let (sender, cpus) = mpsc::channel();

    let vcpu = thread::spawn(move || {
        pin_thread(cpu).unwrap();
        let mut driver = Driver::start(Box::new(DeviceOnCpus(sender)), 0);
        driver.notify(0);
        cpus.recv().unwrap()
    });

    assert_eq!(vcpu.join().unwrap(), all);
}

#[test]
fn buffers_that_a_device_writes_and_its_used_rings_are_logged() {
    let mut driver = Driver::start(Box::new(Rng), 0);
    let ram = Arc::clone(&driver.memory.regions()[0]);
    let logged_pages = || {
        let mut pages = PageSet::default();
        pages.add(&ram.take_device_writes());
        let pages = pages.parts(1, MEMORY_SIZE).into_iter().flatten();
        pages.map(|page| MEMORY_START + page * 4096).collect::<Vec<_>>()
    };
    driver.request(0, &[Buffer::In(16)]);
    assert!(logged_pages().is_empty());

    ram.log_device_writes();
    driver.activate(0);
    let used_ring = driver.queues[0].used_ring;
    assert_eq!(logged_pages(), [used_ring]);
    let buffers = driver.add_request(0, &[Buffer::In(4097)]);
    driver.notify(0);
    driver.wait_used(0);

    let first = buffers[0] / 4096 * 4096;
    assert_eq!(logged_pages(), [first, first + 4096]);
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

#[test]
fn a_suspended_device_continues_in_its_process_and_in_another_one() {
    for features in [0, EVENT_IDX] {
        let mut driver = Driver::start(Box::new(Rng), features);
        for length in 1..20 {
            driver.request(0, &[Buffer::In(length)]);
        }
        let _ = driver.irq.read();

        let state = driver.transport.suspend().unwrap().unwrap();
        // The guest has added this request before it was paused, and the device has not seen it.
        driver.add_request(0, &[Buffer::In(8)]);
        driver.notify(0);
        assert!(!driver.has_used(0));

        driver.transport.resume();
        assert_eq!(driver.wait_used(0), 8);
        let _ = driver.transport.suspend().unwrap();
        let _ = driver.irq.read();

        // The state is of an earlier moment, so the driver's is, too.
        driver.queues[0].next_used -= 1;
        let used = driver.queues[0].used_ring + 2;
        let count: u16 = driver.load(used);
        driver.store(used, count - 1);
        driver.replace_device(Box::new(Rng), &state).unwrap();
        assert_eq!(driver.read_register(reg::VIRTIO_MMIO_STATUS), 15);
        driver.transport.resume();
        assert_eq!(driver.wait_used(0), 8);
        assert!(driver.irq.read().unwrap() > 0, "the interrupt is raised again");
        check_device(&mut driver);
    }
}

#[test]
fn a_device_that_failed_stays_so_until_its_reset() {
    let mut driver = Driver::start(Box::new(Rng), 0);
    driver.store(driver.queues[0].avail_ring + 2, 1_u16);
    driver.store(driver.queues[0].avail_ring + 4, 0xffff_u16);
    driver.notify(0);
    driver.wait_needs_reset();

    let state = driver.transport.suspend().unwrap().unwrap();
    driver.replace_device(Box::new(Rng), &state).unwrap();
    let _ = driver.irq.read();
    driver.transport.resume();

    assert!(driver.irq.read().is_ok(), "the interrupt is raised again");
    driver.wait_needs_reset();
    driver.activate(0);
    check_device(&mut driver);
}

#[test]
fn a_state_that_does_not_fit_is_refused() {
    let mut driver = Driver::start(Box::new(Rng), 0);
    let state = driver.transport.suspend().unwrap().unwrap();
    let text = serde_json::to_string(&state).unwrap();

    for (change, to, expected) in [
        ("\"device_type\":4", "\"device_type\":2", "another type"),
        ("\"driver_features\":", "\"driver_features\":1", "does not offer"),
        ("\"config\":[]", "\"config\":[1]", "another size"),
    ] {
        assert!(text.contains(change), "{text}");
        let state: DeviceState = serde_json::from_str(&text.replace(change, to)).unwrap();
        let error = driver.replace_device(Box::new(Rng), &state).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    // The activation checks the places of queues as those of a driver.
    let ring = format!("\"used_ring\":{}", driver.queues[0].used_ring);
    let state = serde_json::from_str(&text.replace(&ring, "\"used_ring\":8")).unwrap();
    driver.replace_device(Box::new(Rng), &state).unwrap();
    driver.transport.resume();
    driver.wait_needs_reset();
}

#[test]
fn a_device_whose_thread_cannot_start_waits_for_a_reset() {
    const CHILD_VARIABLE: &str = "GRANULE_TEST_WITHOUT_FILES";
    if env::var_os(CHILD_VARIABLE).is_none() {
        let mut child = child_test_command(concat!(
            "devices::virtio::transport::tests::",
            "a_device_whose_thread_cannot_start_waits_for_a_reset"
        ));
        let output = child.env(CHILD_VARIABLE, "").output().unwrap();
        return assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
    let mut driver = Driver::new(Box::new(Rng));
    let limit = getrlimit(Resource::Nofile);

    setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).unwrap();
    driver.activate(0);
    setrlimit(Resource::Nofile, limit).unwrap();

    driver.wait_needs_reset();
    driver.activate(0);
    check_device(&mut driver);
}
