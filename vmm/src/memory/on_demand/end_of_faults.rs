// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Test of memory that is filled beside accesses, and of the step that must be last: transparent huge pages
//! hide what is still missing, so faults end when all data is there.
//!
//! A child process, in which they end earlier, must lose data: the test would see it.

use std::{
    fs::File,
    thread,
    time::{Duration, Instant},
};

use granule_types::units::GuestAddress;
use vm_memory::Bytes as _;

use super::{
    tests::{SIZE, START, fail, image_and_faults, memory, source, source_of_file},
    *,
};
use crate::devices::virtio::testing::child_test_command;

const ROUNDS: u32 = 100;
const PAGES: u64 = SIZE.0 / 4096;
/// Distance of the word that the test writes to a page from the word of the image.
const WRITTEN: u64 = 8;
/// Environment variable of the child process: offset in the image from which on faults have ended.
const EARLY_END_VARIABLE: &str = "GRANULE_TEST_EARLY_END_OF_FAULTS";

impl Source {
    /// Ends the faults before the filler fills the part at an offset, if this process has to do so.
    pub(super) fn end_faults_early(&self, offset: u64) -> io::Result<()> {
        let end = std::env::var(EARLY_END_VARIABLE).ok().and_then(|end| end.parse::<u64>().ok());
        if end.is_some_and(|end| end <= offset) { self.end_faults(&|| true) } else { Ok(()) }
    }
}

/// Returns the word of the image in a page.
fn image_word(page: u64) -> u64 {
    if page.is_multiple_of(3) { page + 1 } else { 0 }
}

/// Returns the word of a page, and the word that the test writes to it.
fn words(memory: &GuestMemory, page: u64) -> [u64; 2] {
    let address = START + page * 4096;
    [address, address + WRITTEN].map(|at| memory.map().read_obj(GuestAddress(at)).unwrap())
}

/// Reads and writes each page by four threads while memory is filled, and reads all again at the end.
/// Returns the number of huge pages.
fn fill_beside_accesses(source: Source) -> u64 {
    let memory = source.memory.clone();
    let demand = OnDemand::fill_from(source, fail).unwrap();

    let read_and_write = |first: u64| {
        for page in (0..PAGES / 4).rev().map(|index| index * 4 + first) {
            assert_eq!(words(&memory, page), [image_word(page), 0], "page {page}");
            let address = GuestAddress(START + page * 4096 + WRITTEN);
            memory.map().write_obj(!page, address).unwrap();
        }
    };
    thread::scope(|scope| {
        for first in 0..4 {
            scope.spawn(move || read_and_write(first));
        }
    });
    let deadline = Instant::now() + Duration::from_secs(10);
    while let Err(reason) = demand.check_complete() {
        assert!(Instant::now() < deadline, "{reason}");
        thread::sleep(Duration::from_millis(1));
    }
    drop(demand);

    for page in 0..PAGES {
        assert_eq!(words(&memory, page), [image_word(page), !page], "page {page}");
    }
    let resident = memory.regions()[0].resident_pages().unwrap().resident_bytes;
    resident.get(&(2 << 20)).map_or(0, |bytes| bytes >> 21)
}

/// Returns what fills transparent huge pages; blocks with pages of an order are filled by small pages.
fn source_of_thp(image: &Arc<File>) -> Source {
    let memory = memory("anonymous_thp").unwrap();
    let order: Order = (0..SIZE.0).step_by(2 << 20).map(|start| start..start + 4096).collect();
    source(Arc::clone(image), UserFaults::open().unwrap(), &memory, order)
}

#[test]
fn a_memory_file_is_not_read_over_what_is_written_in_a_hundred_rounds() {
    let Some((image, _)) = image_and_faults() else { return };

    for _ in 0..ROUNDS {
        let faults = UserFaults::open().unwrap();
        let Some(source) = source_of_file(Arc::clone(&image), faults, CLUSTER) else { return };
        fill_beside_accesses(source);
    }
}

#[test]
fn huge_pages_hide_no_data_in_a_hundred_rounds_and_do_if_faults_end_early() {
    let Some((image, _)) = image_and_faults() else { return };

    let rounds = (0..ROUNDS).map(|_| fill_beside_accesses(source_of_thp(&image)));
    let huge_pages: u64 = rounds.sum();

    if std::env::var_os(EARLY_END_VARIABLE).is_some() {
        return;
    }
    println!("{ROUNDS} rounds, {huge_pages} huge pages");
    assert!(huge_pages > 0, "nothing was collapsed: that takes Linux 6.1 and free memory");
    for offset in [0, 20 * CLUSTER] {
        let child = child_test_command(
            "memory::on_demand::end_of_faults::\
             huge_pages_hide_no_data_in_a_hundred_rounds_and_do_if_faults_end_early",
        )
        .env(EARLY_END_VARIABLE, offset.to_string())
        .output()
        .unwrap();
        let text = String::from_utf8_lossy(&child.stderr);
        assert!(!child.status.success(), "no data is lost from {offset:#x} on");
        assert!(text.contains("left: [0, "), "{text}");
    }
}
