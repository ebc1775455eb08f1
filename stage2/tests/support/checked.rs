// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A table of one CPU under the checker.

use std::sync::Mutex;

use granule_stage2::{
    Features, Memcache, Policy, Stage2,
    check::{Checker, Recorder},
    epoch::EpochReclaim,
    geometry::{Geometry, Granule},
    operations::{Note, Operations},
};

use super::{PoolOps, pool, pool_ops, setup, stage2};

pub type CheckedOps<'a> = Recorder<'a, PoolOps<'a>, Checker>;

/// Runs `act` on an empty table. The checker must report no violation.
pub fn run_checked(
    features: Features,
    act: impl FnOnce(&mut Stage2, &CheckedOps<'_>, &mut Memcache),
) {
    let geometry = Geometry::new(Granule::K4, 40).unwrap();
    let (pool, reclaim) = (pool(&geometry, 32), EpochReclaim::new(1));
    let checker = Mutex::new(Checker::new(setup(geometry, features, &pool, 1)));
    let ops = Recorder::new(pool_ops(&pool, &reclaim, 0), 0, &checker);
    let mut table = stage2(geometry, features, Policy::GRANULE, &pool);
    let mut memcache = Memcache::new();
    memcache.top_up(&ops, 4, 8);
    act(&mut table, &ops, &mut memcache);
    assert_eq!(checker.lock().unwrap().violations(), []);
}

pub fn with_lock<T>(ops: &CheckedOps<'_>, act: impl FnOnce() -> T) -> T {
    ops.note(Note::Lock { is_exclusive: true });
    let result = act();
    ops.note(Note::Unlock);
    result
}
