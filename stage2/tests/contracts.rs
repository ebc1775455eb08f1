// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the engine guarantees to its callers, and requires of them: empty ranges.
#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use granule_stage2::{Ipa, MapRequest, Stage2, check::Action, descriptor::Attributes};
use support::{
    ALL_FEATURES, BLOCK, MEMORY, PAGE,
    checked::{run_checked, with_lock},
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
                table.recover_blocks(ops, ipa, 0, BLOCK).unwrap();
                table.map(ops, memcache, &request(ipa.0, 0)).unwrap();
            }
        });

        assert_eq!(leaves(table), before);
    });
}
