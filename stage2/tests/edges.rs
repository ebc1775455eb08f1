// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Edge cases: addresses outside the table, devices, tables that outlive a walk, memcaches that
//! are full or empty.
#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::sync::Mutex;

use granule_stage2::{
    Access, CmoPlacement, Features, Ipa, MapError, MapRequest, Memcache, NoMaintenance, PhysAddr,
    Policy, Stage2,
    check::{Action, Checker, Event, Recorder},
    descriptor::{Attributes, Descriptor, MemoryType},
    epoch::EpochReclaim,
    geometry::{Geometry, Granule},
    operations::{Note, Operations},
};
use support::{
    ALL_FEATURES, BLOCK, Cpu, MEMORY, PAGE, cpu, fixture, pool, setup, stage2, test_vm::TestVm,
};

#[test]
fn addresses_outside_the_table_are_refused() {
    // A root with more entries than the IPA width needs, concatenated roots, a full root.
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

        // First and last leaf, so that the mapper continues from the table of either.
        let mut mapper = table.mapper(&ops);
        let mut outside = Vec::new();
        for ipa in [Ipa(0), last] {
            mapper.map(&mut memcache, &at(ipa)).unwrap();
            outside.push(mapper.map(&mut memcache, &at(end)));
        }
        drop(mapper);
        outside.push(table.map(&ops, &mut memcache, &at(end)));
        outside.push(table.map_shared(&ops, &mut memcache, &at(end)));
        outside.push(table.relax(&ops, end, Attributes::READ_WRITE));
        outside.push(table.relax_shared(&ops, Ipa(1 << 60), Attributes::READ_WRITE));
        table.mark_accessed(&ops, end);
        table.mark_accessed(&ops, Ipa(1 << 60));

        for done in outside {
            let shape = (granule, bits);
            assert!(matches!(done, Err(MapError::OutOfRange { .. })), "{shape:?}");
        }
        assert_eq!(table.look_up(&ops, end).0, Descriptor::EMPTY);
        assert_eq!(table.look_up(&ops, Ipa(1 << 60)).0, Descriptor::EMPTY);
        for ipa in [Ipa(0), last] {
            assert!(table.translate(&ops, ipa, Access::Read).is_ok());
            assert!(table.translate(&ops, ipa, Access::Write).is_err());
        }
    }
}

type Checked<'a> = Recorder<'a, Cpu<'a>, Checker>;

/// Runs `act` on an empty table with the checker on, which reports no violation.
fn checked(features: Features, act: impl FnOnce(&mut Stage2, &Checked<'_>, &mut Memcache)) {
    let geometry = Geometry::new(Granule::K4, 40).unwrap();
    let (pool, reclaim) = (pool(&geometry, 32), EpochReclaim::new(1));
    let checker = Mutex::new(Checker::new(setup(geometry, features, &pool, 1)));
    let ops = Recorder::new(cpu(&pool, &reclaim, 0), 0, &checker);
    let mut table = stage2(geometry, features, Policy::GRANULE, &pool);
    let mut memcache = Memcache::new();
    memcache.top_up(&ops, 4, 8);
    act(&mut table, &ops, &mut memcache);
    assert_eq!(checker.lock().unwrap().violations(), []);
}

/// Runs `act` with the lock held exclusively.
fn locked<T>(ops: &Checked<'_>, act: impl FnOnce() -> T) -> T {
    ops.note(Note::Lock { exclusive: true });
    let result = act();
    ops.note(Note::Unlock);
    result
}

#[test]
fn devices_and_non_cacheable_memory_need_no_cmo() {
    for memory in [MemoryType::Device, MemoryType::NonCacheable] {
        for features in [Features::default(), ALL_FEATURES] {
            checked(features, |table, ops, memcache| {
                let (ipa, phys, size) = (Ipa(0), PhysAddr(0x900_0000), 16 * PAGE);
                let device = true;
                ops.record(Action::AddMemory { ipa, phys, size, device });
                let attributes = Attributes { memory, ..Attributes::READ_WRITE };
                let request = MapRequest::new(ipa, phys, size, attributes);
                locked(ops, || table.map(ops, memcache, &request).unwrap());
                locked(ops, || table.unmap(ops, ipa, size).unwrap());
                ops.record(Action::RemoveMemory { ipa, size });
            });
        }
    }
}

#[test]
fn pages_with_different_software_bits_are_not_coalesced() {
    checked(ALL_FEATURES, |table, ops, memcache| {
        let (ipa, phys, size) = (Ipa(0), MEMORY, BLOCK);
        let device = false;
        ops.record(Action::AddMemory { ipa, phys, size, device });
        let page = |at, software| {
            let attributes = Attributes { software, ..Attributes::READ_WRITE };
            MapRequest::new(Ipa(at), phys + at, PAGE, attributes)
        };

        locked(ops, || {
            for n in 0..BLOCK / PAGE {
                let request = page(n * PAGE, if n == 5 { 7 } else { 0 });
                table.map(ops, memcache, &request).unwrap();
            }
            table.recover_blocks(ops, ipa, size, BLOCK).unwrap();
        });

        let software = |n| table.look_up(ops, Ipa(n * PAGE)).0.attributes().software;
        assert_eq!([4, 5, 6].map(software), [0, 7, 0]);
    });
}

#[test]
fn a_drained_memcache_keeps_no_table() {
    let (pool, mut table, mut memcache) = fixture(Granule::K4, 39, 32);
    let ops = NoMaintenance(&pool);
    let request = |size| MapRequest::new(Ipa(0), MEMORY, size, Attributes::READ_WRITE);
    table.map(&ops, &mut memcache, &request(PAGE)).unwrap();
    memcache.drain(&ops);
    let before = pool.available();

    table.map(&ops, &mut memcache, &request(BLOCK)).unwrap();

    assert_eq!(pool.available(), before + 1);
}

#[test]
fn maintenance_in_the_fault_path_works_with_shared_walkers() {
    let policy = Policy { cmo: CmoPlacement::FaultPath, ..Policy::LINUX_6_12 };
    let vm = <TestVm>::new(policy, Features::default(), 1, 2);
    let checker = Mutex::new(Checker::new(vm.setup));
    let mut vcpu = vm.vcpu(0, &checker);

    vcpu.touch(0, Access::Fetch).unwrap();
    vcpu.touch(BLOCK, Access::Write).unwrap();

    assert_eq!(checker.lock().unwrap().violations(), []);
}

/// Returns the stores of a shared walker that coalesces a table of pages into a block.
fn stores_of_a_coalesce(bbm: u8, write: bool) -> Vec<(Descriptor, Descriptor)> {
    let geometry = Geometry::new(Granule::K4, 39).unwrap();
    let (pool, reclaim) = (pool(&geometry, 32), EpochReclaim::new(1));
    let events: Mutex<Vec<Event>> = Mutex::new(Vec::new());
    let ops = Recorder::new(cpu(&pool, &reclaim, 0), 0, &events);
    let features = Features { bbm, ..ALL_FEATURES };
    let table = stage2(geometry, features, Policy::GRANULE, &pool);
    let mut memcache = Memcache::new();
    memcache.top_up(&ops, 4, 8);
    let pages = MapRequest {
        largest: PAGE,
        ..MapRequest::new(Ipa(0), MEMORY, BLOCK, Attributes::READ_WRITE)
    };
    table.map_shared(&ops, &mut memcache, &pages).unwrap();
    let before = events.lock().unwrap().len();
    let attributes = Attributes { write, ..Attributes::READ };
    let block = MapRequest::new(Ipa(0), MEMORY, BLOCK, attributes);
    table.map_shared(&ops, &mut memcache, &block).unwrap();
    let events = events.into_inner().unwrap();
    let stored = events[before..].iter().filter_map(|event| match event.action {
        Action::Store { old, new, .. } => Some((old, new)),
        _ => None,
    });
    stored.collect()
}

#[test]
fn coalescing_needs_no_break_with_bbm_3_and_equal_permissions() {
    let breaks = |bbm, write| {
        let stores = stores_of_a_coalesce(bbm, write);
        assert!(!stores.is_empty());
        stores.iter().any(|(_, new)| !new.is_valid())
    };

    assert!(!breaks(3, true));
    // FEAT_BBM level 2 needs the nT bit, thus two stores; a change of permissions needs a break.
    assert!(breaks(2, true) && breaks(1, true) && breaks(0, true));
    assert!(breaks(3, false));
}

#[test]
fn tables_that_blocks_replace_return_to_the_pool() {
    const BLOCKS: u64 = 80;
    // All of 128 but the root's and the one below it.
    const FREE: usize = 126;
    let (pool, mut table, mut memcache) = fixture(Granule::K4, 39, 128);
    let ops = NoMaintenance(&pool);
    let request = |n, size| {
        let (ipa, phys) = (Ipa(n * BLOCK), MEMORY + n * BLOCK);
        let mut request = MapRequest::new(ipa, phys, size, Attributes::READ_WRITE);
        request.largest = size;
        request
    };
    let blocks = || (0..BLOCKS).map(|n| request(n, BLOCK));
    let by_pages = |table: &mut Stage2, memcache: &mut Memcache| {
        for n in 0..BLOCKS {
            memcache.top_up(&ops, 4, 8);
            table.map(&ops, memcache, &request(n, 4096)).unwrap();
        }
        memcache.drain(&ops);
    };
    by_pages(&mut table, &mut memcache);
    assert_eq!(pool.available(), FREE - 80);

    // A memcache that was never topped up keeps no table.
    let mut never = Memcache::new();
    blocks().for_each(|r| table.map(&ops, &mut never, &r).unwrap());
    assert_eq!(pool.available(), FREE);

    // A memcache that was topped up keeps the tables that it has room for.
    for hand in [1, 8, Memcache::CAPACITY - 1, Memcache::CAPACITY] {
        table.unmap(&ops, Ipa(0), BLOCKS * BLOCK).unwrap();
        by_pages(&mut table, &mut memcache);
        assert!(memcache.top_up(&ops, hand, hand));
        let mut mapper = table.mapper(&ops);
        blocks().for_each(|r| mapper.map(&mut memcache, &r).unwrap());
        drop(mapper);
        assert!(pool.available() >= FREE - hand - Memcache::CAPACITY);
        assert_eq!(memcache.len(), hand);
        memcache.drain(&ops);
        assert_eq!(pool.available(), FREE, "{hand} in hand");
    }
}
