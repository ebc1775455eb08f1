// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The contiguous hint: where pages get it, and that whatever changes one of them takes it from the
//! run first. The checker is on throughout; that a change which forgets this is caught is in
//! `known_bugs.rs` and `mutation.rs`.
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod support;

use std::sync::Mutex;

use granule_stage2::{
    Access, Features, Ipa, MapRequest, Memcache, Offline, PhysAddr, Policy, Stage2,
    check::{Checker, Recorder},
    descriptor::Attributes,
    geometry::{Geometry, Granule},
    pool::words,
};
use support::{BLOCK, Cpu, PAGE, Pool, TABLES, TestVm, VMID, Vcpu};

/// Pages with the hint among the first `pages`, after one exclusive map of as many.
fn hinted(policy: Policy, granule: Granule, phys: PhysAddr, pages: u64) -> u64 {
    let geometry = Geometry::new(granule, 40).unwrap();
    let per_table = usize::try_from(granule.entries()).unwrap();
    let pool = Pool::new(TABLES, &geometry, words(32 * per_table), words(64)).unwrap();
    let (ops, mut memcache) = (Offline(&pool), Memcache::new());
    let mut table = Stage2::new(geometry, Features::default(), policy, VMID, pool.root());
    memcache.top_up(&ops, 4, 8);
    let size = pages * granule.size();
    let request = MapRequest {
        largest: granule.size(),
        ..MapRequest::new(Ipa(0), phys, size, Attributes::READ)
    };

    table.map(&ops, &mut memcache, &request).unwrap();

    (0..pages)
        .filter(|page| {
            let (leaf, _) = table.look_up(&ops, Ipa(page * granule.size()));
            leaf.is_contiguous()
        })
        .count() as u64
}

#[test]
fn pages_get_the_hint_where_they_fill_a_run_of_their_granule() {
    let granule = Policy::GRANULE;
    let phys = PhysAddr(0x1_0000_0000);

    assert_eq!(hinted(granule, Granule::K4, phys, 16 * 3 + 7), 16 * 3);
    assert_eq!(hinted(granule, Granule::K16, phys, 128 + 5), 128);
    assert_eq!(hinted(granule, Granule::K64, phys, 63), 32);
    assert_eq!(hinted(granule, Granule::K4, phys + PAGE, 64), 0);
    assert_eq!(hinted(Policy::LINUX_6_12, Granule::K4, phys, 64), 0);
}

type Guest<'a> = Vcpu<'a, Recorder<'a, Cpu<'a>, Checker>, Checker>;

/// What is left of the hint, of 512 pages, after something is done to them.
fn left_after(policy: Policy, act: impl FnOnce(&mut Guest<'_>)) -> usize {
    let vm = <TestVm>::new(policy, Features::default(), 1, 4);
    let checker = Mutex::new(Checker::new(vm.setup));
    let recorder = || Recorder::new(vm.cpu(0), 0, &checker);
    let mut guest: Guest<'_> = Vcpu::new(&vm, recorder(), recorder());
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

#[test]
fn a_page_that_changes_takes_the_hint_from_its_run_alone() {
    let at = 3 * BLOCK + 21 * PAGE;
    let left = |act: &dyn Fn(&mut Guest<'_>)| left_after(Policy::GRANULE, act);

    assert_eq!(left(&|_| ()), 512);
    // A shared walker gives way to one that is alone.
    assert_eq!(
        left(&|g| assert!(g.touch(at, Access::Fetch).unwrap() > 0)),
        496
    );
    assert_eq!(left(&|g| g.unmap(at, PAGE)), 496);
    // Whole runs in the middle, parts of runs at the ends.
    assert_eq!(left(&|g| g.unmap(at, 64 * PAGE)), 432);
    assert_eq!(left(&|g| g.unmap(3 * BLOCK, BLOCK)), 0);
}

#[test]
fn what_changes_all_of_a_run_alike_leaves_the_hint() {
    let at = 3 * BLOCK + 21 * PAGE;
    let left = |act: &dyn Fn(&mut Guest<'_>)| left_after(Policy::GRANULE, act);

    // The access flag says nothing about the others.
    assert_eq!(left(&|g| g.age(at, PAGE)), 512);
    assert_eq!(left(&|g| g.set_logging(true)), 512);
    let first_write = |g: &mut Guest<'_>| {
        g.set_logging(true);
        g.touch(at, Access::Write).unwrap();
    };
    assert_eq!(left(&first_write), 496);
}

#[test]
fn runs_are_broken_whole_whatever_fits_into_a_batch() {
    for most in [1, 16, 17, 64] {
        let policy = Policy {
            unmap: granule_stage2::Unmap::Batch(most),
            ..Policy::GRANULE
        };

        let left = left_after(policy, |g| g.unmap(3 * BLOCK + 8 * PAGE, 100 * PAGE));

        assert_eq!(left, 512 - 112, "batches of {most}");
    }
}
