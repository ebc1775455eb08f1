// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Shared walkers that find an entry locked by another walker: they wait for it at every level,
//! whatever they request, and continue with the entry that the other makes. With a policy that does
//! not wait, the guest refaults.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::cell::Cell;

use granule_stage2::{
    EntryAddress, Ipa, MapError, MapRequest, Memcache, NoMaintenance, Operations, Policy, Stage2,
    check::{Call, Hook, Hooked, Reply},
    descriptor::{Attributes, Descriptor},
    geometry::{Geometry, Granule, Level},
    operations::Order,
};
use support::{ALL_FEATURES, BLOCK, MEMORY, PAGE, Pool, fixture_with};

/// Stores an entry as another walker does, at the second pause.
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
            return Reply::Done;
        }
        call.run(inner)
    }
}

type Ops<'a> = Hooked<NoMaintenance<'a, Box<[std::sync::atomic::AtomicU64]>>, OtherWalker>;

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

    /// Runs `act` while another walker stores `new` at the second pause; returns its result and the
    /// number of pauses.
    fn while_other_stores<T>(
        &self,
        new: Descriptor,
        act: impl Fn(&Ops<'_>, &mut Memcache) -> T,
    ) -> (T, u32) {
        let ops = Hooked {
            inner: NoMaintenance(&self.pool),
            hook: OtherWalker { entry: self.entry, new, pauses: Cell::new(0) },
        };
        let mut memcache = Memcache::new();
        memcache.top_up(&ops, 4, 8);
        let result = act(&ops, &mut memcache);
        (result, ops.hook.pauses.get())
    }

    /// Maps memory concurrently with the other walker.
    fn map(
        &self,
        new: Descriptor,
        (ipa, size): (u64, u64),
        attributes: Attributes,
    ) -> (Result<(), MapError>, u32) {
        let request = MapRequest::new(Ipa(ipa), MEMORY + ipa, size, attributes);
        self.while_other_stores(new, |ops, memcache| self.table.map_shared(ops, memcache, &request))
    }

    fn relax(&self, new: Descriptor, by: Attributes) -> (Result<(), MapError>, u32) {
        self.while_other_stores(new, |ops, _| self.table.relax_shared(ops, Ipa(PAGE), by))
    }

    fn load(&self, entry: EntryAddress) -> Descriptor {
        NoMaintenance(&self.pool).load(entry)
    }
}

fn block(attributes: Attributes) -> Descriptor {
    Descriptor::leaf(MEMORY, Level::new(2).unwrap(), attributes, true)
}

/// 6.12 with the wait as the only difference.
const WAITING_POLICY: Policy = Policy::LINUX_6_12_WAIT;
const READ: Attributes = Attributes::READ;
const READ_WRITE: Attributes = Attributes::READ_WRITE;

#[test]
fn a_walker_descends_into_the_table_that_it_waited_for() {
    let locked = LockedEntry::new(WAITING_POLICY);
    let child = locked.pool.allocate().unwrap();

    let done = locked.map(Descriptor::table(child), (5 * PAGE, PAGE), READ);

    assert_eq!(done, (Ok(()), 2));
    let found = locked.load(child.entry(5));
    assert_eq!(found.address(), MEMORY + 5 * PAGE);
}

#[test]
fn a_walker_leaves_a_block_that_permits_the_access_and_an_entry_that_stays_locked() {
    let turns = WAITING_POLICY.locked_entry_turns - 1;
    for (name, policy, new, range, pauses) in [
        ("the same permissions", WAITING_POLICY, block(READ), (PAGE, PAGE), 2),
        ("more permissions", WAITING_POLICY, block(READ_WRITE), (PAGE, PAGE), 2),
        ("a map of the block itself", WAITING_POLICY, block(READ), (0, BLOCK), 2),
        ("the wait is bounded", WAITING_POLICY, Descriptor::LOCKED, (PAGE, PAGE), turns),
        ("no wait", Policy::LINUX_6_12, Descriptor::LOCKED, (PAGE, PAGE), 0),
    ] {
        let locked = LockedEntry::new(policy);

        let done = locked.map(new, range, READ);

        assert_eq!(
            (done, locked.load(locked.entry)),
            ((Err(MapError::Again), pauses), new),
            "{name}"
        );
    }
}

#[test]
fn a_block_that_does_not_permit_the_access_is_split() {
    let locked = LockedEntry::new(WAITING_POLICY);

    let (done, _) = locked.map(block(READ), (PAGE, PAGE), READ_WRITE);

    assert_eq!(done, Ok(()));
    let table = locked.load(locked.entry).next_table().unwrap();
    assert!(locked.load(table.entry(1)).attributes().write);
}

#[test]
fn a_walker_that_relaxes_permissions_waits_for_the_leaf_if_the_policy_says_so() {
    let locked = LockedEntry::new(WAITING_POLICY);

    assert_eq!(locked.relax(block(READ), READ_WRITE), (Ok(()), 2));
    assert!(locked.load(locked.entry).attributes().write);

    let locked = LockedEntry::new(Policy::LINUX_6_12);
    assert_eq!(locked.relax(block(READ), READ), (Err(MapError::Again), 0));
}
