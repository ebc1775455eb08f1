// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Mutations: the engine with one operation missing, weaker, shorter, misplaced or late. The checker
//! must report it.
//!
//! A fixed scenario uses everything that the engine does. It runs once to count the operations and
//! to learn which of them achieved something, by the state of the checker ([`Effect`]); then once for
//! each of these and each [`Mutation`]. An operation that achieves nothing may be missing without
//! harm and is skipped.
//!
//! Survivors, each examined, and why they do no harm:
//!
//! - `Clean`: 6.12 cleans a block inside the break-before-make window although its memory has been
//!   clean since it was first mapped.
//! - `Instructions`: the whole I-cache is invalidated, and its stale lines belong to other memory.
//! - `Ish` missing or weaker, `Tlbi All` late: 6.12's maintenance inside the window ends with its own
//!   DSB before the make, which completes the invalidation too.
//! - `Ish` late: the store that it changes places with links an empty table, or writes another entry.
//! - `Clean` late: it changes places with the DSB of another range of the same operation; the DSB of
//!   the last range completes both.
//! - `IshSt` weaker: it precedes a broadcast for relaxed permissions. Only the CPU that faulted must
//!   lose the older entry, and that CPU made the change itself.
//! - `Tlbi Ipa`, `IshSt` late: they change places with the invalidation of another page of the same
//!   batch. A DSB after all of them completes the first; the other page was invalidated earlier, with
//!   its contiguous run.
//! - `Tlbi Ipa` missing, local or misplaced, in 6.12 with the series: the entry of a table that the
//!   same batch empties begins at the same address, and its invalidation without a TTL hint covers the
//!   leaf.
//! - `Tlbi Range` shorter: nothing is mapped in the second half.
#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod mutant;
mod support;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Mutex,
};

use granule_stage2::{
    Access, Features, Policy,
    check::{Checker, Effect, Hooked, Recorder, Rule},
};
use mutant::{MUTATIONS, Mutation, Mutator};
use support::{
    BLOCK, Cpu, PAGE,
    test_vm::{TestVm, Vcpu},
};

/// Uses everything that the engine does, on two CPUs in turn.
fn scenario(
    policy: Policy,
    features: Features,
    target: Option<(u64, Mutation)>,
) -> (Checker, Vec<Effect>, Option<String>) {
    let vm = <TestVm>::new(policy, features, 2, 4);
    let checker = Mutex::new(Checker::new(vm.setup));
    let mutator = Mutator::new(target);
    let [mut a, mut b] =
        [0, 1].map(|cpu| vm.vcpu_with(cpu, &checker, |inner| Hooked { inner, hook: &mutator }));
    write_and_log(&mut a, &mut b);
    reuse_and_unmap(&mut a, &mut b);
    a.finish();
    b.finish();
    let (effects, hit) = (mutator.effects.take(), mutator.hit.take());
    (checker.into_inner().unwrap(), effects, hit)
}

type MutatedVcpu<'a> = Vcpu<'a, Hooked<Recorder<'a, Cpu<'a>, Checker>, &'a Mutator>, Checker>;

/// Accesses memory. A mutation may leave the guest without progress; the violations until then
/// count.
fn try_touch(vcpu: &mut MutatedVcpu<'_>, ipa: u64, access: Access) {
    let _ = vcpu.touch(ipa, access);
}

/// Maps, splits for the dirty log, relaxes, and coalesces when logging stops.
fn write_and_log(a: &mut MutatedVcpu<'_>, b: &mut MutatedVcpu<'_>) {
    try_touch(a, 0, Access::Write);
    try_touch(b, 3 * PAGE, Access::Fetch);
    try_touch(a, 3 * BLOCK, Access::Read);
    try_touch(b, 3 * BLOCK + PAGE, Access::Write);
    try_touch(a, 3 * BLOCK + PAGE, Access::Fetch);
    try_touch(b, BLOCK, Access::Read);
    a.set_logging(true);
    try_touch(a, 5 * PAGE, Access::Write);
    try_touch(b, 5 * PAGE, Access::Write);
    try_touch(b, 6 * PAGE, Access::Write);
    try_touch(a, BLOCK + 9 * PAGE, Access::Write);
    try_touch(a, BLOCK + 9 * PAGE, Access::Fetch);
    b.read_log();
    try_touch(a, 5 * PAGE, Access::Write);
    b.unmap(7 * PAGE, PAGE);
    try_touch(b, 2 * BLOCK, Access::Write);
    a.split(2);
    b.read_log();
    a.set_logging(false);
    try_touch(b, 8 * PAGE, Access::Read);
    try_touch(a, 7 * PAGE, Access::Fetch);
    try_touch(a, BLOCK + 3 * PAGE, Access::Write);
}

/// Reuses memory, and changes single pages of a contiguous run.
fn reuse_and_unmap(a: &mut MutatedVcpu<'_>, b: &mut MutatedVcpu<'_>) {
    b.host_write(2 * BLOCK, 64);
    b.remove_memory(0);
    try_touch(a, 0, Access::Write);
    b.unmap(3 * BLOCK, BLOCK);
    b.remove_memory(3);
    a.populate(3);
    try_touch(b, 3 * BLOCK + 5 * PAGE, Access::Fetch);
    b.unmap(3 * BLOCK + 40 * PAGE, PAGE);
    a.unmap(3 * BLOCK + 64 * PAGE, 40 * PAGE);
    b.set_logging(true);
    try_touch(a, 3 * BLOCK + 200 * PAGE, Access::Write);
    b.set_logging(false);
    b.remove_memory(3);
}

#[derive(Default)]
struct Score {
    caught: u32,
    missed: u32,
}

type Scores = BTreeMap<(String, Mutation), Score>;

/// Mutates operations one by one: those that achieved something, or all.
fn score(policy: Policy, features: Features, all: bool, scores: &mut Scores) {
    let (plain, effects, _) = scenario(policy, features, None);
    let usual = plain.violated().clone();
    for (at, effect) in (0..).zip(effects) {
        for mutation in MUTATIONS {
            let counts = match mutation {
                Mutation::Weaken => effect.strong,
                _ => effect.any,
            };
            if !counts && !all {
                continue;
            }
            let run =
                std::panic::AssertUnwindSafe(|| scenario(policy, features, Some((at, mutation))));
            let Ok((checker, _, hit)) = std::panic::catch_unwind(run) else {
                panic!("operation {at}, {mutation:?}: the engine panics");
            };
            let Some(name) = hit else { continue };
            let found: BTreeSet<Rule> = checker.violated().difference(&usual).copied().collect();
            let score = scores.entry((name, mutation)).or_default();
            let more = checker.violations().len() > plain.violations().len();
            if found.is_empty() && !more {
                score.missed += 1;
            } else {
                score.caught += 1;
            }
        }
    }
}

/// Scores all policies and prints the result; returns the totals caught and missed.
fn score_all(all: bool) -> (Scores, u32, u32) {
    let plain = Features::default();
    let ranges = Features { tlb_range: true, bbm: 1, ..plain };
    let mut scores = Scores::new();
    for (policy, features) in [
        (Policy::LINUX_5_10, plain),
        (Policy::LINUX_5_10_SERIES, plain),
        (Policy::LINUX_6_12, plain),
        (Policy::LINUX_6_12_SERIES, plain),
        (Policy::GRANULE, plain),
        (Policy::GRANULE, ranges),
    ] {
        score(policy, features, all, &mut scores);
    }
    let caught: u32 = scores.values().map(|score| score.caught).sum();
    let missed: u32 = scores.values().map(|score| score.missed).sum();
    println!("{caught} caught, {missed} missed");
    for ((name, mutation), score) in &scores {
        println!("{name:36} {mutation:?}: {} caught, {} missed", score.caught, score.missed);
    }
    (scores, caught, missed)
}

#[test]
fn the_checker_catches_95_percent_of_mutations() {
    let (scores, caught, missed) = score_all(false);

    assert!(caught > 1000, "too few mutations: {caught}");
    assert!(caught * 100 >= (caught + missed) * 95, "{caught} caught, {missed} missed");
    let survivors: BTreeSet<_> = scores
        .iter()
        .filter(|(_, score)| score.missed > 0)
        .map(|((name, mutation), _)| (name.as_str(), *mutation))
        .collect();
    let known = BTreeSet::from([
        ("Clean", Mutation::Drop),
        ("Clean", Mutation::Shorten),
        ("Clean", Mutation::Misplace),
        ("Clean", Mutation::Late),
        ("Instructions", Mutation::Drop),
        ("Ish", Mutation::Drop),
        ("Ish", Mutation::Weaken),
        ("Ish", Mutation::Late),
        ("IshSt", Mutation::Weaken),
        ("IshSt", Mutation::Late),
        ("Tlbi All", Mutation::Late),
        ("Tlbi Ipa Broadcast", Mutation::Drop),
        ("Tlbi Ipa Broadcast", Mutation::Weaken),
        ("Tlbi Ipa Broadcast", Mutation::Misplace),
        ("Tlbi Ipa Broadcast", Mutation::Late),
        ("Tlbi Range", Mutation::Shorten),
    ]);
    assert_eq!(survivors, known, "survivors, and those that were examined");
}

#[test]
#[ignore = "prints figures: mutates operations that achieve nothing, too"]
fn mutations_of_idle_operations_are_counted() {
    let (_, caught, missed) = score_all(true);

    assert!(caught + missed > 1000, "{caught} caught, {missed} missed");
}
