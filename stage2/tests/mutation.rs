// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Mutations: the engine with one operation left out or exchanged. The checker must see it.
//!
//! A fixed scenario goes through everything that the engine does. It is run once to learn how many
//! operations it has and which of them found something to do (by the checker's own state:
//! [`Work`]), then once for each of these and each way to get it wrong. An operation that found
//! nothing to do may just as well be left out, and is.
//!
//! Survivors, each looked at, and why leaving them wrong does no harm where they stand:
//!
//! - `Clean`: 6.12 cleans a block inside the window whose memory has been clean since it was first
//!   mapped.
//! - `Instructions`: all of the I-cache is invalidated, and what was stale in it is elsewhere.
//! - `Ish` left out or weaker, `Tlbi All` late: 6.12's maintenance inside the window ends with a DSB of its
//!   own, before the make, which completes the invalidation just as well.
//! - `Ish` late: the store that it changes places with links an empty table, or is another entry's.
//! - `Clean` late: the DSB that it changes places with is that of another run of memory, cleaned in
//!   the same go; the last one's completes both.
//! - `IshSt` weakened: before a broadcast for a permission that has grown. Only the CPU that faulted
//!   has to lose the narrower entry, and it has made the wider one itself.
//! - `Tlbi Ipa`, `IshSt` late: they change places with another page's invalidation of the same
//!   batch. A DSB behind all of them completes the one, and for the other that page's has nothing to
//!   do: it was invalidated with a contiguous run that was taken apart in between.
//! - `Tlbi Ipa` left out, local or about another page, in 6.12 with the series: the entry of a table that has become empty in the
//!   same batch begins at the same address, and its invalidation, of unknown level, takes the leaf's
//!   translation too.
//! - `Tlbi Range` shortened: nothing was mapped in the half that is left out.
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod mutant;
mod support;

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    sync::Mutex,
};

use granule_stage2::{
    Access, Features, Policy,
    check::{Checker, Recorder, Rule, Work},
};
use mutant::{HOWS, How, Mutant, State};
use support::{BLOCK, PAGE, TestVm, Vcpu};

/// Everything that the engine does, on two CPUs in turn.
fn scenario(
    policy: Policy,
    features: Features,
    target: Option<(u64, How)>,
) -> (Checker, Vec<Work>, Option<String>) {
    let vm = <TestVm>::new(policy, features, 2, 4);
    let checker = Mutex::new(Checker::new(vm.setup));
    let recorders = [0, 1].map(|cpu| Recorder::new(vm.cpu(cpu), cpu, &checker));
    let state = State {
        at: Cell::new(0),
        target,
        held: RefCell::new(None),
        hit: RefCell::new(None),
        work: RefCell::new(Vec::new()),
    };
    {
        let [mut a, mut b] = [0u8, 1].map(|cpu| {
            let ops = Mutant {
                inner: &recorders[usize::from(cpu)],
                state: &state,
            };
            Vcpu::new(&vm, ops, Recorder::new(vm.cpu(cpu), cpu, &checker))
        });
        // A defect may leave the guest without a way on; what was found until then counts.
        let mut go = |which: u8, ipa: u64, access: Access| {
            let vcpu = if which == 0 { &mut a } else { &mut b };
            let _ = vcpu.touch(ipa, access);
        };
        go(0, 0, Access::Write);
        go(1, 3 * PAGE, Access::Fetch);
        go(0, 3 * BLOCK, Access::Read);
        go(1, 3 * BLOCK + PAGE, Access::Write);
        go(0, 3 * BLOCK + PAGE, Access::Fetch);
        go(1, BLOCK, Access::Read);
        a.set_logging(true);
        let mut go = |which: u8, ipa: u64, access: Access| {
            let vcpu = if which == 0 { &mut a } else { &mut b };
            let _ = vcpu.touch(ipa, access);
        };
        go(0, 5 * PAGE, Access::Write);
        go(1, 5 * PAGE, Access::Write);
        go(1, 6 * PAGE, Access::Write);
        go(0, BLOCK + 9 * PAGE, Access::Write);
        go(0, BLOCK + 9 * PAGE, Access::Fetch);
        b.read_log();
        let _ = a.touch(5 * PAGE, Access::Write);
        b.unmap(7 * PAGE, PAGE);
        let _ = b.touch(2 * BLOCK, Access::Write);
        a.split(2);
        b.read_log();
        a.set_logging(false);
        let _ = b.touch(8 * PAGE, Access::Read);
        let _ = a.touch(7 * PAGE, Access::Fetch);
        let _ = a.touch(BLOCK + 3 * PAGE, Access::Write);
        b.host_write(2 * BLOCK, 64);
        b.take_back(0);
        let _ = a.touch(0, Access::Write);
        b.unmap(3 * BLOCK, BLOCK);
        b.take_back(3);
        // A contiguous run, and all that takes the hint from it.
        a.populate(3);
        let _ = b.touch(3 * BLOCK + 5 * PAGE, Access::Fetch);
        b.unmap(3 * BLOCK + 40 * PAGE, PAGE);
        a.unmap(3 * BLOCK + 64 * PAGE, 40 * PAGE);
        b.set_logging(true);
        let _ = a.touch(3 * BLOCK + 200 * PAGE, Access::Write);
        b.set_logging(false);
        b.take_back(3);
        a.finish();
        b.finish();
    }
    let hit = state.hit.borrow_mut().take();
    (checker.into_inner().unwrap(), state.work.take(), hit)
}

#[derive(Default)]
struct Score {
    caught: u32,
    missed: u32,
}

type Scores = BTreeMap<(String, How), Score>;

/// Exchanges operations one by one: those that had something to do, or all.
fn score(policy: Policy, features: Features, all: bool, scores: &mut Scores) {
    let (plain, work, _) = scenario(policy, features, None);
    let usual = plain.broken().clone();
    for (at, work) in (0..).zip(work) {
        for how in HOWS {
            // An operation that found nothing to do may just as well be left out.
            let counts = match how {
                How::Weaken => work.strong,
                _ => work.any,
            };
            if !counts && !all {
                continue;
            }
            let run = std::panic::AssertUnwindSafe(|| scenario(policy, features, Some((at, how))));
            let Ok((checker, _, hit)) = std::panic::catch_unwind(run) else {
                panic!("operation {at}, {how:?}: the engine panics");
            };
            let Some(name) = hit else { continue };
            let found: BTreeSet<Rule> = checker.broken().difference(&usual).copied().collect();
            let score = scores.entry((name, how)).or_default();
            let more = checker.violations().len() > plain.violations().len();
            if found.is_empty() && !more {
                score.missed += 1;
            } else {
                score.caught += 1;
            }
        }
    }
}

/// Of all policies, printed. Gives how many were caught and missed.
fn scores(all: bool) -> (Scores, u32, u32) {
    let plain = Features::default();
    let ranges = Features {
        tlb_range: true,
        bbm: 1,
        ..plain
    };
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
    for ((name, how), score) in &scores {
        println!(
            "{name:36} {how:?}: {} caught, {} missed",
            score.caught, score.missed
        );
    }
    (scores, caught, missed)
}

#[test]
fn nineteen_of_twenty_mutations_are_caught() {
    let (scores, caught, missed) = scores(false);

    assert!(caught > 1000, "too few mutations: {caught}");
    assert!(
        caught * 100 >= (caught + missed) * 95,
        "{caught} caught, {missed} missed"
    );
    let survivors: BTreeSet<_> = scores
        .iter()
        .filter(|(_, score)| score.missed > 0)
        .map(|((name, how), _)| (name.as_str(), *how))
        .collect();
    let known = BTreeSet::from([
        ("Clean", How::Drop),
        ("Clean", How::Shorten),
        ("Clean", How::Misplace),
        ("Clean", How::Late),
        ("Instructions", How::Drop),
        ("Ish", How::Drop),
        ("Ish", How::Weaken),
        ("Ish", How::Late),
        ("IshSt", How::Weaken),
        ("IshSt", How::Late),
        ("Tlbi All", How::Late),
        ("Tlbi Ipa Broadcast", How::Drop),
        ("Tlbi Ipa Broadcast", How::Weaken),
        ("Tlbi Ipa Broadcast", How::Misplace),
        ("Tlbi Ipa Broadcast", How::Late),
        ("Tlbi Range", How::Shorten),
    ]);
    assert_eq!(survivors, known, "survivors, and those that were looked at");
}

#[test]
#[ignore = "judges nothing: operations that had nothing to do are exchanged too"]
fn mutations_that_make_no_difference_are_counted() {
    scores(true);
}
