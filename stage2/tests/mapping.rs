// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Single maps and the mapper: every granule and IPA width, refused addresses, attributes, devices,
//! memcaches and replaced tables. The Contiguous bit: pages that fill a run have it, and a change
//! to one page first removes it from the run. `known_bugs.rs` and `mutation.rs` test that the
//! checker reports a change that keeps it.
#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::sync::Mutex;

use granule_stage2::{
    Access, CmoPlacement, Features, Ipa, MapError, MapRequest, Memcache, NoMaintenance, PhysAddr,
    Policy, Stage2, UnmapBatching,
    check::{Action, Checker, Recorder},
    descriptor::{Attributes, Descriptor, MemoryType},
    epoch::EpochReclaim,
    fault::Resolution,
    geometry::{Geometry, Granule, Level},
};
use support::{
    ALL_FEATURES, BLOCK, MEMORY, PAGE, PoolOps,
    checked::{run_checked, with_lock},
    fixture, fixture_with, pool_ops,
    test_vm::{TestHost, TestVcpu, TestVm},
};

fn request(ipa: u64, size: u64) -> MapRequest {
    MapRequest::new(Ipa(ipa), MEMORY + ipa, size, Attributes::READ_WRITE)
}

#[test]
fn a_mapper_refuses_unaligned_sizes_after_a_page() {
    let (pool, mut table, mut memcache) = fixture(Granule::K4, 39, 8);
    let ops = NoMaintenance(&pool);

    let mut mapper = table.mapper(&ops);
    mapper.map(&mut memcache, &request(0, 4096)).unwrap();

    for size in [0x1040, 0x1001, 0x800, 1] {
        let wrong = mapper.map(&mut memcache, &request(0x5000, size));
        assert!(matches!(wrong, Err(MapError::Unaligned { .. })), "{size:#x}");
    }
    let shifted = mapper.map(&mut memcache, &request(0x5800, 4096));
    assert!(matches!(shifted, Err(MapError::Unaligned { .. })));
    mapper.map(&mut memcache, &request(0x5000, 0x3000)).unwrap();
    drop(mapper);
    assert_eq!(table.look_up(&ops, Ipa(0x7000)).0.address(), MEMORY + 0x7000);
}

#[test]
fn a_mapper_applies_the_attributes_of_each_request() {
    let (pool, mut table, mut memcache) = fixture(Granule::K4, 39, 8);
    let ops = NoMaintenance(&pool);
    let types = [MemoryType::Normal, MemoryType::NonCacheable, MemoryType::Device];
    // Gray code: one attribute changes from page to page; the memory type changes after 256 pages.
    let all = types.into_iter().flat_map(|memory| {
        (0..256_u16).map(move |n| {
            let bits = n ^ (n >> 1);
            Attributes {
                memory,
                read: bits & 1 != 0,
                write: bits & 2 != 0,
                execute: bits & 4 != 0,
                is_accessed: bits & 8 != 0,
                // The engine ignores this attribute: it alone decides which pages form a run.
                is_contiguous: bits & 16 != 0,
                software: u8::try_from(bits >> 5).unwrap(),
            }
        })
    });
    let requests: Vec<_> = (0..)
        .map(|n| n * 4096)
        .zip(all)
        .map(|(ipa, attributes)| MapRequest::new(Ipa(ipa), MEMORY + ipa, 4096, attributes))
        .collect();

    let mut mapper = table.mapper(&ops);
    for request in &requests {
        mapper.map(&mut memcache, request).unwrap();
    }
    drop(mapper);

    for request in requests {
        let attributes = Attributes { is_contiguous: false, ..request.attributes };
        let leaf = Descriptor::leaf(request.phys, Level::PAGE, attributes, true);
        assert_eq!(table.look_up(&ops, request.ipa), (leaf, Level::PAGE));
    }
}

#[test]
fn walks_work_for_every_granule_and_ipa_width() {
    let shapes = [Granule::K4, Granule::K16, Granule::K64]
        .into_iter()
        .flat_map(|granule| [32, 36, 39, 40, 43, 48].map(|bits| (granule, bits)));
    for (granule, bits) in shapes {
        // Arrange
        let geometry = Geometry::new(granule, bits).unwrap();
        let tables = usize::try_from(geometry.root_tables()).unwrap() + 8;
        let (pool, mut table, mut memcache) = fixture(granule, bits, tables);
        let ops = NoMaintenance(&pool);
        let block = geometry.span(Level::new(2).unwrap());
        let at = geometry.size() - 2 * block;
        let request =
            |ipa, size| MapRequest::new(Ipa(ipa), PhysAddr(ipa), size, Attributes::READ_WRITE);

        // Act: maps the last block but one, and two pages after it, one of them with a mapper.
        let (one, other) = (at + block, at + block + granule.size());
        table.map(&ops, &mut memcache, &request(at, block)).unwrap();
        table.map(&ops, &mut memcache, &request(one, granule.size())).unwrap();
        table.mapper(&ops).map(&mut memcache, &request(other, granule.size())).unwrap();

        // Assert
        let seen = |ipa| table.walker().translate(&ops, Ipa(ipa), Access::Write).ok();
        for ipa in [at, at + block - 1, one, other + 5] {
            assert_eq!(seen(ipa).map(|s| s.phys.0), Some(ipa), "{granule:?} {bits}");
        }
        // The same index in another of the concatenated root tables.
        let alias = at.wrapping_sub(geometry.size() / geometry.root_tables());
        let others = [at.wrapping_sub(1), alias, other + granule.size(), geometry.size()];
        assert!(others.into_iter().all(|ipa| seen(ipa).is_none()));
        // 64K pages and a 32-bit IPA space allow no block.
        let highest = geometry.start_level().max(Level::new(2).unwrap());
        assert_eq!(table.look_up(&ops, Ipa(at)).1, highest);
        assert_eq!(table.look_up(&ops, Ipa(one)).1, Level::PAGE);
    }
}

#[test]
fn a_replaced_table_is_not_freed_during_a_mappers_walk() {
    let (pool, table, mut memcache) = fixture(Granule::K4, 39, 32);
    let reclaim = EpochReclaim::new(1);
    let ops = pool_ops(&pool, &reclaim, 0);

    let mut mapper = table.mapper_shared(&ops);
    mapper.map(&mut memcache, &request(0, PAGE)).unwrap();
    // The same CPU maps a block there in a separate walk.
    let block = table.map_shared(&ops, &mut memcache, &request(0, BLOCK));
    let early = reclaim.take_unreachable_table();
    mapper.map(&mut memcache, &request(PAGE, PAGE)).unwrap();
    drop(mapper);

    assert_eq!((block, early), (Ok(()), None));
    assert!(reclaim.take_unreachable_table().is_some());
}

#[test]
fn addresses_beyond_48_bits_are_refused() {
    let (pool, mut table, mut memcache) = fixture(Granule::K4, 39, 8);
    let ops = NoMaintenance(&pool);
    let request = |ipa, phys| MapRequest::new(ipa, phys, 4096, Attributes::READ_WRITE);
    table.map(&ops, &mut memcache, &request(Ipa(0), MEMORY)).unwrap();

    for (page, bit) in (48..64).map(|bit| (bit * 4096, 1 << bit)) {
        let far = request(Ipa(0x5000 | bit), MEMORY);
        let high = request(Ipa(0x5000), PhysAddr(MEMORY.0 | bit));
        let alone = [far, high].map(|r| table.map(&ops, &mut memcache, &r));
        let mut mapper = table.mapper(&ops);
        // The mapper caches the table that contains the truncated address.
        mapper.map(&mut memcache, &request(Ipa(page), MEMORY + page)).unwrap();
        let in_one_walk = [far, high].map(|r| mapper.map(&mut memcache, &r));

        for [far, high] in [alone, in_one_walk] {
            assert!(matches!(far, Err(MapError::IpaOutOfRange { .. })), "{far:?}");
            assert!(matches!(high, Err(MapError::PhysOutOfRange { .. })), "{high:?}");
        }
    }
    assert_eq!(table.look_up(&ops, Ipa(0x5000)).0, Descriptor::EMPTY);
}

#[test]
fn addresses_outside_the_table_are_refused() {
    // A root table with unused entries, concatenated root tables, a fully used root table.
    let shapes = [
        (Granule::K4, 36, 1 << 30),
        (Granule::K4, 40, 2 << 20),
        (Granule::K4, 39, 1 << 30),
        (Granule::K16, 33, 32 << 20),
        (Granule::K64, 36, 512 << 20),
    ];
    for (granule, bits, leaf) in shapes {
        let (pool, mut table, mut memcache) = fixture(granule, bits, 32);
        let ops = NoMaintenance(&pool);
        let end = Ipa(table.geometry().size());
        let at = |ipa| MapRequest::new(ipa, PhysAddr(1 << 40), leaf, Attributes::READ);
        let last = Ipa(end.0 - leaf);

        // The mapper must refuse the address after the first and after the last leaf.
        let mut mapper = table.mapper(&ops);
        let mut outside = Vec::new();
        for ipa in [Ipa(0), last] {
            mapper.map(&mut memcache, &at(ipa)).unwrap();
            outside.push(mapper.map(&mut memcache, &at(end)));
        }
        drop(mapper);
        outside.push(table.map(&ops, &mut memcache, &at(end)));
        outside.push(table.map_shared(&ops, &mut memcache, &at(end)));
        outside.push(table.relax(&ops, end, Level::PAGE, Attributes::READ_WRITE));
        outside.push(table.relax_shared(&ops, Ipa(1 << 60), Level::PAGE, Attributes::READ_WRITE));
        table.mark_accessed(&ops, end);
        table.mark_accessed(&ops, Ipa(1 << 60));

        for done in outside {
            let shape = (granule, bits);
            assert!(matches!(done, Err(MapError::IpaOutOfRange { .. })), "{shape:?}");
        }
        assert_eq!(table.look_up(&ops, end).0, Descriptor::EMPTY);
        assert_eq!(table.look_up(&ops, Ipa(1 << 60)).0, Descriptor::EMPTY);
        for ipa in [Ipa(0), last] {
            assert!(table.walker().translate(&ops, ipa, Access::Read).is_ok());
            assert!(table.walker().translate(&ops, ipa, Access::Write).is_err());
        }
    }
}

#[test]
fn devices_and_non_cacheable_memory_need_no_cmo() {
    for memory in [MemoryType::Device, MemoryType::NonCacheable] {
        for features in [Features::default(), ALL_FEATURES] {
            run_checked(features, |table, ops, memcache| {
                let (ipa, phys, size) = (Ipa(0), PhysAddr(0x900_0000), 16 * PAGE);
                let is_device = true;
                ops.record(Action::AddMemory { ipa, phys, size, is_device });
                let attributes = Attributes { memory, ..Attributes::READ_WRITE };
                let request = MapRequest::new(ipa, phys, size, attributes);
                with_lock(ops, || table.map(ops, memcache, &request).unwrap());
                with_lock(ops, || table.unmap(ops, ipa, size).unwrap());
                ops.record(Action::RemoveMemory { ipa, size });
            });
        }
    }
}

#[test]
fn pages_with_different_software_bits_are_not_coalesced() {
    run_checked(ALL_FEATURES, |table, ops, memcache| {
        let (ipa, phys, size) = (Ipa(0), MEMORY, BLOCK);
        let is_device = false;
        ops.record(Action::AddMemory { ipa, phys, size, is_device });
        let page = |at, software| {
            let attributes = Attributes { software, ..Attributes::READ_WRITE };
            MapRequest::new(Ipa(at), phys + at, PAGE, attributes)
        };

        with_lock(ops, || {
            for n in 0..BLOCK / PAGE {
                let request = page(n * PAGE, if n == 5 { 7 } else { 0 });
                table.map(ops, memcache, &request).unwrap();
            }
            table.recover_blocks(ops, ipa, size, Level::new(2).unwrap()).unwrap();
        });

        let software = |n| table.look_up(ops, Ipa(n * PAGE)).0.attributes().software;
        assert_eq!([4, 5, 6].map(software), [0, 7, 0]);
    });
}

#[test]
fn cmos_in_the_fault_path_work_with_shared_walkers() {
    let policy = Policy { cmo_placement: CmoPlacement::FaultPath, ..Policy::LINUX_6_12 };
    let vm = TestVm::new(policy, Features::default(), 1, 2);
    let checker = Mutex::new(Checker::new(vm.setup));
    let mut vcpu = vm.vcpu(0, &checker);

    vcpu.touch(0, Access::Fetch).unwrap();
    vcpu.touch(BLOCK, Access::Write).unwrap();

    assert_eq!(checker.lock().unwrap().violations(), []);
}

/// Handles a fault on a page after the host has recovered the block and enabled dirty logging again.
#[test]
fn a_fault_on_a_replaced_page_makes_no_block_writable_under_dirty_logging() {
    let vm = TestVm::new(Policy::LINUX_6_12_SERIES, Features::default(), 1, 1);
    let checker = Mutex::new(Checker::new(vm.setup));
    let mut vcpu = vm.vcpu(0, &checker);
    vcpu.touch(0, Access::Write).unwrap();
    vcpu.set_logging(true);
    vcpu.touch(0, Access::Write).unwrap();
    let fault = vm.mmu.walker().translate(&vcpu.ops, Ipa(PAGE), Access::Write).unwrap_err();
    vcpu.set_logging(false);
    vcpu.set_logging(true);

    let host = TestHost { vm: &vm, recorder: &vcpu.recorder };
    let done = vm.mmu.fault(&vcpu.ops, &host, &mut vcpu.memcache, fault);

    assert_eq!(done, Ok(Resolution::Retry));
    assert_eq!(checker.lock().unwrap().violations(), []);
}

#[test]
fn replaced_tables_return_to_the_pool() {
    const BLOCKS: u64 = 80;
    // 128 tables without the root and the table below it.
    const FREE: usize = 126;
    let (pool, mut table, mut memcache) = fixture(Granule::K4, 39, 128);
    let ops = NoMaintenance(&pool);
    let blocks = || (0..BLOCKS).map(|n| request(n * BLOCK, BLOCK));
    let by_pages = |table: &mut Stage2, memcache: &mut Memcache| {
        for n in 0..BLOCKS {
            memcache.top_up(&ops, 4, 8);
            table.map(&ops, memcache, &request(n * BLOCK, PAGE)).unwrap();
        }
        memcache.drain(&ops);
    };
    by_pages(&mut table, &mut memcache);
    assert_eq!(pool.free_tables(), FREE - 80);

    // A drained memcache retains no table.
    blocks().for_each(|r| table.map(&ops, &mut memcache, &r).unwrap());
    assert_eq!(pool.free_tables(), FREE);

    // A topped-up memcache retains as many tables as fit.
    for count in [1, 8, Memcache::CAPACITY - 1, Memcache::CAPACITY] {
        table.unmap(&ops, Ipa(0), BLOCKS * BLOCK).unwrap();
        by_pages(&mut table, &mut memcache);
        assert!(memcache.top_up(&ops, count, count));
        let mut mapper = table.mapper(&ops);
        blocks().for_each(|r| mapper.map(&mut memcache, &r).unwrap());
        drop(mapper);
        assert!(pool.free_tables() >= FREE - count - Memcache::CAPACITY);
        assert_eq!(memcache.len(), count);
        memcache.drain(&ops);
        assert_eq!(pool.free_tables(), FREE, "{count} tables in the memcache");
    }
}

/// Returns the number of contiguous pages after one exclusive map of `pages` pages.
fn contiguous_pages(policy: Policy, granule: Granule, phys: PhysAddr, pages: u64) -> usize {
    let geometry = Geometry::new(granule, 40).unwrap();
    let (pool, mut table, mut memcache) = fixture_with(geometry, Features::default(), policy, 32);
    let ops = NoMaintenance(&pool);
    let size = pages * granule.size();
    let request = MapRequest {
        max_leaf_size: granule.size(),
        ..MapRequest::new(Ipa(0), phys, size, Attributes::READ)
    };

    table.map(&ops, &mut memcache, &request).unwrap();

    let leaf = |page| table.look_up(&ops, Ipa(page * granule.size())).0;
    (0..pages).filter(|page| leaf(*page).is_contiguous()).count()
}

#[test]
fn pages_that_fill_an_aligned_run_have_the_contiguous_bit() {
    let phys = PhysAddr(0x1_0000_0000);
    for (policy, granule, phys, pages, contiguous) in [
        (Policy::GRANULE, Granule::K4, phys, 16 * 3 + 7, 16 * 3),
        (Policy::GRANULE, Granule::K16, phys, 128 + 5, 128),
        (Policy::GRANULE, Granule::K64, phys, 63, 32),
        (Policy::GRANULE, Granule::K4, phys + PAGE, 64, 0),
        (Policy::LINUX_6_12, Granule::K4, phys, 64, 0),
    ] {
        let found = contiguous_pages(policy, granule, phys, pages);
        assert_eq!(found, contiguous, "{granule:?}, {pages} pages at {phys:#x}");
    }
}

type CheckedVcpu<'a> = TestVcpu<'a, Recorder<'a, PoolOps<'a>, Checker>, Checker>;

/// Returns the number of contiguous pages after `act`, from 512 before it.
fn contiguous_after(policy: Policy, act: impl FnOnce(&mut CheckedVcpu<'_>)) -> usize {
    let vm = TestVm::new(policy, Features::default(), 1, 4);
    let checker = Mutex::new(Checker::new(vm.setup));
    let mut guest = vm.vcpu(0, &checker);
    guest.populate(3);

    act(&mut guest);

    let pages = (0..512).map(|page| Ipa(3 * BLOCK + page * PAGE));
    let left = pages
        .filter(|ipa| {
            let look = |table: &Stage2| table.look_up(&guest.ops, *ipa).0;
            vm.mmu.with_shared(&guest.ops, look).is_contiguous()
        })
        .count();
    guest.finish();
    let checker = checker.into_inner().unwrap();
    assert_eq!(checker.violations(), []);
    left
}

const CHANGED_PAGE: u64 = 3 * BLOCK + 21 * PAGE;

#[test]
fn a_change_removes_the_contiguous_bit_from_its_runs() {
    type Change = fn(&mut CheckedVcpu<'_>);
    let acts: [(&str, Change, usize); 8] = [
        ("no change", |_| (), 512),
        ("a fetch", |g| assert!(g.touch(CHANGED_PAGE, Access::Fetch).unwrap() > 0), 496),
        ("unmap of one page", |g| g.unmap(CHANGED_PAGE, PAGE), 496),
        // Covers whole runs in the middle and partial runs at the ends.
        ("unmap of 64 pages", |g| g.unmap(CHANGED_PAGE, 64 * PAGE), 432),
        ("unmap of the block", |g| g.unmap(3 * BLOCK, BLOCK), 0),
        // Entries of a run may differ in the access flag.
        ("ageing", |g| g.age(CHANGED_PAGE, PAGE), 512),
        ("write protection of all memory", |g| g.set_logging(true), 512),
        (
            "the first write under dirty logging",
            |g| {
                g.set_logging(true);
                g.touch(CHANGED_PAGE, Access::Write).unwrap();
            },
            496,
        ),
    ];
    for (name, act, left) in acts {
        assert_eq!(contiguous_after(Policy::GRANULE, act), left, "{name}");
    }
}

#[test]
fn unmap_breaks_whole_runs_with_every_batch_size() {
    for most in [1, 16, 17, 64] {
        let policy = Policy { unmap_batching: UnmapBatching::Batch(most), ..Policy::GRANULE };

        let left = contiguous_after(policy, |g| g.unmap(3 * BLOCK + 8 * PAGE, 100 * PAGE));

        assert_eq!(left, 512 - 112, "batches of {most}");
    }
}
