// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of the balloon through a driver.

use vm_memory::Bytes as _;

use super::*;
use crate::devices::virtio::testing::{Buffer, Driver, START, wait_until};

const PAGES: u64 = START + 0x80_0000;

fn fill(driver: &Driver) {
    let map = driver.memory.map();
    map.write_slice(&[7; 1 << 16], GuestAddress(PAGES)).unwrap();
}

fn first_byte(driver: &Driver, page: u64) -> u8 {
    driver.load(PAGES + page * PAGE)
}

#[test]
fn only_inflated_pages_are_discarded() {
    let balloon = Box::new(Balloon::new().unwrap());
    let handle = balloon.handle();
    let mut driver = Driver::start(balloon, 0);
    fill(&driver);
    let pages = [1, 2, 3, 7].map(|page| u32::try_from(PAGES / PAGE + page).unwrap());
    let numbers = pages.into_iter().chain([u32::MAX, 0]);

    driver.request(0, &[Buffer::Out(numbers.flat_map(u32::to_le_bytes).collect())]);

    let left: Vec<u8> = (0..9).map(|page| first_byte(&driver, page)).collect();
    assert_eq!(left, [7, 0, 0, 0, 7, 7, 7, 0, 7]);
    assert_eq!(handle.inflated(), Bytes(4 * PAGE));
}

#[test]
fn reported_pages_are_discarded() {
    let balloon = Box::new(Balloon::new().unwrap());
    let handle = balloon.handle();
    let mut driver = Driver::start(balloon, feature_bit(F_REPORTING));
    fill(&driver);
    driver.add(2, &[Buffer::In(1 << 15)]);
    driver.store(driver.queues[2].desc_table, PAGES);

    driver.notify(2);
    driver.wait_used(2);

    assert_eq!((first_byte(&driver, 0), first_byte(&driver, 8)), (0, 7));
    assert_eq!(handle.reported(), Bytes(1 << 15));
}

#[test]
fn target_and_actual_size_are_in_the_configuration_space() {
    let balloon = Box::new(Balloon::new().unwrap());
    let handle = balloon.handle();
    let mut driver = Driver::start(balloon, 0);

    handle.set_target(Bytes(10 * PAGE));
    let target = driver.get(0x100);
    driver.set(0x104, 9);

    assert_eq!((target, driver.get(0x60)), (10, 2));
    assert_eq!(handle.actual(), Bytes(9 * PAGE));
}

#[test]
fn statistics_arrive_after_a_request() {
    let balloon = Box::new(Balloon::new().unwrap());
    let handle = balloon.handle();
    let mut driver = Driver::start(balloon, feature_bit(F_STATS));
    let entry = |tag: u16, value: u64| [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat();

    driver.add(2, &[Buffer::Out([entry(4, 1000), entry(5, 2000)].concat())]);
    driver.notify(2);
    wait_until("statistics", || !handle.0.statistics.lock().is_empty());
    let statistics = handle.statistics();

    assert_eq!(driver.wait_used(2), 0);
    assert_eq!(statistics, [(4, 1000), (5, 2000)]);
}
