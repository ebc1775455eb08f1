// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Random operations of several threads with the checker on: no correct policy breaks a rule.
//!
//! A million, in about a minute: `cargo test --release -p granule-stage2 --test random -- --ignored`

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod support;

use std::{collections::BTreeSet, sync::Mutex};

use granule_stage2::{
    Features, Policy,
    check::{Checker, Recorder, Rule},
};
use support::{Random, Vcpu, World, step};

const CPUS: u8 = 4;

/// Runs `steps` on each of the CPUs and gives what was found.
fn run(policy: Policy, features: Features, seed: u64, steps: u64) -> (Checker, World) {
    let world = World::new(policy, features, CPUS, 6);
    let checker = Mutex::new(Checker::new(world.setup));
    std::thread::scope(|scope| {
        for cpu in 0..CPUS {
            let (world, checker) = (&world, &checker);
            scope.spawn(move || {
                let ops = Recorder::new(world.cpu(cpu), cpu, checker);
                let told = Recorder::new(world.cpu(cpu), cpu, checker);
                let mut vcpu = Vcpu::new(world, ops, told);
                let mut random = Random(seed.wrapping_mul(1000) + u64::from(cpu));
                for _ in 0..steps {
                    step(&mut vcpu, &mut random);
                }
                vcpu.memcache.drain(&vcpu.ops);
            });
        }
    });
    let ops = Recorder::new(world.cpu(0), 0, &checker);
    let told = Recorder::new(world.cpu(0), 0, &checker);
    Vcpu::new(&world, ops, told).finish();
    (checker.into_inner().unwrap(), world)
}

/// What the kernels themselves get wrong by these rules, found by this test.
///
/// Where a split leaves the block's other parts empty, they lose their mapping without maintenance;
/// if the host takes the memory before the guest comes back to them, what a guest wrote past the
/// caches may be hidden by a line of the host's. And in 5.10 a block that is put together for a
/// permission fault is not made ready at all (the series' patch 4 says so too).
fn known(name: &str) -> BTreeSet<Rule> {
    match name {
        "granule" => BTreeSet::new(),
        "linux-5.10" => BTreeSet::from([
            Rule::ReturnedUnclean,
            Rule::UncleanReachable,
            Rule::StaleInstructions,
        ]),
        _ => BTreeSet::from([Rule::ReturnedUnclean]),
    }
}

fn all_policies(steps: u64, seeds: std::ops::Range<u64>) {
    let plain = Features::default();
    let rich = Features {
        tlb_range: true,
        bbm: 3,
        dic: true,
        fwb: true,
    };
    let middle = Features {
        tlb_range: true,
        bbm: 1,
        ..plain
    };
    for (name, policy) in Policy::PRESETS {
        for features in [plain, middle, rich] {
            for seed in seeds.clone() {
                let (checker, world) = run(policy, features, seed, steps);
                let unexpected: Vec<_> = checker
                    .violations()
                    .iter()
                    .filter(|violation| !known(name).contains(&violation.rule))
                    .take(5)
                    .collect();
                assert!(
                    unexpected.is_empty(),
                    "{name}, {features:?}, seed {seed}: {}",
                    unexpected
                        .iter()
                        .map(|v| format!("\n{v}"))
                        .collect::<String>()
                );
                let total = 64 + 64 * usize::from(CPUS) + 4 * 6;
                assert_eq!(world.pool.available(), total - 2, "{name}: tables are lost");
            }
        }
    }
}

#[test]
fn thousands_of_operations_break_no_rule() {
    all_policies(200, 1..3);
}

#[test]
#[ignore = "takes minutes: a million operations a policy"]
fn a_million_operations_break_no_rule() {
    all_policies(250_000, 42..43);
}
