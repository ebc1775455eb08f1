// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Random operations of several threads with the checker on: no correct policy violates a rule.
//!
//! A million for each policy and kind of CPU:
//! `cargo test -p granule-stage2 --test random -- --ignored --nocapture`
//!
//! Threads make each run different, so a run that fails writes its trace to a file.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::{ops::Range, sync::Mutex};

use granule_stage2::{
    CmoPlacement, Coalesce, ExistingLeaf, Features, Locking, Policy, TopUp, Unmap,
};
use support::{features, generator, recording_checker::RecordingChecker, test_vm::TestVm};

const CPUS: u8 = 4;

/// Runs `steps` on each of the CPUs.
fn run(name: &str, policy: Policy, features: Features, seed: u64, steps: u64) {
    let vm = <TestVm>::new(policy, features, CPUS, 6);
    let checker = Mutex::new(RecordingChecker::new(vm.setup));
    std::thread::scope(|scope| {
        for cpu in 0..CPUS {
            let (vm, checker) = (&vm, &checker);
            scope.spawn(move || {
                let mut vcpu = vm.vcpu(cpu, checker);
                let mut random = generator(seed.wrapping_mul(1000) + u64::from(cpu));
                (0..steps).for_each(|_| vcpu.random_step(&mut random));
                vcpu.memcache.drain(&vcpu.ops);
            });
        }
    });
    vm.vcpu(0, &checker).finish();
    checker.into_inner().unwrap().assert_clean(name, &policy, seed);
    vm.assert_no_table_lost(name);
}

fn run_all(
    policies: impl IntoIterator<Item = (&'static str, Policy)>,
    steps: u64,
    seeds: Range<u64>,
) {
    for (name, policy) in policies {
        for features in features() {
            for seed in seeds.clone() {
                run(name, policy, features, seed, steps);
            }
        }
    }
}

#[test]
fn thousands_of_operations_violate_no_rule() {
    // Miri is slow and looks for data races: few steps suffice.
    let (steps, seeds) = if cfg!(miri) { (4, 1..2) } else { (200, 1..3) };
    run_all(Policy::PRESETS, steps, seeds);
}

/// Changes one choice of a policy.
macro_rules! choices {
    ($($name:literal: $base:ident { $($field:ident: $value:expr),* };)*) => {
        [$(($name, Policy { $($field: $value,)* ..Policy::$base }),)*]
    };
}

#[test]
#[cfg_attr(miri, ignore = "takes hours under Miri")]
fn every_choice_of_a_policy_violates_no_rule_by_itself() {
    let choices = choices! {
        "fault-path": LINUX_6_12_SERIES { cmo: CmoPlacement::FaultPath };
        "between-break-and-make": LINUX_6_12_SERIES { cmo: CmoPlacement::BetweenBreakAndMake };
        "before-break": LINUX_6_12_SERIES { cmo: CmoPlacement::BeforeBreak };
        "free-first": LINUX_6_12_SERIES { coalesce: Coalesce::FreeFirst };
        "install-without-cmo": LINUX_6_12_SERIES { coalesce: Coalesce::InstallWithoutCmo };
        "replace": LINUX_6_12_SERIES { existing_leaf: ExistingLeaf::Replace };
        "retry": LINUX_6_12_SERIES { existing_leaf: ExistingLeaf::Retry };
        "relax": LINUX_6_12_SERIES { existing_leaf: ExistingLeaf::Relax };
        "top-up-always": LINUX_6_12_SERIES { top_up: TopUp::Always };
        "no-populate-on-split": LINUX_6_12_SERIES { populate_on_split: false };
        "no-recovery": LINUX_6_12_SERIES { recover_blocks: false };
        "map-again": LINUX_6_12_SERIES { skip_mapped: false };
        "refault": LINUX_6_12_SERIES { locked_entry_turns: 0 };
        "no-local-relax": LINUX_6_12_SERIES { local_relax: false };
        "no-range-invalidation": LINUX_6_12_SERIES { range_invalidation: false };
        "deferred": LINUX_6_12_SERIES { unmap: Unmap::Deferred };
        "one-by-one": LINUX_6_12_SERIES { unmap: Unmap::Batch(1) };
        "sixteen": LINUX_6_12_SERIES { unmap: Unmap::Batch(16) };
        "whole-tables": LINUX_6_12_SERIES { unmap: Unmap::Tables(16) };
        "no-references": LINUX_6_12_SERIES { count_references: false };
        "contiguous": LINUX_6_12_SERIES { contiguous: true };
        "bbm": LINUX_6_12_SERIES { use_bbm: true };
        "exclusive": LINUX_6_12_SERIES { locking: Locking::Exclusive };
        "shared-relax": LINUX_6_12_SERIES { locking: Locking::SharedRelax };
    };
    run_all(choices, 200, 1..3);
}

#[test]
#[ignore = "takes minutes: a million operations a policy"]
fn a_million_operations_violate_no_rule() {
    run_all(Policy::PRESETS, 250_000, 42..43);
}
