// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Shared walkers that meet an entry which another has locked: they wait for it where they read it,
//! whatever they want and at whichever level, and go on with what is then there; or, if the policy
//! does not wait, the guest faults again.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod support;

use std::cell::Cell;

use granule_stage2::{
    EntryAddress, Features, Ipa, MapError, MapRequest, Memcache, Offline, Policy, Stage2,
    TableAddress,
    descriptor::{Attributes, Descriptor},
    geometry::{Geometry, Granule, Level},
    operations::Order,
    pool::words,
};
use support::{
    BLOCK, MEMORY, PAGE, Pool, TABLES, VMID,
    pausing::{Other, Pausing},
};

/// A table whose entry for the first 2M is locked, and what the other walker makes of it the third
/// time that somebody looks.
struct Met {
    pool: Pool,
    table: Stage2,
    entry: EntryAddress,
}

impl Met {
    fn new(policy: Policy) -> Self {
        let geometry = Geometry::new(Granule::K4, 40).unwrap();
        let pool = Pool::new(TABLES, &geometry, words(16 * 512), words(32)).unwrap();
        let features = Features {
            fwb: true,
            dic: true,
            ..Features::default()
        };
        let mut table = Stage2::new(geometry, features, policy, VMID, pool.root());
        let mut memcache = Memcache::new();
        memcache.top_up(&Offline(&pool), 4, 8);
        let request = MapRequest::new(Ipa(0), MEMORY, BLOCK, Attributes::READ);
        table.map(&Offline(&pool), &mut memcache, &request).unwrap();
        memcache.drain(&Offline(&pool));
        let level_2 = pool.load(pool.root().entry(0));
        let entry = level_2.next_table().unwrap().entry(0);
        pool.store(entry, Descriptor::LOCKED, Order::Plain);
        Self { pool, table, entry }
    }

    fn leaf(&self, level: u8, attributes: Attributes) -> Descriptor {
        Descriptor::leaf(MEMORY, Level::new(level).unwrap(), attributes, true)
    }

    /// Does something while another walker, after two looks, stores this. Gives how often it was
    /// looked.
    fn while_other_stores<T>(
        &self,
        new: Descriptor,
        act: impl Fn(&Pausing<'_>, &mut Memcache) -> T,
    ) -> (T, u32) {
        let ops = Pausing {
            pool: Offline(&self.pool),
            other: Other {
                entry: self.entry,
                new,
                after: 2,
            },
            pauses: Cell::new(0),
        };
        let mut memcache = Memcache::new();
        memcache.top_up(&ops, 4, 8);
        let result = act(&ops, &mut memcache);
        (result, ops.pauses.get())
    }
}

fn page(ipa: u64, attributes: Attributes) -> MapRequest {
    MapRequest::new(Ipa(ipa), MEMORY + ipa, PAGE, attributes)
}

/// 6.12 as it is and waiting, so that nothing else differs.
const WAITS: Policy = Policy::LINUX_6_12_WAIT;

#[test]
fn a_table_that_comes_is_descended_into() {
    let met = Met::new(WAITS);
    let child = met.pool.allocate().unwrap();

    let (done, pauses) = met.while_other_stores(Descriptor::table(child), |ops, memcache| {
        let request = page(5 * PAGE, Attributes::READ);
        met.table.map_shared(ops, memcache, &request)
    });

    assert_eq!((done, pauses), (Ok(()), 2));
    let found = met.pool.load(child.entry(5));
    assert_eq!(found.address(), MEMORY + 5 * PAGE);
}

#[test]
fn a_block_that_serves_ends_the_walk_and_is_not_split() {
    for (has, wants) in [
        (Attributes::READ, Attributes::READ),
        (Attributes::READ_WRITE, Attributes::READ),
    ] {
        let met = Met::new(WAITS);
        let block = met.leaf(2, has);

        let (done, pauses) = met.while_other_stores(block, |ops, memcache| {
            met.table.map_shared(ops, memcache, &page(PAGE, wants))
        });

        assert_eq!((done, pauses), (Err(MapError::Again), 2));
        assert_eq!(met.pool.load(met.entry), block);
    }
}

#[test]
fn a_block_that_does_not_serve_is_split() {
    let met = Met::new(WAITS);

    let (done, _) = met.while_other_stores(met.leaf(2, Attributes::READ), |ops, memcache| {
        let request = page(PAGE, Attributes::READ_WRITE);
        met.table.map_shared(ops, memcache, &request)
    });

    assert_eq!(done, Ok(()));
    let table = met.pool.load(met.entry).next_table().unwrap();
    let written = met.pool.load(TableAddress(table.0).entry(1));
    assert!(written.attributes().write);
}

#[test]
fn a_block_that_is_wanted_is_waited_for() {
    let met = Met::new(WAITS);
    let block = met.leaf(2, Attributes::READ);
    let request = MapRequest::new(Ipa(0), MEMORY, BLOCK, Attributes::READ);

    let (done, pauses) = met.while_other_stores(block, |ops, memcache| {
        met.table.map_shared(ops, memcache, &request)
    });

    assert_eq!((done, pauses), (Err(MapError::Again), 2));
    assert_eq!(met.pool.load(met.entry), block);
}

#[test]
fn so_is_a_leaf_whose_permissions_are_to_grow() {
    let met = Met::new(WAITS);

    let (done, pauses) = met.while_other_stores(met.leaf(2, Attributes::READ), |ops, _| {
        met.table
            .relax_shared(ops, Ipa(PAGE), Attributes::READ_WRITE)
    });

    assert_eq!((done, pauses), (Ok(()), 2));
    assert!(met.pool.load(met.entry).attributes().write);
}

#[test]
fn the_wait_is_bounded() {
    let met = Met::new(WAITS);

    let (done, pauses) = met.while_other_stores(Descriptor::LOCKED, |ops, memcache| {
        let request = page(PAGE, Attributes::READ);
        met.table.map_shared(ops, memcache, &request)
    });

    assert_eq!((done, pauses), (Err(MapError::Again), 64));
}

#[test]
fn who_does_not_wait_has_the_guest_fault_again() {
    let met = Met::new(Policy::LINUX_6_12);
    let block = met.leaf(2, Attributes::READ);

    let (mapped, pauses) = met.while_other_stores(block, |ops, memcache| {
        let request = page(PAGE, Attributes::READ);
        met.table.map_shared(ops, memcache, &request)
    });
    let (relaxed, _) = met.while_other_stores(block, |ops, _| {
        met.table.relax_shared(ops, Ipa(PAGE), Attributes::READ)
    });

    assert_eq!((mapped, pauses), (Err(MapError::Again), 0));
    assert_eq!(relaxed, Err(MapError::Again));
}
