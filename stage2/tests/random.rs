// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Random operations on several CPUs with the checker enabled: no correct policy violates a rule.
//!
//! Thread timing makes each run different, so a failed run writes its trace to a file. The long run
//! performs a million operations for each policy and set of CPU features: `cargo test --release -p
//! granule-stage2 --test random -- --ignored`

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::{collections::BTreeSet, ops::Range, sync::Mutex};

use granule_stage2::{
    CmoPlacement, CoalesceOrder, ExistingLeaf, Features, Locking, Policy, TopUpCondition,
    UnmapBatching,
    check::{Checker, Event, Rule, Setup, Sink, Trace},
};
use support::{features, seeded_generator, test_vm::TestVm};

/// Runs `steps` operations on each CPU, in its own thread.
fn run(name: &str, policy: Policy, features: Features, cpus: u8, seed: u64, steps: u64) {
    let vm = TestVm::new(policy, features, cpus, 6);
    let checker = Mutex::new(RecordingChecker::new(vm.setup));
    std::thread::scope(|scope| {
        for cpu in 0..cpus {
            let (vm, checker) = (&vm, &checker);
            scope.spawn(move || {
                let mut vcpu = vm.vcpu(cpu, checker);
                let mut random = seeded_generator(seed * 1000 + u64::from(cpu));
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
    cpus: u8,
    steps: u64,
    seeds: Range<u64>,
) {
    for (name, policy) in policies {
        for features in features() {
            for seed in seeds.clone() {
                run(name, policy, features, cpus, seed, steps);
            }
        }
    }
}

#[test]
fn thousands_of_operations_violate_no_rule() {
    // Under Miri, which is slow, few steps suffice to find data races.
    let (steps, seeds) = if cfg!(miri) { (4, 1..2) } else { (200, 1..5) };
    run_all(Policy::PRESETS, 4, steps, seeds);
}

#[test]
#[cfg_attr(miri, ignore = "takes hours under Miri")]
fn operations_of_eight_cpus_violate_no_rule() {
    run_all(Policy::PRESETS, 8, 50, 1000..1002);
}

macro_rules! choices {
    ($($name:literal: $base:ident { $($field:ident: $value:expr),* };)*) => {
        [$(($name, Policy { $($field: $value,)* ..Policy::$base }),)*]
    };
}

#[test]
#[cfg_attr(miri, ignore = "takes hours under Miri")]
fn each_single_policy_choice_violates_no_rule() {
    let choices = choices! {
        "fault-path": LINUX_6_12_SERIES { cmo_placement: CmoPlacement::FaultPath };
        "between-break-and-make": LINUX_6_12_SERIES {
            cmo_placement: CmoPlacement::BetweenBreakAndMake
        };
        "before-break": LINUX_6_12_SERIES { cmo_placement: CmoPlacement::BeforeBreak };
        "free-first": LINUX_6_12_SERIES { coalesce_order: CoalesceOrder::FreeFirst };
        "replace": LINUX_6_12_SERIES { existing_leaf: ExistingLeaf::Replace };
        "retry": LINUX_6_12_SERIES { existing_leaf: ExistingLeaf::Retry };
        "relax": LINUX_6_12_SERIES { existing_leaf: ExistingLeaf::Relax };
        "top-up-by-fault-level": LINUX_6_12_SERIES {
            top_up_condition: TopUpCondition::ByFaultLevel
        };
        "no-populate-on-split": LINUX_6_12_SERIES { populates_on_split: false };
        "no-recovery": LINUX_6_12_SERIES { recovers_blocks: false };
        "map-again": LINUX_6_12_SERIES { skips_mapped_cmos: false };
        "refault": LINUX_6_12_SERIES { locked_entry_reads: 0 };
        "no-local-relax": LINUX_6_12_SERIES { relaxes_locally: false };
        "no-range-invalidation": LINUX_6_12_SERIES { uses_range_tlbi: false };
        "deferred": LINUX_6_12_SERIES { unmap_batching: UnmapBatching::Deferred };
        "one-by-one": LINUX_6_12_SERIES { unmap_batching: UnmapBatching::Batch(1) };
        "sixteen": LINUX_6_12_SERIES { unmap_batching: UnmapBatching::Batch(16) };
        "whole-tables": LINUX_6_12_SERIES { unmap_batching: UnmapBatching::WholeTables(16) };
        "no-references": LINUX_6_12_SERIES { counts_references: false };
        "contiguous": LINUX_6_12_SERIES { sets_contiguous: true };
        "bbm": LINUX_6_12_SERIES { uses_bbm: true };
        "exclusive": LINUX_6_12_SERIES { locking: Locking::Exclusive };
        "shared-relax": LINUX_6_12_SERIES { locking: Locking::SharedRelax };
    };
    run_all(choices, 4, 200, 1..3);
}

#[test]
#[ignore = "takes minutes: a million operations for each policy"]
fn a_million_operations_violate_no_rule() {
    run_all(Policy::PRESETS, 4, 250_000, 42..43);
}

/// Maximum number of events of a recorded trace. A longer trace is dropped to save memory.
const MAX_KEPT_EVENTS: u64 = 2_000_000;

/// A checker and the events that it has checked.
#[derive(Debug)]
struct RecordingChecker {
    setup: Setup,
    checker: Checker,
    events: Vec<Event>,
}

impl Sink for RecordingChecker {
    fn event(&mut self, event: Event) {
        self.checker.event(event);
        if self.checker.event_count() <= MAX_KEPT_EVENTS {
            self.events.push(event);
        } else {
            self.events = Vec::new();
        }
    }
}

impl RecordingChecker {
    fn new(setup: Setup) -> Self {
        Self { setup, checker: Checker::new(setup), events: Vec::new() }
    }

    /// Panics, after writing the trace to a file, if the run violates a rule that the policy keeps.
    fn assert_clean(&self, name: &str, policy: &Policy, seed: u64) {
        let known = known_violations(policy);
        let found = self.checker.violations().iter();
        let mut unexpected = found.filter(|v| !known.contains(&v.rule)).peekable();
        if unexpected.peek().is_none() {
            return;
        }
        let trace = Trace { setup: self.setup, events: self.events.clone() };
        let path = format!("{}/{name}-{seed}.trace", env!("CARGO_TARGET_TMPDIR"));
        let place = match std::fs::write(&path, trace.to_string()) {
            Ok(()) => path,
            Err(error) => format!("not written: {path}: {error}"),
        };
        let list: String = unexpected.take(5).map(|v| format!("\n{v}")).collect();
        let features = self.setup.features;
        panic!("{name}, {features:?}, seed {seed}; trace {place}:{list}");
    }
}

/// Returns the rules that the policy's kernel itself violates.
///
/// A split that does not map the block's other parts unmaps them without a CMO. If the host then
/// reuses their memory, a line in its caches may hide data that the guest wrote uncached. Linux
/// 5.10 performs no CMO when a permission fault coalesces a block (patch 4 of the series).
fn known_violations(policy: &Policy) -> BTreeSet<Rule> {
    let mut known = BTreeSet::new();
    if !policy.populates_on_split {
        known.insert(Rule::ReturnedUnclean);
    }
    if policy.cmo_placement == CmoPlacement::FaultPath {
        known.extend([Rule::UncleanReachable, Rule::StaleInstructions]);
    }
    known
}
