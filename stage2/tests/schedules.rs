// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Random operations of several CPUs under seeded schedules, with the checker on: no correct policy
//! violates a rule in any of them. A seed fixes the schedule, so a failure can be repeated.
//!
//! A million schedules, or `GRANULE_ORDERS`:
//! `cargo test --release -p granule-stage2 --test schedules -- --ignored --nocapture`

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::{
    ops::Range,
    sync::{Arc, Mutex},
};

use granule_stage2::{Features, Policy, check::Hooked};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner, scheduler::RandomScheduler};
use support::{
    features, generator,
    recording_checker::RecordingChecker,
    test_vm::TestVm,
    yielding::{Yielding, YieldingLock},
};

/// Returns the policy and kind of CPU of a seed: all take turns.
fn configuration(seed: u64) -> (&'static str, Policy, Features) {
    let all = Policy::PRESETS
        .iter()
        .flat_map(|(name, policy)| features().map(|features| (*name, *policy, features)));
    let count = 3 * Policy::PRESETS.len();
    let index = usize::try_from(seed).unwrap() % count;
    all.cycle().nth(index).unwrap()
}

fn run(seed: u64, cpus: u8, steps: u64) {
    let (name, policy, features) = configuration(seed);
    let blocks = 2 + u64::from(cpus) / 2;
    let vm = TestVm::<YieldingLock>::new(policy, features, cpus, blocks);
    let checker = Arc::new(Mutex::new(RecordingChecker::new(vm.setup)));
    let vm = Arc::new(vm);
    let threads: Vec<_> = (0..cpus)
        .map(|cpu| {
            let (vm, checker) = (Arc::clone(&vm), Arc::clone(&checker));
            shuttle::thread::spawn(move || {
                let mut vcpu =
                    vm.vcpu_with(cpu, &*checker, |inner| Hooked { inner, hook: Yielding });
                let mut random = generator(seed.wrapping_mul(1000) + u64::from(cpu));
                (0..steps).for_each(|_| vcpu.random_step(&mut random));
                vcpu.memcache.drain(&vcpu.ops);
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    vm.vcpu(0, &*checker).finish();
    checker.lock().unwrap().assert_clean(name, &policy, seed);
    vm.assert_no_table_lost(name);
}

fn run_schedules(seeds: Range<u64>, cpus: u8, steps: u64) {
    let mut config = Config::new();
    config.max_steps = MaxSteps::None;
    config.stack_size = 1 << 18;
    config.failure_persistence = FailurePersistence::None;
    for seed in seeds {
        let scheduler = RandomScheduler::new_from_seed(seed, 1);
        Runner::new(scheduler, config.clone()).run(move || run(seed, cpus, steps));
    }
}

#[test]
fn schedules_of_four_cpus_violate_no_rule() {
    run_schedules(0..45, 4, 15);
}

#[test]
fn schedules_of_eight_cpus_violate_no_rule() {
    run_schedules(1000..1006, 8, 8);
}

#[test]
#[ignore = "takes minutes: a million schedules on all cores; GRANULE_ORDERS sets another number"]
fn a_million_schedules_violate_no_rule() {
    let all = std::env::var("GRANULE_ORDERS").map_or(1_000_000, |all| all.parse().unwrap());
    let cores = std::thread::available_parallelism().unwrap().get() as u64;
    let start = std::time::Instant::now();
    std::thread::scope(|scope| {
        for core in 0..cores {
            let seeds = all * core / cores..all * (core + 1) / cores;
            scope.spawn(move || run_schedules(seeds, 3, 4));
        }
    });
    println!("{all} schedules in {:?}", start.elapsed());
}
