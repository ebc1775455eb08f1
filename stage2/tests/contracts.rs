// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Contracts between the engine and its callers: empty ranges, maps over other leaves, roots and
//! pools, host pages and invalidations of the fault path.
#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::cell::Cell;

use granule_stage2::{
    Access, Fault, FaultStatus, Features, Ipa, MapRequest, Memcache, NoMaintenance, PhysAddr,
    Policy, Stage2, TableAddress,
    check::Action,
    descriptor::Attributes,
    fault::{FaultError, HostMemory, HostPage, Mmu, Resolution},
    geometry::{Geometry, Granule, Level, RootError},
    pool::{PoolError, zeroed_words},
};
use parking_lot::RawRwLock;
use support::{
    ALL_FEATURES, BLOCK, MEMORY, PAGE, Pool, VMID,
    checked::{run_checked, with_lock},
    fixture_with, pool, stage2,
};

fn request(ipa: u64, size: u64) -> MapRequest {
    MapRequest::new(Ipa(ipa), MEMORY + ipa, size, Attributes::READ_WRITE)
}

#[test]
fn an_empty_range_changes_nothing() {
    run_checked(ALL_FEATURES, |table, ops, memcache| {
        let is_device = false;
        ops.record(Action::AddMemory { ipa: Ipa(0), phys: MEMORY, size: 2 * BLOCK, is_device });
        let pages = MapRequest { max_leaf_size: PAGE, ..request(BLOCK, BLOCK) };
        with_lock(ops, || table.map(ops, memcache, &request(0, BLOCK)).unwrap());
        with_lock(ops, || table.map(ops, memcache, &pages).unwrap());
        let leaves = |table: &Stage2| [0, PAGE, BLOCK].map(|ipa| table.look_up(ops, Ipa(ipa)));
        let before = leaves(table);

        with_lock(ops, || {
            for ipa in [Ipa(0), Ipa(PAGE), Ipa(BLOCK), Ipa(table.geometry().size())] {
                table.unmap(ops, ipa, 0).unwrap();
                table.write_protect(ops, ipa, 0).unwrap();
                table.protect(ops, ipa, 0, Attributes::READ).unwrap();
                assert!(!table.age(ops, ipa, 0).unwrap());
                table.split(ops, memcache, ipa, 0).unwrap();
                table.recover_blocks(ops, ipa, 0, Level::PAGE).unwrap();
                table.map(ops, memcache, &request(ipa.0, 0)).unwrap();
            }
        });

        assert_eq!(leaves(table), before);
    });
}

/// A host whose look-ups return one page, and whose invalidation is in progress or not.
struct OnePage(HostPage, bool);

impl HostMemory for OnePage {
    fn look_up_page(&self, _: Ipa, _: Access) -> Option<HostPage> {
        Some(self.0)
    }

    fn is_logging(&self, _: Ipa) -> bool {
        false
    }

    fn invalidation_sequence(&self) -> u64 {
        0
    }

    fn is_invalidating(&self, ipa: Ipa, size: u64) -> bool {
        let page = self.0;
        self.1 && ipa < page.ipa + page.size && page.ipa < ipa + size
    }

    fn mark_dirty(&self, _: Ipa, _: u64) {}
}

/// Handles a write fault at 4M + 64K with a host page in a table with this granule.
fn fault_with(granule: Granule, page: HostPage) -> Result<Resolution, FaultError> {
    fault_of(granule, &OnePage(page, false))
}

fn fault_of(granule: Granule, host: &impl HostMemory) -> Result<Resolution, FaultError> {
    let geometry = Geometry::new(granule, 40).unwrap();
    let pool = pool(&geometry, 16);
    let mmu = Mmu::<RawRwLock>::new(stage2(geometry, ALL_FEATURES, Policy::GRANULE, &pool));
    let (access, status) = (Access::Write, FaultStatus::Translation);
    let level = geometry.start_level();
    let fault = Fault { ipa: Ipa(0x41_0000), access, status, level };
    mmu.fault(&NoMaintenance(&pool), host, &mut Memcache::new(), fault)
}

#[test]
fn a_host_page_that_is_no_aligned_page_at_the_address_is_refused() {
    let page =
        |ipa, phys, size| HostPage { ipa: Ipa(ipa), phys: PhysAddr(phys), size, is_writable: true };
    let refused = [
        // Smaller than the granule.
        (Granule::K64, page(0x41_0000, 0x1_0000, 0x1000)),
        (Granule::K16, page(0x41_0000, 0x1_0000, 0x2000)),
        (Granule::K4, page(0x41_0000, 0x1_0000, 0)),
        // Addresses or size are no multiples.
        (Granule::K4, page(0x40_1000, 0x4000_0000, 0x20_0000)),
        (Granule::K4, page(0x40_0000, 0x4000_1000, 0x20_0000)),
        (Granule::K4, page(0x40_0000, 0x4000_0000, 0x18_0000)),
        // The address is before or behind the page.
        (Granule::K4, page(0x60_0000, 0x4000_0000, 0x20_0000)),
        (Granule::K4, page(0x40_0000, 0x4000_0000, 0x1000)),
    ];
    for (granule, page) in refused {
        let HostPage { ipa, phys, size, .. } = page;
        let error = FaultError::HostPage { fault: Ipa(0x41_0000), ipa, phys, size };

        assert_eq!(fault_with(granule, page), Err(error), "{granule:?}");
    }
    for (granule, page) in [
        (Granule::K4, page(0x40_0000, 0x4000_0000, 0x20_0000)),
        (Granule::K64, page(0x40_0000, 0x4000_0000, 0x20_0000)),
        (Granule::K64, page(0x41_0000, 0x4001_0000, 0x1_0000)),
    ] {
        assert_eq!(fault_with(granule, page), Ok(Resolution::Resolved), "{granule:?}");
    }
}

#[test]
fn a_fault_during_an_invalidation_is_retried() {
    let (ipa, phys) = (Ipa(0x40_0000), PhysAddr(0x4000_0000));
    let page = HostPage { ipa, phys, size: BLOCK, is_writable: true };

    let done = [true, false].map(|is_busy| fault_of(Granule::K4, &OnePage(page, is_busy)));

    assert_eq!(done, [Ok(Resolution::Retry), Ok(Resolution::Resolved)]);
}

/// A host that enables dirty logging after the first time that it is asked.
struct EnablesLogging(HostPage, Cell<bool>);

impl HostMemory for EnablesLogging {
    fn look_up_page(&self, _: Ipa, _: Access) -> Option<HostPage> {
        Some(self.0)
    }

    fn is_logging(&self, _: Ipa) -> bool {
        self.1.replace(true)
    }

    fn invalidation_sequence(&self) -> u64 {
        0
    }

    fn mark_dirty(&self, _: Ipa, _: u64) {}
}

#[test]
fn a_fault_beside_the_start_of_logging_is_retried() {
    let (ipa, phys) = (Ipa(0x40_0000), PhysAddr(0x4000_0000));
    let page = HostPage { ipa, phys, size: BLOCK, is_writable: true };
    let host = EnablesLogging(page, Cell::new(false));

    let done = [(); 2].map(|()| fault_of(Granule::K4, &host));

    assert_eq!(done, [Ok(Resolution::Retry), Ok(Resolution::Resolved)]);
}

#[test]
fn an_exclusive_map_of_what_is_mapped_succeeds() {
    let geometry = Geometry::new(Granule::K4, 40).unwrap();
    for (name, policy) in Policy::PRESETS {
        let (pool, mut table, mut memcache) = fixture_with(geometry, ALL_FEATURES, policy, 16);
        let ops = NoMaintenance(&pool);
        let read = MapRequest { attributes: Attributes::READ, ..request(0, PAGE) };

        for request in [request(0, PAGE), request(0, PAGE), request(BLOCK, BLOCK)] {
            table.map(&ops, &mut memcache, &request).unwrap();
        }
        let again = table.map(&ops, &mut memcache, &request(BLOCK, BLOCK));
        let with_mapper = table.mapper(&ops).map(&mut memcache, &request(0, PAGE));

        assert_eq!((again, with_mapper), (Ok(()), Ok(())), "{name}");
        let less = table.map(&ops, &mut memcache, &read);
        assert_eq!(less, Ok(()), "{name}");
    }
}

#[test]
fn replaced_memory_is_cleaned_and_invalidated() {
    // Bytes, and leaves of the old memory and of the new memory that replaces it. Four pages form no
    // contiguous run, whose removal would make the old pages again.
    for (size, old, new) in [(4 * PAGE, PAGE, PAGE), (BLOCK, BLOCK, BLOCK), (BLOCK, PAGE, BLOCK)] {
        run_checked(Features::default(), |table, ops, memcache| {
            let (ipa, is_device) = (Ipa(0), false);
            for (phys, leaf) in [(MEMORY, old), (MEMORY + BLOCK, new)] {
                ops.record(Action::AddMemory { ipa, phys, size, is_device });
                let map = MapRequest {
                    max_leaf_size: leaf,
                    ..MapRequest::new(ipa, phys, size, Attributes::READ_WRITE)
                };
                with_lock(ops, || table.map(ops, memcache, &map).unwrap());
            }

            assert_eq!(table.look_up(ops, ipa).0.address(), MEMORY + BLOCK);
        });
    }
}

#[test]
fn a_pool_is_refused_with_the_values_that_do_not_fit() {
    // Two root tables.
    let geometry = Geometry::new(Granule::K4, 40).unwrap();
    let create = |base, tables: usize, words| {
        Pool::new(PhysAddr(base), &geometry, zeroed_words(tables * 512), zeroed_words(words)).err()
    };
    let (root, beyond, size) = (TableAddress(0x8000_1000), TableAddress(1 << 48), 0x2000);

    for (base, tables, words, error) in [
        (root.0, 4, 8, PoolError::Root(RootError::Misaligned { root, size })),
        (beyond.0, 4, 8, PoolError::Root(RootError::OutOfRange { root: beyond, size })),
        (0x8000_0000, 1, 8, PoolError::TableCount { tables: 1, root_tables: 2 }),
        (0x8000_0000, 4, 7, PoolError::Metadata { words: 7, tables: 4 }),
        (
            (1 << 48) - size,
            4,
            8,
            PoolError::OutOfRange { base: PhysAddr((1 << 48) - size), tables: 4 },
        ),
    ] {
        assert_eq!(create(base, tables, words), Some(error));
    }
    assert_eq!(create(0x8000_0000, 4, 8), None);
    let features = ALL_FEATURES;
    let table = Stage2::new(geometry, features, Policy::GRANULE, VMID, root);
    assert_eq!(table.err(), Some(RootError::Misaligned { root, size }));
}
