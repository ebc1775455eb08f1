// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Random operations of several threads with the checker on: no correct policy breaks a rule.
//!
//! A million for each policy and kind of CPU:
//! `cargo test -p granule-stage2 --test random -- --ignored --nocapture`
//!
//! Threads make no run like the one before, so a run that fails leaves its trace behind.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod support;

use std::sync::Mutex;

use granule_stage2::{
    Coalesce, Features, Locking, Maintenance, Policy, Reserve, SameLeaf, TopUp, Unmap,
    check::Recorder,
};
use support::{
    TestVm, Vcpu, generator,
    recording_checker::{RecordingChecker, features},
    step,
};

const CPUS: u8 = 4;

/// Runs `steps` on each of the CPUs and gives what was found.
fn run(policy: Policy, features: Features, seed: u64, steps: u64) -> (RecordingChecker, TestVm) {
    let vm = <TestVm>::new(policy, features, CPUS, 6);
    let recording_checker = Mutex::new(RecordingChecker::new(vm.setup));
    std::thread::scope(|scope| {
        for cpu in 0..CPUS {
            let (vm, recording_checker) = (&vm, &recording_checker);
            scope.spawn(move || {
                let ops = Recorder::new(vm.cpu(cpu), cpu, recording_checker);
                let told = Recorder::new(vm.cpu(cpu), cpu, recording_checker);
                let mut vcpu = Vcpu::new(vm, ops, told);
                let mut random = generator(seed.wrapping_mul(1000) + u64::from(cpu));
                for _ in 0..steps {
                    step(&mut vcpu, &mut random);
                }
                vcpu.memcache.drain(&vcpu.ops);
            });
        }
    });
    let ops = Recorder::new(vm.cpu(0), 0, &recording_checker);
    let told = Recorder::new(vm.cpu(0), 0, &recording_checker);
    Vcpu::new(&vm, ops, told).finish();
    (recording_checker.into_inner().unwrap(), vm)
}

fn all(
    policies: impl IntoIterator<Item = (&'static str, Policy)>,
    steps: u64,
    seeds: std::ops::Range<u64>,
) {
    for (name, policy) in policies {
        for features in features() {
            for seed in seeds.clone() {
                let (recording_checker, vm) = run(policy, features, seed, steps);
                recording_checker.expect_good(name, &policy, seed);
                assert_eq!(
                    vm.pool.available(),
                    vm.tables() - 2,
                    "{name}: tables are lost"
                );
            }
        }
    }
}

#[test]
fn thousands_of_operations_break_no_rule() {
    // Under miri, which looks for data races, a few must do.
    let (steps, seeds) = if cfg!(miri) { (4, 1..2) } else { (200, 1..3) };
    all(Policy::PRESETS, steps, seeds);
}

#[test]
#[cfg_attr(miri, ignore = "takes hours there")]
fn every_choice_stands_by_itself() {
    let series = Policy::LINUX_6_12_SERIES;
    all(
        [
            (
                "fault-path",
                Policy {
                    maintenance: Maintenance::FaultPath,
                    ..series
                },
            ),
            (
                "inside-window",
                Policy {
                    maintenance: Maintenance::InsideWindow,
                    ..series
                },
            ),
            (
                "before-break",
                Policy {
                    maintenance: Maintenance::BeforeBreak,
                    ..series
                },
            ),
            (
                "free-first",
                Policy {
                    coalesce: Coalesce::FreeFirst,
                    ..series
                },
            ),
            (
                "install-unready",
                Policy {
                    coalesce: Coalesce::InstallUnready,
                    ..series
                },
            ),
            (
                "remake",
                Policy {
                    same_leaf: SameLeaf::Remake,
                    ..series
                },
            ),
            (
                "retry",
                Policy {
                    same_leaf: SameLeaf::Retry,
                    ..series
                },
            ),
            (
                "widen",
                Policy {
                    same_leaf: SameLeaf::Widen,
                    ..series
                },
            ),
            (
                "always",
                Policy {
                    top_up: TopUp::Always,
                    ..series
                },
            ),
            (
                "missing",
                Policy {
                    reserve: Reserve::Missing,
                    ..series
                },
            ),
            (
                "unpopulated",
                Policy {
                    populate_on_split: false,
                    ..series
                },
            ),
            (
                "unrecovered",
                Policy {
                    recover_blocks: false,
                    ..series
                },
            ),
            (
                "unskipped",
                Policy {
                    skip_mapped: false,
                    ..series
                },
            ),
            (
                "refault",
                Policy {
                    wait_for_locked: false,
                    ..series
                },
            ),
            (
                "broadcast",
                Policy {
                    local_relax: false,
                    ..series
                },
            ),
            (
                "whole-guest",
                Policy {
                    range_invalidation: false,
                    ..series
                },
            ),
            (
                "deferred",
                Policy {
                    unmap: Unmap::Deferred,
                    ..series
                },
            ),
            (
                "one-by-one",
                Policy {
                    unmap: Unmap::Batch(1),
                    ..series
                },
            ),
            (
                "sixteen",
                Policy {
                    unmap: Unmap::Batch(16),
                    ..series
                },
            ),
            (
                "whole-tables",
                Policy {
                    unmap: Unmap::Tables(16),
                    ..series
                },
            ),
            (
                "uncounted",
                Policy {
                    counts_entries: false,
                    ..series
                },
            ),
            (
                "contiguous",
                Policy {
                    contiguous: true,
                    ..series
                },
            ),
            (
                "bbm",
                Policy {
                    use_bbm: true,
                    ..series
                },
            ),
            (
                "exclusive",
                Policy {
                    locking: Locking::Exclusive,
                    ..series
                },
            ),
            (
                "shared-relax",
                Policy {
                    locking: Locking::SharedRelax,
                    ..series
                },
            ),
            (
                "missing-alone",
                Policy {
                    reserve: Reserve::Missing,
                    ..Policy::LINUX_5_10
                },
            ),
            (
                "granule-missing",
                Policy {
                    reserve: Reserve::Missing,
                    ..Policy::GRANULE
                },
            ),
        ],
        200,
        1..3,
    );
}

#[test]
#[ignore = "takes minutes: a million operations a policy"]
fn a_million_operations_break_no_rule() {
    all(Policy::PRESETS, 250_000, 42..43);
}
