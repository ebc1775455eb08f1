// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Changes of a block: of its size, with and without a break, and of its memory type.
#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::sync::Mutex;

use granule_stage2::{
    BbmLevel, Features, Ipa, MapRequest, Policy,
    check::{Action, Event, Recorder, StoreKind},
    descriptor::{Attributes, Descriptor, MemoryType},
    epoch::EpochReclaim,
    geometry::{Geometry, Granule},
    operations::Tlbi,
};
use support::{ALL_FEATURES, BLOCK, MEMORY, PAGE, fixture_with, pool_ops};

fn request(ipa: u64, size: u64) -> MapRequest {
    MapRequest::new(Ipa(ipa), MEMORY + ipa, size, Attributes::READ_WRITE)
}

/// Change of a table.
enum Change {
    Split,
    Map(MapRequest),
    MapShared(MapRequest),
}

/// Returns the actions of a change after a map.
fn actions_of(features: Features, first: &MapRequest, change: Change) -> Vec<Action> {
    let geometry = Geometry::new(Granule::K4, 39).unwrap();
    let (pool, mut table, mut memcache) = fixture_with(geometry, features, Policy::GRANULE, 32);
    let (reclaim, events) = (EpochReclaim::new(1), Mutex::new(Vec::<Event>::new()));
    let ops = Recorder::new(pool_ops(&pool, &reclaim, 0), 0, &events);
    table.map(&ops, &mut memcache, first).unwrap();
    let before = events.lock().unwrap().len();
    match change {
        Change::Split => table.split(&ops, &mut memcache, Ipa(0), BLOCK),
        Change::Map(request) => table.map(&ops, &mut memcache, &request),
        Change::MapShared(request) => table.map_shared(&ops, &mut memcache, &request),
    }
    .unwrap();
    events.into_inner().unwrap().drain(before..).map(|event| event.action).collect()
}

/// Returns the stores of a shared walker that coalesces a table of pages into a block.
fn coalesce_stores(bbm: BbmLevel, write: bool) -> Vec<(Descriptor, Descriptor)> {
    let pages = MapRequest { max_leaf_size: PAGE, ..request(0, BLOCK) };
    let attributes = Attributes { write, ..Attributes::READ };
    let block = Change::MapShared(MapRequest { attributes, ..request(0, BLOCK) });
    let actions = actions_of(Features { bbm, ..ALL_FEATURES }, &pages, block);
    let stored = actions.into_iter().filter_map(|action| match action {
        Action::Store { old, new, .. } => Some((old, new)),
        _ => None,
    });
    stored.collect()
}

#[test]
fn a_split_with_nt_ends_with_an_invalidation_of_the_block() {
    for (bbm, invalidations) in [(BbmLevel::L3, 1), (BbmLevel::L2, 2), (BbmLevel::L1, 2)] {
        let actions =
            actions_of(Features { bbm, ..ALL_FEATURES }, &request(0, BLOCK), Change::Split);

        let is_tlbi = |action: &Action| matches!(action, Action::Tlbi(Tlbi::Ipa { .. }));
        let is_link =
            |action: &Action| matches!(action, Action::Store { kind: StoreKind::Release, .. });
        let link = actions.iter().rposition(is_link).unwrap();
        assert_eq!(actions.iter().filter(|action| is_tlbi(action)).count(), invalidations);
        assert!(actions[link..].iter().any(is_tlbi), "{bbm:?}");
    }
}

#[test]
fn memory_that_becomes_uncached_is_cleaned_with_fwb_too() {
    for fwb in [false, true] {
        let features = Features { fwb, ..ALL_FEATURES };
        for memory in [MemoryType::Device, MemoryType::NonCacheable] {
            let attributes = Attributes { memory, ..Attributes::READ_WRITE };
            let uncached = Change::Map(MapRequest { attributes, ..request(0, BLOCK) });
            let actions = actions_of(features, &request(0, BLOCK), uncached);

            let clean = Action::CleanInvalidate { phys: MEMORY, size: BLOCK };
            let at = actions.iter().position(|action| *action == clean).unwrap();
            let makes =
                |action: &Action| matches!(action, Action::Store { new, .. } if new.is_valid());
            let make = actions.iter().position(makes).unwrap();
            assert!(at < make, "{memory:?}, FWB {fwb}");
        }
    }
}

#[test]
fn coalescing_needs_no_break_with_bbm_3_and_equal_permissions() {
    let breaks = |bbm, write| {
        let stores = coalesce_stores(bbm, write);
        assert!(!stores.is_empty());
        stores.iter().any(|(_, new)| !new.is_valid())
    };

    assert!(!breaks(BbmLevel::L3, true));
    // With FEAT_BBM level 2, nT needs two stores. A change of permissions needs a break.
    assert!(breaks(BbmLevel::L2, true) && breaks(BbmLevel::L1, true) && breaks(BbmLevel::L0, true));
    assert!(breaks(BbmLevel::L3, false));
}
