// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Every backing, for real, on the machine the tests run on. What it does not offer is skipped
//! aloud.

use vm_memory::Bytes as _;

use super::*;

const GUEST: GuestAddress = GuestAddress(0xffff_c000_0000);

/// The memory, or `None` with the reason printed where this machine cannot give it.
fn ram(name: &str, pages: u64, prefault: bool) -> Option<Arc<GuestRam>> {
    let host = HostPages::of_this_host().unwrap();
    let made = Plan::new(name.parse().unwrap(), &host).and_then(|plan| {
        let size = Bytes(plan.page().0 * pages);
        GuestRam::new(plan, &host, GUEST, size, prefault)
    });
    match made {
        Ok(ram) => Some(ram),
        Err(
            error @ (MemoryError::PoolShort { .. }
            | MemoryError::NoHugetlb { .. }
            | MemoryError::ThpOff),
        ) => {
            granule_types::testing::skip(format_args!("{name}: {error}"));
            None
        }
        Err(error) => panic!("{name}: {error}: {:?}", std::error::Error::source(&error)),
    }
}

fn resident(ram: &GuestRam) -> u64 {
    ram.obtained().unwrap().resident.values().sum()
}

fn goes_through_its_life(name: &str, pages: u64) {
    let Some(ram) = ram(name, pages, false) else {
        return;
    };
    let memory = GuestMemory::new(vec![Arc::clone(&ram)]).unwrap();
    let page = ram.plan().page().0;
    assert_eq!(ram.host_address() % page, GUEST.0 % page, "congruent");
    assert_eq!(resident(&ram), 0, "nothing is populated unasked");

    for at in (0..ram.size().0).step_by(usize::try_from(page).unwrap()) {
        memory
            .map()
            .write_obj(at | 1, GuestAddress(GUEST.0 + at))
            .unwrap();
    }
    let obtained = ram.obtained().unwrap();
    assert_eq!(obtained.resident, BTreeMap::from([(page, ram.size().0)]));

    ram.drop_backing().unwrap();
    assert_eq!(resident(&ram), 0, "dropped");

    ram.restore_backing().unwrap();
    let value: u64 = memory.map().read_obj(GuestAddress(GUEST.0 + page)).unwrap();
    assert_eq!(value, 0, "contents are gone");
}

fn is_whole_after_prefault(name: &str, pages: u64) {
    let Some(ram) = ram(name, pages, true) else {
        return;
    };
    let whole = BTreeMap::from([(ram.plan().page().0, ram.size().0)]);
    assert_eq!(ram.obtained().unwrap().resident, whole);

    ram.drop_backing().unwrap();
    assert_eq!(resident(&ram), 0);

    ram.restore_backing().unwrap();
    assert_eq!(ram.obtained().unwrap().resident, whole);
}

#[test]
fn anonymous_memory() {
    goes_through_its_life("anonymous", 1024);
    is_whole_after_prefault("anonymous", 1024);
}

#[test]
fn transparent_huge_pages() {
    goes_through_its_life("anonymous_thp", 4);
    is_whole_after_prefault("anonymous_thp", 4);
}

#[test]
fn shared_memory() {
    goes_through_its_life("shmem", 1024);
    is_whole_after_prefault("shmem", 1024);
}

// One test, so that no two draw from the pool at once.
#[test]
fn hugetlb_pages() {
    for name in [
        "anonymous_hugetlb",
        "anonymous_hugetlb_1gb",
        "shared_hugetlb",
    ] {
        goes_through_its_life(name, 2);
        is_whole_after_prefault(name, 2);
    }
}

#[test]
fn blocks_are_one_piece_of_physical_memory() {
    let Some(ram) = ram("anonymous_thp", 3, true) else {
        return;
    };
    let range = ram.host_address()..ram.host_address() + ram.size().0;

    match BlockBacking::of_range(range, ram.plan().page(), ram.plan().base_page()) {
        Some(blocks) => assert_eq!((blocks.whole, blocks.broken), (3, 0)),
        None => granule_types::testing::skip("this process may not read physical addresses"),
    }
}

#[test]
fn small_pages_behind_huge_ones_are_told() {
    let Some(ram) = ram("anonymous_thp", 2, true) else {
        return;
    };
    let page = usize::try_from(ram.plan().base_page().0).unwrap();

    // SAFETY: the first small page of the mapping, which nobody else uses; its contents may go.
    let result = unsafe { libc::madvise(ram.mapping.as_ptr().cast(), page, libc::MADV_DONTNEED) };

    assert_eq!(result, 0);
    let error = ram.obtained().unwrap_err();
    assert!(error.to_string().contains("are in small pages"), "{error}");
}

#[test]
fn pieces_that_overlap_are_refused() {
    let (Some(one), Some(other)) = (ram("anonymous", 2, false), ram("anonymous", 2, false)) else {
        return;
    };

    let error = GuestMemory::new(vec![one, other]).unwrap_err();

    assert!(matches!(error, MemoryError::Range { .. }), "{error}");
}

#[test]
fn a_size_that_is_no_multiple_of_the_page_is_refused() {
    let host = HostPages::of_this_host().unwrap();
    let plan = Plan::new("anonymous".parse().unwrap(), &host).unwrap();

    let error = GuestRam::new(plan, &host, GUEST, Bytes(1), false).unwrap_err();

    assert!(matches!(error, MemoryError::Size { .. }), "{error}");
}

#[test]
fn what_was_broken_up_is_put_together_again() {
    let Some(ram) = ram("anonymous_thp", 2, true) else {
        return;
    };
    let memory = GuestMemory::new(vec![Arc::clone(&ram)]).unwrap();
    let (huge, base) = (ram.plan().page(), ram.plan().base_page());
    assert_eq!(memory.discard(GUEST, base), base);
    let broken = ram.resident().unwrap().resident;

    let done = match ram.collapse() {
        Err(error @ MemoryError::NoCollapse) => return granule_types::testing::skip(error),
        done => done.unwrap().resident,
    };

    let small = huge.0 - base.0;
    assert_eq!(broken, BTreeMap::from([(base.0, small), (huge.0, huge.0)]));
    assert_eq!(done, BTreeMap::from([(huge.0, 2 * huge.0)]));
}

#[test]
fn only_thp_is_put_together() {
    let ram = ram("anonymous", 4, true).unwrap();

    let error = ram.collapse().unwrap_err();

    assert!(error.to_string().contains("anonymous_thp"), "{error}");
}
