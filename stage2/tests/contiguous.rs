// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The Contiguous bit: which pages receive it, and that a change to one page removes it from the
//! run first. The checker is on; that it reports a change which leaves the bit is shown by
//! `known_bugs.rs` and `mutation.rs`.
#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::sync::Mutex;

use granule_stage2::{
    Access, Features, Ipa, MapRequest, Memcache, NoMaintenance, PhysAddr, Policy, Stage2, Unmap,
    check::{Checker, Recorder},
    descriptor::Attributes,
    geometry::{Geometry, Granule},
};
use support::{
    BLOCK, Cpu, PAGE, pool, stage2,
    test_vm::{TestVm, Vcpu},
};

/// Returns how many of the first `pages` have the bit after one exclusive map of them.
fn contiguous_pages(policy: Policy, granule: Granule, phys: PhysAddr, pages: u64) -> usize {
    let geometry = Geometry::new(granule, 40).unwrap();
    let pool = pool(&geometry, 32);
    let (ops, mut memcache) = (NoMaintenance(&pool), Memcache::new());
    let mut table = stage2(geometry, Features::default(), policy, &pool);
    memcache.top_up(&ops, 4, 8);
    let size = pages * granule.size();
    let request = MapRequest {
        largest: granule.size(),
        ..MapRequest::new(Ipa(0), phys, size, Attributes::READ)
    };

    table.map(&ops, &mut memcache, &request).unwrap();

    let leaf = |page| table.look_up(&ops, Ipa(page * granule.size())).0;
    (0..pages).filter(|page| leaf(*page).is_contiguous()).count()
}

#[test]
fn pages_that_fill_an_aligned_run_receive_the_bit() {
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

type Guest<'a> = Vcpu<'a, Recorder<'a, Cpu<'a>, Checker>, Checker>;

/// Returns how many of 512 contiguous pages have the bit after `act`.
fn left_after(policy: Policy, act: impl FnOnce(&mut Guest<'_>)) -> usize {
    let vm = <TestVm>::new(policy, Features::default(), 1, 4);
    let checker = Mutex::new(Checker::new(vm.setup));
    let mut guest = vm.vcpu(0, &checker);
    guest.populate(3);

    act(&mut guest);

    let pages = (0..512).map(|page| Ipa(3 * BLOCK + page * PAGE));
    let left = pages
        .filter(|ipa| {
            let look = |table: &Stage2| table.look_up(&guest.ops, *ipa).0;
            vm.mmu.shared(&guest.ops, look).is_contiguous()
        })
        .count();
    guest.finish();
    let checker = checker.into_inner().unwrap();
    assert_eq!(checker.violations(), []);
    left
}

const CHANGED: u64 = 3 * BLOCK + 21 * PAGE;

#[test]
fn a_change_removes_the_bit_from_the_runs_that_it_touches() {
    type Act = fn(&mut Guest<'_>);
    let acts: [(&str, Act, usize); 8] = [
        ("nothing", |_| (), 512),
        ("an execute permission", |g| assert!(g.touch(CHANGED, Access::Fetch).unwrap() > 0), 496),
        ("unmap of one page", |g| g.unmap(CHANGED, PAGE), 496),
        // Whole runs in the middle, parts of runs at the ends.
        ("unmap of 64 pages", |g| g.unmap(CHANGED, 64 * PAGE), 432),
        ("unmap of the block", |g| g.unmap(3 * BLOCK, BLOCK), 0),
        // Entries of a run may differ in the access flag.
        ("ageing", |g| g.age(CHANGED, PAGE), 512),
        ("write protection of all", |g| g.set_logging(true), 512),
        (
            "the first write under dirty logging",
            |g| {
                g.set_logging(true);
                g.touch(CHANGED, Access::Write).unwrap();
            },
            496,
        ),
    ];
    for (name, act, left) in acts {
        assert_eq!(left_after(Policy::GRANULE, act), left, "{name}");
    }
}

#[test]
fn a_run_is_broken_whole_with_every_batch_size() {
    for most in [1, 16, 17, 64] {
        let policy = Policy { unmap: Unmap::Batch(most), ..Policy::GRANULE };

        let left = left_after(policy, |g| g.unmap(3 * BLOCK + 8 * PAGE, 100 * PAGE));

        assert_eq!(left, 512 - 112, "batches of {most}");
    }
}
