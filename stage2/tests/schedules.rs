// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Random operations of CPUs that take turns, with the checker on: no correct policy breaks a rule,
//! whatever the order of steps. A seed fixes the order, so a run that fails can be had again.
//!
//! A million orders, or as many as `GRANULE_ORDERS` says:
//! `cargo test --release -p granule-stage2 --test schedules -- --ignored --nocapture`

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod support;

use std::{
    ops::Range,
    sync::{Arc, Mutex},
};

use granule_stage2::{Features, Policy, check::Recorder};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner, scheduler::RandomScheduler};
use support::{
    TestVm, Vcpu, generator,
    recording_checker::{RecordingChecker, features},
    step,
    stepping::{Stepping, TurnLock},
};

struct Run {
    name: &'static str,
    policy: Policy,
    features: Features,
    seed: u64,
    cpus: u8,
    steps: u64,
}

impl Run {
    /// One policy and kind of CPU after the other.
    fn of(seed: u64, cpus: u8, steps: u64) -> Self {
        let all = Policy::PRESETS
            .iter()
            .flat_map(|preset| features().map(|features| (*preset, features)));
        let count = 3 * Policy::PRESETS.len();
        let ((name, policy), features) = all
            .cycle()
            .nth(usize::try_from(seed).unwrap() % count)
            .unwrap();
        Self {
            name,
            policy,
            features,
            seed,
            cpus,
            steps,
        }
    }

    fn go(&self) {
        let vm = TestVm::<TurnLock>::new(
            self.policy,
            self.features,
            self.cpus,
            2 + u64::from(self.cpus) / 2,
        );
        let recording_checker = Arc::new(Mutex::new(RecordingChecker::new(vm.setup)));
        let vm = Arc::new(vm);
        let (seed, steps) = (self.seed, self.steps);
        let threads: Vec<_> = (0..self.cpus)
            .map(|cpu| {
                let (vm, recording_checker) = (Arc::clone(&vm), Arc::clone(&recording_checker));
                shuttle::thread::spawn(move || {
                    let ops = Stepping(Recorder::new(vm.cpu(cpu), cpu, &*recording_checker));
                    let told = Recorder::new(vm.cpu(cpu), cpu, &*recording_checker);
                    let mut vcpu = Vcpu::new(&*vm, ops, told);
                    let mut random = generator(seed.wrapping_mul(1000) + u64::from(cpu));
                    (0..steps).for_each(|_| step(&mut vcpu, &mut random));
                    vcpu.memcache.drain(&vcpu.ops);
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        let recorder = || Recorder::new(vm.cpu(0), 0, &*recording_checker);
        Vcpu::new(&*vm, recorder(), recorder()).finish();
        recording_checker
            .lock()
            .unwrap()
            .expect_good(self.name, &self.policy, self.seed);
        assert_eq!(
            vm.pool.available(),
            vm.tables() - 2,
            "{}: tables are lost",
            self.name
        );
    }
}

fn orders(seeds: Range<u64>, cpus: u8, steps: u64) {
    let mut config = Config::new();
    config.max_steps = MaxSteps::None;
    config.stack_size = 1 << 18;
    config.failure_persistence = FailurePersistence::None;
    for seed in seeds {
        let scheduler = RandomScheduler::new_from_seed(seed, 1);
        Runner::new(scheduler, config.clone()).run(move || Run::of(seed, cpus, steps).go());
    }
}

#[test]
fn no_order_of_steps_breaks_a_rule() {
    orders(0..45, 4, 15);
}

#[test]
fn nor_does_one_of_eight_cpus() {
    orders(1000..1006, 8, 8);
}

#[test]
#[ignore = "takes minutes: a million orders, on every core its share; GRANULE_ORDERS for another number"]
fn a_million_orders_break_no_rule() {
    let all = std::env::var("GRANULE_ORDERS").map_or(1_000_000, |all| all.parse().unwrap());
    let cores = std::thread::available_parallelism().unwrap().get() as u64;
    let start = std::time::Instant::now();
    std::thread::scope(|scope| {
        for core in 0..cores {
            let seeds = all * core / cores..all * (core + 1) / cores;
            scope.spawn(move || orders(seeds, 3, 4));
        }
    });
    println!("{all} orders in {:?}", start.elapsed());
}
