// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of memory that is filled on demand.

use std::{fs::File, io::Write as _, iter, time::Duration};

use granule_types::{record::EventCounts, testing::skip, units::GuestAddress};
use vm_memory::Bytes as _;

use super::{memory_file::MemoryFile, *};
use crate::memory::{BackingPlan, HostPages, PageMap, RamOptions, changes::testing::changes_file};

pub(super) const START: u64 = 0x4000_0000;
pub(super) const SIZE: Bytes = Bytes::mib(8);

pub(super) fn memory(backing: &str) -> Result<GuestMemory, MemoryError> {
    let host = HostPages::of_this_host().unwrap();
    let plan = BackingPlan::new(backing.parse().unwrap(), &host)?;
    let ram = GuestRam::new(plan, &host, GuestAddress(START), SIZE, RamOptions::default())?;
    GuestMemory::new(vec![ram])
}

fn memory_or_skip(backing: &str) -> Option<GuestMemory> {
    memory(backing).map_err(|error| skip(format_args!("{backing}: {error}"))).ok()
}

/// Returns an image with a word at every third page, and faults, if the host has them.
pub(super) fn image_and_faults() -> Option<(Arc<File>, UserFaults)> {
    let faults = match UserFaults::open() {
        Ok(faults) => faults,
        Err(error) => {
            skip(format_args!("userfaultfd: {error}"));
            return None;
        }
    };
    let saved = memory("anonymous").unwrap();
    for page in (0..SIZE.0 / 4096).step_by(3) {
        saved.map().write_obj(page + 1, GuestAddress(START + page * 4096)).unwrap();
    }
    let file = tempfile::tempfile().unwrap();
    image::save(&saved, &PageMap::open().unwrap(), &file, &|| Ok(())).unwrap();
    Some((Arc::new(file), faults))
}

pub(super) fn fail(error: io::Error) {
    panic!("{error}");
}

/// Returns what fills memory, without its threads.
pub(super) fn source(
    image: Arc<File>,
    faults: UserFaults,
    memory: &GuestMemory,
    order: Order,
) -> Source {
    Source {
        files: memory_files(&faults, memory).unwrap(),
        faults,
        image: image.into(),
        memory: memory.clone(),
        order,
        unit: CLUSTER,
        recorded: None,
        moved: Mutex::default(),
        fill_times: Arc::default(),
    }
}

/// Returns what fills shared base pages in their place, as it does hugetlb pages, which most hosts of unit
/// tests lack. `unit` is 0 if accesses alone fill them.
pub(super) fn source_of_file(image: Arc<File>, faults: UserFaults, unit: u64) -> Option<Source> {
    if !faults.can_map() {
        skip("pages of memory files cannot be mapped: that takes Linux 5.18");
        return None;
    }
    let memory = memory("shmem").unwrap();
    let file = MemoryFile::of(&memory.regions()[0]).unwrap().unwrap();
    let recorded = (unit == 0).then(Mutex::default);
    let source = source(image, faults, &memory, Order::new());
    Some(Source { files: MemoryFiles::from([(0, file)]), unit, recorded, ..source })
}

pub(super) fn check_contents(memory: &GuestMemory, pages: impl Iterator<Item = u64>) {
    for page in pages {
        let word: u64 = memory.map().read_obj(GuestAddress(START + page * 4096)).unwrap();
        let expected = if page.is_multiple_of(3) { page + 1 } else { 0 };
        assert_eq!(word, expected, "{page}");
    }
}

fn resident(memory: &GuestMemory) -> u64 {
    memory.regions()[0].resident_pages().unwrap().resident_bytes.values().sum()
}

#[test]
fn accesses_fill_their_pages_only_and_are_recorded() {
    for backing in ["anonymous", "shmem"] {
        let Some((file, faults)) = image_and_faults() else { return };
        let memory = memory(backing).unwrap();

        let demand = OnDemand::start(faults, &memory, file.into(), &[], false, fail).unwrap();
        check_contents(&memory, [2047, 3, 999, 4, 3].into_iter());
        // A page that the balloon returns is filled and recorded again.
        assert_eq!(memory.discard(GuestAddress(START + 3 * 4096), Bytes(4096)), Bytes(4096));
        check_contents(&memory, iter::once(3));

        let pages = [3..5, 999..1000, 2047..2048];
        assert_eq!(demand.recorded(), pages.map(|pages| pages.start * 4096..pages.end * 4096));
        assert_eq!(resident(&memory), 4 * 4096);
        let (times, mut counts) = (demand.fill_times(), EventCounts::new());
        // The handler ends after it has counted the last fault.
        drop(demand);
        times.add_to(&mut counts, "fill");
        assert_eq!(counts["fill.count"], 5);
    }
}

#[test]
fn the_order_is_filled_before_the_first_access() {
    let Some((file, faults)) = image_and_faults() else { return };
    let memory = memory("anonymous").unwrap();

    let order = [5 * CLUSTER..6 * CLUSTER, 9 * CLUSTER..9 * CLUSTER + 4096];
    let demand = OnDemand::start(faults, &memory, file.into(), &order, false, fail).unwrap();

    assert_eq!(resident(&memory), CLUSTER + 4096);
    check_contents(&memory, (5 * 16..6 * 16).chain([9 * 16]));
    assert!(demand.recorded().is_empty());
}

#[test]
fn all_data_is_filled_beside_accesses_on_each_backing() {
    for backing in
        ["anonymous", "anonymous_thp", "anonymous_hugetlb_2mb", "shmem", "shared_hugetlb"]
    {
        let Some((file, faults)) = image_and_faults() else { return };
        let Some(memory) = memory_or_skip(backing) else { continue };

        let demand = OnDemand::start(faults, &memory, file.into(), &[], true, fail).unwrap();
        std::thread::scope(|scope| {
            for first in 0..4 {
                let memory = &memory;
                scope.spawn(move || check_contents(memory, (first..2048).rev().step_by(4)));
            }
        });
        // Written pages are not filled again.
        memory.map().write_obj(7_u64, GuestAddress(START)).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while resident(&memory) < SIZE.0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(demand.recorded().is_empty(), "{backing}");
        drop(demand);

        check_contents(&memory, 1..2048);
        let word: u64 = memory.map().read_obj(GuestAddress(START)).unwrap();
        assert_eq!(word, 7, "{backing}");
    }
}

#[test]
fn blocks_without_pages_of_the_order_are_filled_by_huge_pages() {
    let Some((file, faults)) = image_and_faults() else { return };
    if !faults.can_move() {
        return skip("pages cannot be moved: that takes Linux 6.8");
    }
    let Some(memory) = memory_or_skip("anonymous_thp") else { return };
    let ram = &memory.regions()[0];
    faults.register(&ram.host_range()).unwrap();
    let ordered = (3 << 20)..(3 << 20) + 4096;
    let source = source(file, faults, &memory, vec![ordered]);

    source.fill_order().unwrap();
    let mut buffer = Vec::new();
    let filled = [0, 3 << 20, (3 << 20) + CLUSTER, 4 << 20].map(|offset| {
        let part = source.part_of(0, ram, offset);
        source.fill(0, ram, part.clone(), &mut buffer).unwrap();
        part
    });

    let sizes = filled.map(|part| part.end - part.start);
    assert_eq!(sizes, [2 << 20, CLUSTER, CLUSTER, 2 << 20]);
    let resident = ram.resident_pages().unwrap().resident_bytes;
    assert_eq!(resident.get(&(2 << 20)), Some(&(4 << 20)), "{resident:?}");
    check_contents(&memory, (0..512).chain(768..800).chain(1024..1536));
}

#[test]
fn a_block_with_a_page_is_filled_around_it() {
    let Some((file, faults)) = image_and_faults() else { return };
    let Some(memory) = memory_or_skip("anonymous_thp") else { return };
    let ram = &memory.regions()[0];
    let page = HostVirtAddr(ram.host_address().0 + 7 * 4096);
    faults.register(&ram.host_range()).unwrap();
    let source = source(file, faults, &memory, Order::new());

    source.faults.fill(page, &[9; 4096]).unwrap();
    source.move_block(0, ram, 0, &new_page(ram).unwrap()).unwrap();

    let byte = |page: u64| memory.map().read_obj::<u8>(GuestAddress(START + page * 4096)).unwrap();
    assert_eq!([0, 3, 6, 7, 9, 510].map(byte), [1, 4, 7, 9, 10, 255]);
}

#[test]
fn a_page_is_filled_with_the_changes_in_it() {
    for backing in ["anonymous", "anonymous_hugetlb_2mb"] {
        let Some((file, faults)) = image_and_faults() else { return };
        let Some(memory) = memory_or_skip(backing) else { continue };
        let mut image = LayeredImage::from(file);
        for pages in [&[(3, 0), (4, 9), (513, 8)][..], &[(4, 10)]] {
            let (changes, data) = changes_file(pages);
            image.add(Arc::new(changes), data, SIZE).unwrap();
        }

        let demand = OnDemand::start(faults, &memory, image, &[], true, fail).unwrap();

        let byte =
            |page: u64| memory.map().read_obj::<u8>(GuestAddress(START + page * 4096)).unwrap();
        let bytes = [0, 1, 3, 4, 6, 513].map(byte);
        assert_eq!(bytes, [1, 0, 0, 10, 7, 8], "{backing}");
        drop(demand);
    }
}

#[test]
fn regions_of_any_size_are_filled() {
    let Ok(faults) = UserFaults::open() else {
        return skip("userfaultfd is not available");
    };
    let host = HostPages::of_this_host().unwrap();
    let plan = BackingPlan::new("anonymous".parse().unwrap(), &host).unwrap();
    let regions = |pages: [u64; 2]| {
        let mut start = START;
        let rams = pages.map(|pages| {
            let (at, size) = (GuestAddress(start), Bytes(pages * 4096));
            start += size.0;
            GuestRam::new(plan.clone(), &host, at, size, RamOptions::default()).unwrap()
        });
        GuestMemory::new(rams.into()).unwrap()
    };
    let (saved, restored) = (regions([37, 50]), regions([37, 50]));
    for page in 0..87 {
        saved.map().write_obj(page + 1, GuestAddress(START + page * 4096)).unwrap();
    }
    let file = tempfile::tempfile().unwrap();
    image::save(&saved, &PageMap::open().unwrap(), &file, &|| Ok(())).unwrap();

    // The part is in both regions, and a file may have any ends.
    let order = [35 * 4096 + 512..38 * 4096 - 512, 86 * 4096..1 << 40];
    let demand =
        OnDemand::start(faults, &restored, Arc::new(file).into(), &order, false, fail).unwrap();

    for page in (0..87).rev() {
        let word: u64 = restored.map().read_obj(GuestAddress(START + page * 4096)).unwrap();
        assert_eq!(word, page + 1);
    }
    assert_eq!(demand.recorded(), [0..35 * 4096, 38 * 4096..86 * 4096]);
    assert!(demand.check_complete().unwrap_err().contains("without a new order=FILE"));
}

#[test]
fn memory_that_cannot_be_filled_is_incomplete_with_the_reason() {
    let Some((_, faults)) = image_and_faults() else { return };
    let memory = memory("anonymous").unwrap();
    let folder = tempfile::tempdir().unwrap();
    // The file has data, and cannot be read.
    let file = File::create(folder.path().join("memory")).unwrap();
    file.set_len(SIZE.0).unwrap();
    (&file).write_all(&[7; 4096]).unwrap();

    let demand = OnDemand::start(faults, &memory, Arc::new(file).into(), &[], true, fail).unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut reason = demand.check_complete().unwrap_err();
    while reason.contains("try again") && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
        reason = demand.check_complete().unwrap_err();
    }

    assert!(reason.contains("cannot be filled: Bad file descriptor"), "{reason}");
}
