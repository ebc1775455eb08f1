// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Random operations of several CPUs with the checker on: no correct policy violates a rule.
//!
//! Threads make each run different, so a run that fails writes its trace to a file. Under shuttle a
//! seed fixes the schedule, so a failure can be repeated. The long runs are a million operations
//! for each policy and kind of CPU, and a million schedules or `GRANULE_ORDERS`: `cargo test
//! --release -p granule-stage2 --test random -- --ignored --nocapture`

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::{
    collections::BTreeSet,
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use granule_stage2::{
    CmoPlacement, Coalesce, ExistingLeaf, Features, Locking, Operations, Policy, TopUp, Unmap,
    check::{Call, Checker, Event, Hook, Hooked, Reply, Rule, Setup, Sink, Trace},
};
use lock_api::RawRwLock;
use shuttle::{
    Config, FailurePersistence, MaxSteps, Runner, scheduler::RandomScheduler, thread::yield_now,
};
use support::{
    features, generator,
    test_vm::{TestVm, Vcpu},
};

const CPUS: u8 = 4;

fn random_steps<O: Operations, S: Sink, L: RawRwLock>(
    vcpu: &mut Vcpu<'_, O, S, L>,
    seed: u64,
    cpu: u8,
    steps: u64,
) {
    let mut random = generator(seed.wrapping_mul(1000) + u64::from(cpu));
    (0..steps).for_each(|_| vcpu.random_step(&mut random));
    vcpu.memcache.drain(&vcpu.ops);
}

/// Runs `steps` on each of the CPUs, in threads.
fn run(name: &str, policy: Policy, features: Features, seed: u64, steps: u64) {
    let vm = <TestVm>::new(policy, features, CPUS, 6);
    let checker = Mutex::new(RecordingChecker::new(vm.setup));
    std::thread::scope(|scope| {
        for cpu in 0..CPUS {
            let (vm, checker) = (&vm, &checker);
            scope.spawn(move || random_steps(&mut vm.vcpu(cpu, checker), seed, cpu, steps));
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

/// Returns the policy and kind of CPU of a seed: all take turns.
fn configuration(seed: u64) -> (&'static str, Policy, Features) {
    let all = Policy::PRESETS
        .iter()
        .flat_map(|(name, policy)| features().map(|features| (*name, *policy, features)));
    let count = 3 * Policy::PRESETS.len();
    let index = usize::try_from(seed).unwrap() % count;
    all.cycle().nth(index).unwrap()
}

/// Runs `steps` on each of the CPUs, in the schedule of the seed.
fn run_scheduled(seed: u64, cpus: u8, steps: u64) {
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
                    vm.vcpu_with(cpu, &*checker, |inner| Hooked { inner, hook: YieldHook });
                random_steps(&mut vcpu, seed, cpu, steps);
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
        Runner::new(scheduler, config.clone()).run(move || run_scheduled(seed, cpus, steps));
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes hours under Miri")]
fn schedules_of_four_cpus_violate_no_rule() {
    run_schedules(0..45, 4, 15);
}

#[test]
#[cfg_attr(miri, ignore = "takes hours under Miri")]
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

/// Maximum number of events kept for a trace; a longer one exhausts memory and is too long to read.
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
        if self.checker.events() <= MAX_KEPT_EVENTS {
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

    /// Panics if the run violates a rule that its policy keeps, after writing the trace to a file.
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
            Err(error) => format!("lost: {path}: {error}"),
        };
        let list: String = unexpected.take(5).map(|v| format!("\n{v}")).collect();
        let features = self.setup.features;
        panic!("{name}, {features:?}, seed {seed}; the trace is {place}:{list}");
    }
}

/// Returns the rules that the kernel behind a policy violates itself.
///
/// A split that leaves the block's other parts unmapped removes their mapping without a CMO: if the
/// host reuses the memory first, a line in its caches may hide data that the guest wrote uncached.
/// 5.10 cleans nothing before it coalesces a block for a permission fault (patch 4 of the series).
fn known_violations(policy: &Policy) -> BTreeSet<Rule> {
    let mut known = BTreeSet::new();
    if !policy.populate_on_split {
        known.insert(Rule::ReturnedUnclean);
    }
    if policy.cmo == CmoPlacement::FaultPath {
        known.extend([Rule::UncleanReachable, Rule::StaleInstructions]);
    }
    known
}

/// Yields before each operation that another CPU can observe.
#[derive(Debug)]
struct YieldHook;

impl<O: Operations> Hook<O> for YieldHook {
    fn call(&self, inner: &O, call: Call) -> Reply {
        let is_private = matches!(
            call,
            Call::Allocate | Call::EndWalk | Call::References(_) | Call::Isb | Call::SwitchVmid(_)
        );
        if !is_private {
            yield_now();
        }
        match call {
            Call::Pause => Reply::Done,
            _ => call.run(inner),
        }
    }
}

/// A read-write lock that yields while it waits.
#[derive(Debug)]
struct YieldingLock(AtomicUsize);

const WRITER: usize = usize::MAX;

// SAFETY: a writer enters only at 0, and no other thread enters while the value is WRITER.
unsafe impl RawRwLock for YieldingLock {
    const INIT: Self = Self(AtomicUsize::new(0));
    type GuardMarker = lock_api::GuardSend;

    fn lock_shared(&self) {
        while !self.try_lock_shared() {
            yield_now();
        }
    }

    fn try_lock_shared(&self) -> bool {
        let more = |readers: usize| (readers != WRITER).then(|| readers + 1);
        let done = self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, more);
        done.is_ok()
    }

    unsafe fn unlock_shared(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    fn lock_exclusive(&self) {
        while !self.try_lock_exclusive() {
            yield_now();
        }
    }

    fn try_lock_exclusive(&self) -> bool {
        let done = self.0.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed);
        done.is_ok()
    }

    unsafe fn unlock_exclusive(&self) {
        self.0.store(0, Ordering::Release);
    }
}
