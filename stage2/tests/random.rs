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

use granule_stage2::{Features, Policy, check::Recorder};
use support::{
    Random, Vcpu, World, step,
    witness::{Witness, features},
};

const CPUS: u8 = 4;

/// Runs `steps` on each of the CPUs and gives what was found.
fn run(policy: Policy, features: Features, seed: u64, steps: u64) -> (Witness, World) {
    let world = <World>::new(policy, features, CPUS, 6);
    let witness = Mutex::new(Witness::new(world.setup));
    std::thread::scope(|scope| {
        for cpu in 0..CPUS {
            let (world, witness) = (&world, &witness);
            scope.spawn(move || {
                let ops = Recorder::new(world.cpu(cpu), cpu, witness);
                let told = Recorder::new(world.cpu(cpu), cpu, witness);
                let mut vcpu = Vcpu::new(world, ops, told);
                let mut random = Random(seed.wrapping_mul(1000) + u64::from(cpu));
                for _ in 0..steps {
                    step(&mut vcpu, &mut random);
                }
                vcpu.memcache.drain(&vcpu.ops);
            });
        }
    });
    let ops = Recorder::new(world.cpu(0), 0, &witness);
    let told = Recorder::new(world.cpu(0), 0, &witness);
    Vcpu::new(&world, ops, told).finish();
    (witness.into_inner().unwrap(), world)
}

fn all_policies(steps: u64, seeds: std::ops::Range<u64>) {
    for (name, policy) in Policy::PRESETS {
        for features in features() {
            for seed in seeds.clone() {
                let (witness, world) = run(policy, features, seed, steps);
                witness.expect_good(name, seed);
                assert_eq!(
                    world.pool.available(),
                    world.tables() - 2,
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
    all_policies(steps, seeds);
}

#[test]
#[ignore = "takes minutes: a million operations a policy"]
fn a_million_operations_break_no_rule() {
    all_policies(250_000, 42..43);
}
