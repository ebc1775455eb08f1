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
    CmoPlacement, CoalesceOrder, ExistingLeaf, Fault, FaultStatus, Features, Locking, Operations,
    Policy, TopUpCondition, UnmapBatching,
    check::{
        Action, Call, Checker, Event, Hook, HookedOperations, Reply, Rule, Setup, Sink, Trace,
        Violation,
    },
    descriptor::{Descriptor, EntryKind},
    geometry::Level,
    operations::{Dsb, Note},
};
use support::{BLOCK, PAGE, features, seeded_generator, test_vm::TestVm};

/// Runs `steps` operations on each CPU, in its own thread.
fn run(name: &str, policy: Policy, features: Features, cpus: u8, seed: u64, steps: u64) {
    let vm = TestVm::new(policy, features, cpus, 6);
    let checker = Mutex::new(RecordingChecker::new(&vm, policy));
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
    checker.into_inner().unwrap().assert_clean(name, seed);
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

/// Omits the D-cache CMOs of one CPU in some faults, or outside faults.
struct OmittedCmos<'a> {
    vm: &'a TestVm,
    applies: fn(Option<Fault>) -> bool,
}

impl<O: Operations> Hook<O> for OmittedCmos<'_> {
    fn call(&self, inner: &O, call: Call) -> Reply {
        let is_cmo = matches!(call, Call::CleanInvalidate { .. });
        if is_cmo && (self.applies)(self.vm.fault_of(0)) { Reply::NoValue } else { call.run(inner) }
    }
}

/// Returns the violated rules of a run on one CPU that omits some CMOs.
fn violated_rules(policy: Policy, applies: fn(Option<Fault>) -> bool) -> BTreeSet<Rule> {
    let vm = TestVm::new(policy, Features::default(), 1, 6);
    let checker = Mutex::new(RecordingChecker::new(&vm, policy));
    let mut vcpu = vm.vcpu_with(0, &checker, |inner| HookedOperations {
        inner,
        hook: OmittedCmos { vm: &vm, applies },
    });
    let mut random = seeded_generator(1);
    (0..400).for_each(|_| vcpu.random_step(&mut random));
    vcpu.finish();
    checker.into_inner().unwrap().violations.iter().map(|violation| violation.rule).collect()
}

/// Linux 6.12 omits the CMOs of a split, and Linux 5.10 those of permission faults.
#[test]
#[cfg_attr(miri, ignore = "takes hours under Miri")]
fn a_violation_with_another_cause_than_the_known_one_is_found() {
    let outside_faults = |fault: Option<Fault>| fault.is_none();
    let in_translation_faults =
        |fault: Option<Fault>| fault.is_some_and(|fault| fault.status == FaultStatus::Translation);
    let cases: [(_, fn(_) -> _, _); 2] = [
        (Policy::LINUX_6_12, outside_faults, Rule::ReturnedUnclean),
        (Policy::LINUX_5_10, in_translation_faults, Rule::UncleanReachable),
    ];
    for (policy, applies, rule) in cases {
        assert_eq!(violated_rules(policy, |_| false), BTreeSet::new(), "{policy:?}");
        assert!(violated_rules(policy, applies).contains(&rule), "{policy:?}: {rule}");
    }
}

/// Maximum number of events of a recorded trace. A longer trace is dropped to save memory.
const MAX_KEPT_EVENTS: u64 = 2_000_000;

/// A checker, the events that it has checked, and the violations without a [known](is_known) cause.
#[derive(Debug)]
struct RecordingChecker<'a> {
    vm: &'a TestVm,
    policy: Policy,
    setup: Setup,
    checker: Checker,
    events: Vec<Event>,
    violations: Vec<Violation>,
    /// Number of CPUs that hold the lock.
    lock_holders: u32,
    /// For each entry that was broken since the lock was free, the fault in which a CPU did so.
    breaks: Vec<Option<Fault>>,
}

impl Sink for RecordingChecker<'_> {
    fn event(&mut self, event: Event) {
        match event.action {
            Action::Store { old, new, .. } if old.is_valid() && !new.is_valid() => {
                self.breaks.push(self.vm.fault_of(event.cpu));
            }
            Action::Note(Note::Lock { .. }) => self.lock_holders += 1,
            Action::Note(Note::Unlock) => self.lock_holders -= 1,
            _ => {}
        }
        self.check(event);
        let found = self.checker.take_violations();
        let is_known = |violation: &Violation| {
            let is_known = |fault: Option<Fault>| is_known(&self.policy, violation.rule, fault);
            match (violation.rule, event.action) {
                // The last CPU that releases a shared lock, perhaps outside a fault, reveals what all have
                // unmapped.
                (Rule::ReturnedUnclean, Action::Note(Note::Unlock)) => {
                    !self.breaks.is_empty() && self.breaks.iter().all(|fault| is_known(*fault))
                }
                _ => is_known(self.vm.fault_of(violation.cpu)),
            }
        };
        let (known, others) = found.into_iter().partition::<Vec<_>, _>(is_known);
        self.violations.extend(others);
        if !known.is_empty()
            && let Action::Store { new, .. } = event.action
        {
            self.perform_omitted_cmos(new);
        }
        if self.lock_holders == 0 {
            self.breaks.clear();
        }
    }
}

impl<'a> RecordingChecker<'a> {
    fn new(vm: &'a TestVm, policy: Policy) -> Self {
        // The last CPU performs the CMOs that the policy's kernel omits.
        let setup = Setup { cpus: vm.setup.cpus + 1, ..vm.setup };
        let checker = Checker::new(setup);
        let (events, violations, breaks) = (Vec::new(), Vec::new(), Vec::new());
        Self { vm, policy, setup, checker, events, violations, lock_holders: 0, breaks }
    }

    fn check(&mut self, event: Event) {
        self.checker.check(&event);
        if self.checker.event_count() <= MAX_KEPT_EVENTS {
            self.events.push(event);
        } else {
            self.events = Vec::new();
        }
    }

    /// Performs the CMOs that the kernel omits for a new leaf. Otherwise its memory would stay unclean,
    /// and the next leaf with this memory would violate the rule without the known cause.
    fn perform_omitted_cmos(&mut self, leaf: Descriptor) {
        let is_block = matches!(leaf.kind(Level::new(2).unwrap()), EntryKind::Leaf(_));
        let (phys, size) = (leaf.address(), if is_block { BLOCK } else { PAGE });
        let cpu = self.setup.cpus - 1;
        for cmo in
            [Action::CleanInvalidate { phys, size }, Action::InvalidateICache(Some((phys, size)))]
        {
            self.check(Event { cpu, action: cmo });
            self.check(Event { cpu, action: Action::Dsb(Dsb::Ish) });
        }
    }

    /// Panics, after writing the trace to a file, if the run has a violation without a known cause.
    fn assert_clean(&self, name: &str, seed: u64) {
        if self.violations.is_empty() {
            return;
        }
        let trace = Trace { setup: self.setup, events: self.events.clone() };
        let path = format!("{}/{name}-{seed}.trace", env!("CARGO_TARGET_TMPDIR"));
        let place = match std::fs::write(&path, trace.to_string()) {
            Ok(()) => path,
            Err(error) => format!("not written: {path}: {error}"),
        };
        let list: String = self.violations.iter().take(5).map(|v| format!("\n{v}")).collect();
        let features = self.setup.features;
        panic!("{name}, {features:?}, seed {seed}; trace {place}:{list}");
    }
}

/// Returns whether the policy's kernel itself violates the rule while it handles a fault.
///
/// A split that does not map the block's other parts unmaps them without a CMO. If the host then
/// reuses their memory, a line in its caches may hide data that the guest wrote uncached. Linux
/// 5.10 performs no CMO in a permission fault, which may coalesce a block (patch 4 of the series).
fn is_known(policy: &Policy, rule: Rule, fault: Option<Fault>) -> bool {
    fault.is_some_and(|fault| match rule {
        Rule::ReturnedUnclean => !policy.populates_on_split,
        Rule::UncleanReachable | Rule::StaleInstructions => {
            policy.cmo_placement == CmoPlacement::FaultPath
                && fault.status == FaultStatus::Permission
        }
        _ => false,
    })
}
