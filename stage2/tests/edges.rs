// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What lies at the edges: addresses behind the last, memory that is no memory, tables and walks
//! that are not over yet.
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod support;

use std::sync::Mutex;

use granule_stage2::{
    Access, Features, Ipa, Maintenance, MapError, MapRequest, Memcache, Offline, PhysAddr, Policy,
    Stage2,
    check::{Action, Checker, Event, Recorder},
    descriptor::{Attributes, Descriptor, MemoryType},
    geometry::{Geometry, Granule},
    grace::Grace,
    operations::{Note, Operations},
    pool::words,
};
use support::{BLOCK, Cpu, MEMORY, PAGE, Pool, TABLES, TestVm, VMID, Vcpu, setup};

const ALL: Features = Features {
    fwb: true,
    dic: true,
    tlb_range: true,
    bbm: 3,
};

fn pool(geometry: &Geometry) -> Pool {
    let entries = usize::try_from(geometry.granule().entries()).unwrap();
    Pool::new(TABLES, geometry, words(32 * entries), words(64)).unwrap()
}

fn table(geometry: Geometry, pool: &Pool) -> Stage2 {
    Stage2::new(geometry, ALL, Policy::GRANULE, VMID, pool.root())
}

#[test]
fn nothing_is_done_behind_the_last_address() {
    // A single root with more entries than addresses; roots side by side; a root that is full.
    let shapes = [
        (Granule::K4, 36, 1 << 30),
        (Granule::K4, 40, 2 << 20),
        (Granule::K4, 39, 1 << 30),
        (Granule::K16, 33, 32 << 20),
        (Granule::K64, 36, 512 << 20),
    ];
    for (granule, bits, leaf) in shapes {
        let geometry = Geometry::new(granule, bits).unwrap();
        let pool = pool(&geometry);
        let (ops, mut memcache) = (Offline(&pool), Memcache::new());
        memcache.top_up(&ops, 4, 8);
        let mut table = table(geometry, &pool);
        let end = geometry.size();
        let at = |ipa| MapRequest::new(ipa, PhysAddr(1 << 40), leaf, Attributes::READ);
        let last = end - leaf;

        // First and last, so that a walk in one begins in the table of either.
        let mut one_walk = table.mapper(&ops);
        let mut behind = Vec::new();
        for ipa in [0, last] {
            one_walk.map(&mut memcache, &at(Ipa(ipa))).unwrap();
            behind.push(one_walk.map(&mut memcache, &at(Ipa(end))));
        }
        drop(one_walk);
        behind.push(table.map(&ops, &mut memcache, &at(Ipa(end))));
        behind.push(table.map_shared(&ops, &mut memcache, &at(Ipa(end))));
        behind.push(table.relax(&ops, Ipa(end), Attributes::READ_WRITE));
        behind.push(table.relax_shared(&ops, Ipa(1 << 60), Attributes::READ_WRITE));
        table.mark_accessed(&ops, Ipa(end));
        table.mark_accessed(&ops, Ipa(1 << 60));

        for done in behind {
            let shape = (granule, bits);
            assert!(
                matches!(done, Err(MapError::OutOfRange { .. })),
                "{shape:?}"
            );
        }
        assert_eq!(table.look_up(&ops, Ipa(end)).0, Descriptor::EMPTY);
        assert_eq!(table.look_up(&ops, Ipa(1 << 60)).0, Descriptor::EMPTY);
        for ipa in [0, last] {
            assert!(table.translate(&ops, Ipa(ipa), Access::Read).is_ok());
            assert!(table.translate(&ops, Ipa(ipa), Access::Write).is_err());
        }
    }
}

/// Does something to an empty table with the checker on, which finds nothing wrong.
fn checked(features: Features, act: impl FnOnce(&mut Stage2, &Recorder<'_, Cpu<'_>, Checker>)) {
    let geometry = Geometry::new(Granule::K4, 40).unwrap();
    let (pool, grace) = (pool(&geometry), Grace::new(1));
    let checker = Mutex::new(Checker::new(setup(geometry, features, &pool, 1)));
    let cpu = Cpu::new(&pool, &grace, 0);
    let ops = Recorder::new(cpu, 0, &checker);
    let mut table = Stage2::new(geometry, features, Policy::GRANULE, VMID, pool.root());
    act(&mut table, &ops);
    assert_eq!(checker.lock().unwrap().violations(), []);
}

#[test]
fn what_is_no_memory_is_neither_cleaned_nor_missed() {
    for memory in [MemoryType::Device, MemoryType::NonCacheable] {
        for features in [Features::default(), ALL] {
            checked(features, |table, ops| {
                let (ipa, phys, size) = (0, 0x900_0000, 16 * PAGE);
                let mut memcache = Memcache::new();
                memcache.top_up(ops, 4, 8);
                let device = true;
                ops.tell(Action::Give {
                    ipa: Ipa(ipa),
                    phys: PhysAddr(phys),
                    size,
                    device,
                });
                let attributes = Attributes {
                    memory,
                    ..Attributes::READ_WRITE
                };

                ops.note(Note::Lock { exclusive: true });
                let request = MapRequest::new(Ipa(ipa), PhysAddr(phys), size, attributes);
                table.map(ops, &mut memcache, &request).unwrap();
                ops.note(Note::Unlock);
                ops.note(Note::Lock { exclusive: true });
                table.unmap(ops, Ipa(ipa), size).unwrap();
                ops.note(Note::Unlock);
                ops.tell(Action::TakeBack {
                    ipa: Ipa(ipa),
                    size,
                });
            });
        }
    }
}

#[test]
fn pages_whose_software_bits_differ_stay_pages() {
    checked(ALL, |table, ops| {
        let mut memcache = Memcache::new();
        memcache.top_up(ops, 4, 8);
        let (ipa, phys, size) = (0, MEMORY, BLOCK);
        let device = false;
        ops.tell(Action::Give {
            ipa: Ipa(ipa),
            phys: PhysAddr(phys.0),
            size,
            device,
        });
        let page = |at, software| {
            let attributes = Attributes {
                software,
                ..Attributes::READ_WRITE
            };
            MapRequest::new(at, phys + at.0, PAGE, attributes)
        };

        ops.note(Note::Lock { exclusive: true });
        for n in 0..BLOCK / PAGE {
            let request = page(Ipa(n * PAGE), if n == 5 { 7 } else { 0 });
            table.map(ops, &mut memcache, &request).unwrap();
        }
        table.recover_blocks(ops, Ipa(ipa), size, BLOCK).unwrap();
        ops.note(Note::Unlock);

        let software = |n| table.look_up(ops, Ipa(n * PAGE)).0.attributes().software;
        assert_eq!([4, 5, 6].map(software), [0, 7, 0]);
    });
}

#[test]
fn a_table_stays_while_a_walk_for_many_is_in_it() {
    let geometry = Geometry::new(Granule::K4, 39).unwrap();
    let (pool, grace) = (pool(&geometry), Grace::new(1));
    let ops = Cpu::new(&pool, &grace, 0);
    let table = table(geometry, &pool);
    let mut memcache = Memcache::new();
    memcache.top_up(&ops, 4, 8);
    let request = |ipa, size| MapRequest::new(ipa, MEMORY + ipa.0, size, Attributes::READ_WRITE);

    let mut many = table.mapper_shared(&ops);
    many.map(&mut memcache, &request(Ipa(0), PAGE)).unwrap();
    // The same CPU puts a block there in a walk of its own.
    let block = table.map_shared(&ops, &mut memcache, &request(Ipa(0), BLOCK));
    let early = grace.take();
    many.map(&mut memcache, &request(Ipa(PAGE), PAGE)).unwrap();
    drop(many);

    assert_eq!((block, early), (Ok(()), None));
    assert!(grace.take().is_some());
}

#[test]
fn a_memcache_that_was_drained_keeps_nothing() {
    let geometry = Geometry::new(Granule::K4, 39).unwrap();
    let pool = pool(&geometry);
    let (ops, mut memcache) = (Offline(&pool), Memcache::new());
    let mut table = table(geometry, &pool);
    let request = |size| MapRequest::new(Ipa(0), MEMORY, size, Attributes::READ_WRITE);
    memcache.top_up(&ops, 4, 4);
    table.map(&ops, &mut memcache, &request(PAGE)).unwrap();
    memcache.drain(&ops);
    let before = pool.available();

    table.map(&ops, &mut memcache, &request(BLOCK)).unwrap();

    assert_eq!(pool.available(), before + 1);
}

#[test]
fn the_fault_path_makes_memory_ready_beside_other_walkers_too() {
    let policy = Policy {
        maintenance: Maintenance::FaultPath,
        ..Policy::LINUX_6_12
    };
    let vm = <TestVm>::new(policy, Features::default(), 1, 2);
    let checker = Mutex::new(Checker::new(vm.setup));
    let recorder = || Recorder::new(vm.cpu(0), 0, &checker);
    let mut vcpu = Vcpu::new(&vm, recorder(), recorder());

    vcpu.touch(0, Access::Fetch).unwrap();
    vcpu.touch(BLOCK, Access::Write).unwrap();

    assert_eq!(checker.lock().unwrap().violations(), []);
}

/// What is stored where a table of pages becomes a block beside other walkers.
fn stores_of_a_coalesce(bbm: u8, write: bool) -> Vec<(Descriptor, Descriptor)> {
    let geometry = Geometry::new(Granule::K4, 39).unwrap();
    let (pool, grace) = (pool(&geometry), Grace::new(1));
    let events: Mutex<Vec<Event>> = Mutex::new(Vec::new());
    let cpu = Cpu::new(&pool, &grace, 0);
    let ops = Recorder::new(cpu, 0, &events);
    let features = Features { bbm, ..ALL };
    let table = Stage2::new(geometry, features, Policy::GRANULE, VMID, pool.root());
    let mut memcache = Memcache::new();
    memcache.top_up(&ops, 4, 8);
    let pages = MapRequest {
        largest: PAGE,
        ..MapRequest::new(Ipa(0), MEMORY, BLOCK, Attributes::READ_WRITE)
    };
    table.map_shared(&ops, &mut memcache, &pages).unwrap();
    let before = events.lock().unwrap().len();
    let attributes = Attributes {
        write,
        ..Attributes::READ
    };
    let block = MapRequest::new(Ipa(0), MEMORY, BLOCK, attributes);
    table.map_shared(&ops, &mut memcache, &block).unwrap();
    let events = events.into_inner().unwrap();
    let stored = events[before..]
        .iter()
        .filter_map(|event| match event.action {
            Action::Store { old, new, .. } => Some((old, new)),
            _ => None,
        });
    stored.collect()
}

#[test]
fn a_block_takes_its_pages_place_without_a_break_where_cpus_allow_it_and_all_agree() {
    let breaks = |bbm, write| {
        let stores = stores_of_a_coalesce(bbm, write);
        assert!(!stores.is_empty());
        stores.iter().any(|(_, new)| !new.is_valid())
    };

    assert!(!breaks(3, true));
    // Two stores could be seen one without the other; other permissions are no mere change of size.
    assert!(breaks(2, true) && breaks(1, true) && breaks(0, true));
    assert!(breaks(3, false));
}

#[test]
fn addresses_beyond_48_bits_are_refused() {
    let geometry = Geometry::new(Granule::K4, 39).unwrap();
    let pool = Pool::new(TABLES, &geometry, words(8 * 512), words(16)).unwrap();
    let (ops, mut memcache) = (Offline(&pool), Memcache::new());
    let mut table = Stage2::new(geometry, ALL, Policy::GRANULE, VMID, pool.root());
    memcache.top_up(&ops, 4, 8);
    let request = |ipa, phys| MapRequest::new(ipa, phys, 4096, Attributes::READ_WRITE);
    table
        .map(&ops, &mut memcache, &request(Ipa(0), MEMORY))
        .unwrap();

    for (page, bit) in (48..64).map(|bit| (bit * 4096, 1 << bit)) {
        let (far, high) = (
            request(Ipa(0x5000 | bit), MEMORY),
            request(Ipa(0x5000), PhysAddr(MEMORY.0 | bit)),
        );
        let alone = [far, high].map(|r| table.map(&ops, &mut memcache, &r));
        let mut mapper = table.mapper(&ops);
        // The table that it remembers is the one that the others would be in.
        mapper
            .map(&mut memcache, &request(Ipa(page), MEMORY + page))
            .unwrap();
        let in_one_walk = [far, high].map(|r| mapper.map(&mut memcache, &r));

        for [far, high] in [alone, in_one_walk] {
            assert!(matches!(far, Err(MapError::OutOfRange { .. })), "{far:?}");
            assert!(matches!(high, Err(MapError::TooHigh { .. })), "{high:?}");
        }
    }
    assert_eq!(table.look_up(&ops, Ipa(0x5000)).0, Descriptor::EMPTY);
}

#[test]
fn tables_that_blocks_replace_come_back() {
    const BLOCKS: u64 = 80;
    // Of 128, all but the root's and the one below it.
    const FREE: usize = 126;
    let geometry = Geometry::new(Granule::K4, 39).unwrap();
    let pool = Pool::new(TABLES, &geometry, words(128 * 512), words(256)).unwrap();
    let ops = Offline(&pool);
    let mut table = Stage2::new(geometry, ALL, Policy::GRANULE, VMID, pool.root());
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
    let mut memcache = Memcache::new();
    by_pages(&mut table, &mut memcache);
    assert_eq!(pool.available(), FREE - 80);

    // One that was never topped up keeps nothing, as nobody may ask it.
    let mut never = Memcache::new();
    blocks().for_each(|r| table.map(&ops, &mut never, &r).unwrap());
    assert_eq!(pool.available(), FREE);

    // One that is topped up keeps what there is room for, for a while.
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
