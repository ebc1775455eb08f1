// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Shared walkers that find an entry locked by another walker. At every level and for every
//! request, they wait and continue with the entry that the other walker makes. If the policy does
//! not wait, the guest refaults.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::cell::Cell;

use granule_stage2::{
    EntryAddress, Ipa, MapError, MapRequest, Memcache, NoMaintenance, Operations, Policy, Stage2,
    check::{Call, Hook, HookedOperations, Reply},
    descriptor::{Attributes, Descriptor},
    geometry::{Geometry, Granule, Level},
    operations::Order,
};
use support::{ALL_FEATURES, BLOCK, MEMORY, PAGE, Pool, fixture_with};

/// Stores an entry at the second pause, as another walker would.
struct OtherWalker {
    entry: EntryAddress,
    new: Descriptor,
    pauses: Cell<u32>,
}

impl<O: Operations> Hook<O> for OtherWalker {
    fn call(&self, inner: &O, call: Call) -> Reply {
        if call == Call::Pause {
            self.pauses.set(self.pauses.get() + 1);
            if self.pauses.get() == 2 {
                inner.store(self.entry, self.new, Order::Release);
            }
            return Reply::NoValue;
        }
        call.run(inner)
    }
}

/// A table whose entry for the first 2M is locked.
struct LockedEntry {
    pool: Pool,
    table: Stage2,
    entry: EntryAddress,
}

impl LockedEntry {
    fn new(policy: Policy) -> Self {
        let geometry = Geometry::new(Granule::K4, 40).unwrap();
        let (pool, mut table, mut memcache) = fixture_with(geometry, ALL_FEATURES, policy, 16);
        let request = MapRequest::new(Ipa(0), MEMORY, BLOCK, Attributes::READ);
        let ops = NoMaintenance(&pool);
        table.map(&ops, &mut memcache, &request).unwrap();
        memcache.drain(&ops);
        let level_2 = ops.load(pool.root().entry(0));
        let entry = level_2.next_table().unwrap().entry(0);
        ops.store(entry, Descriptor::LOCKED, Order::Plain);
        Self { pool, table, entry }
    }

    /// Maps or relaxes while another walker stores `new` at the second pause. Returns the result
    /// and the number of pauses.
    fn run(
        &self,
        new: Descriptor,
        (operation, ipa, size, attributes): Request,
    ) -> (Result<(), MapError>, u32) {
        let ops = HookedOperations {
            inner: NoMaintenance(&self.pool),
            hook: OtherWalker { entry: self.entry, new, pauses: Cell::new(0) },
        };
        let mut memcache = Memcache::new();
        memcache.top_up(&ops, 4, 8);
        let request = MapRequest::new(Ipa(ipa), MEMORY + ipa, size, attributes);
        let done = match operation {
            Operation::Map => self.table.map_shared(&ops, &mut memcache, &request),
            Operation::Relax => {
                self.table.relax_shared(&ops, request.ipa, Level::new(2).unwrap(), attributes)
            }
        };
        (done, ops.hook.pauses.get())
    }

    fn load(&self, entry: EntryAddress) -> Descriptor {
        NoMaintenance(&self.pool).load(entry)
    }
}

#[derive(Clone, Copy)]
enum Operation {
    Map,
    Relax,
}

/// Operation, address, size and attributes.
type Request = (Operation, u64, u64, Attributes);

fn block(attributes: Attributes) -> Descriptor {
    Descriptor::leaf(MEMORY, Level::new(2).unwrap(), attributes, true)
}

/// Linux 6.12 that waits for locked entries, without other changes.
const WITH_WAIT: Policy = Policy::LINUX_6_12_WAIT;
const NO_WAIT: Policy = Policy::LINUX_6_12;
const READ: Attributes = Attributes::READ;
const READ_WRITE: Attributes = Attributes::READ_WRITE;
const LOCKED: Descriptor = Descriptor::LOCKED;
const MAP_PAGE: Request = (Operation::Map, PAGE, PAGE, READ);
const MAP_BLOCK: Request = (Operation::Map, 0, BLOCK, READ);

#[test]
fn a_walker_continues_with_the_entry_that_it_waited_for() {
    let reads = WITH_WAIT.locked_entry_reads - 1;
    let again = Err(MapError::Again);
    let relax = |attributes| (Operation::Relax, PAGE, PAGE, attributes);
    for (name, policy, new, request, expected, left) in [
        ("the same permissions", WITH_WAIT, block(READ), MAP_PAGE, (again, 2), block(READ)),
        ("more permissions", WITH_WAIT, block(READ_WRITE), MAP_PAGE, (again, 2), block(READ_WRITE)),
        ("a map of the block itself", WITH_WAIT, block(READ), MAP_BLOCK, (again, 2), block(READ)),
        ("the wait is bounded", WITH_WAIT, LOCKED, MAP_PAGE, (again, reads), LOCKED),
        ("no wait", NO_WAIT, LOCKED, MAP_PAGE, (again, 0), LOCKED),
        ("relax", WITH_WAIT, block(READ), relax(READ_WRITE), (Ok(()), 2), block(READ_WRITE)),
        ("relax without a wait", NO_WAIT, block(READ), relax(READ), (again, 0), LOCKED),
    ] {
        let locked = LockedEntry::new(policy);

        let done = locked.run(new, request);

        assert_eq!((done, locked.load(locked.entry)), (expected, left), "{name}");
    }
}

#[test]
fn a_walker_descends_into_the_table_that_it_waited_for() {
    let locked = LockedEntry::new(WITH_WAIT);
    let child = locked.pool.allocate().unwrap();

    let done = locked.run(Descriptor::table(child), (Operation::Map, 5 * PAGE, PAGE, READ));

    assert_eq!(done, (Ok(()), 2));
    assert_eq!(locked.load(child.entry(5)).address(), MEMORY + 5 * PAGE);
}

#[test]
fn a_block_that_does_not_permit_the_access_is_split() {
    let locked = LockedEntry::new(WITH_WAIT);

    let (done, _) = locked.run(block(READ), (Operation::Map, PAGE, PAGE, READ_WRITE));

    assert_eq!(done, Ok(()));
    let table = locked.load(locked.entry).next_table().unwrap();
    assert!(locked.load(table.entry(1)).attributes().write);
}
