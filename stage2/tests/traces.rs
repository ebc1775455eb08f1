// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Recorded traces: replayed, shrunk, and converted to casemate's format. `GRANULE_GOLDEN=write`
//! writes the golden files.
#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::{collections::BTreeSet, sync::Mutex};

use granule_stage2::{
    Access, Features, Policy, TableAddress,
    check::{Action, Event, Rule, Trace},
    operations::Tlbi,
};
use support::{BLOCK, PAGE, assert_golden, generator, test_vm::TestVm};

/// Records a block, its split for the dirty log, its recovery and its unmap on two CPUs.
fn record(policy: Policy, features: Features) -> Trace {
    let vm = <TestVm>::new(policy, features, 2, 2);
    let events = Mutex::new(Vec::new());
    let [mut a, mut b] = [0, 1].map(|cpu| vm.vcpu(cpu, &events));
    a.touch(0, Access::Write).unwrap();
    b.touch(BLOCK + PAGE, Access::Read).unwrap();
    a.set_logging(true);
    b.touch(5 * PAGE, Access::Write).unwrap();
    a.set_logging(false);
    b.touch(6 * PAGE, Access::Read).unwrap();
    a.unmap(BLOCK, BLOCK);
    b.finish();
    a.finish();
    Trace { setup: vm.setup, events: events.into_inner().unwrap() }
}

/// Removes the allocations of tables that stay in the memcache.
fn remove_unused_tables(trace: &mut Trace) {
    let written = trace.events.iter().filter_map(|event| match event.action {
        Action::Store { entry, .. } => Some(TableAddress(entry.0 & !(PAGE - 1))),
        _ => None,
    });
    let used: BTreeSet<_> = written.collect();
    trace.events.retain(|event| match event.action {
        Action::Allocate(table) | Action::Free(table) => used.contains(&table),
        _ => true,
    });
}

#[test]
fn casemate_receives_every_event_that_it_knows() {
    let ranges = Features { tlb_range: true, ..Features::default() };
    let omitted = [("dc", 5), ("free", 2), ("host", 12), ("note", 16), ("ref", 8), ("vmid", 6)];
    let of_shared_walks = [("lock shared", 5), ("walk", 8)];
    for (name, policy, features, more) in [
        ("linux-5.10+series", Policy::LINUX_5_10_SERIES, Features::default(), &[][..]),
        ("linux-6.12", Policy::LINUX_6_12, ranges, &of_shared_walks),
    ] {
        let mut trace = record(policy, features);
        remove_unused_tables(&mut trace);

        let casemate = trace.casemate();

        let expected = omitted.iter().chain(more).copied().collect();
        assert_eq!(casemate.omitted, expected, "{name}");
        assert_golden(&format!("golden/{name}.casemate"), &casemate.text, "traces");
    }
}

/// Records random operations of four CPUs in turn, under a policy that casemate can follow: one
/// walker at a time, entries broken one by one.
fn long_trace(events: usize) -> Trace {
    let vm = <TestVm>::new(Policy::LINUX_5_10_SERIES, Features::default(), 4, 6);
    let recorded: Mutex<Vec<Event>> = Mutex::new(Vec::new());
    let mut cpus: Vec<_> = (0..4).map(|cpu| vm.vcpu(cpu, &recorded)).collect();
    let mut random = generator(7);
    while recorded.lock().unwrap().len() < events {
        cpus.iter_mut().for_each(|vcpu| vcpu.random_step(&mut random));
    }
    for mut vcpu in cpus {
        vcpu.memcache.drain(&vcpu.ops);
    }
    Trace { setup: vm.setup, events: recorded.into_inner().unwrap() }
}

#[test]
fn casemate_accepts_a_hundred_thousand_events() {
    let trace = long_trace(100_000);
    let own = trace.replay();
    let known = [Rule::ReturnedUnclean].into();
    assert!(own.violated().is_subset(&known), "{:?}", own.violated());
    let text = trace.casemate().text;
    assert!(text.lines().count() > 50_000);
    let Some(casemate) = std::env::var_os("GRANULE_CASEMATE") else {
        return granule_types::testing::skip(
            "GRANULE_CASEMATE does not name a casemate-check program",
        );
    };
    let at = format!("{}/random.casemate", env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(&at, text).unwrap();

    let done = std::process::Command::new(casemate)
        .args([&at, "--no-trace", "--no-color"])
        .output()
        .unwrap();

    let output = String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
    let end: Vec<_> = output.lines().rev().take(20).collect();
    assert!(done.status.success(), "{at}, last lines first: {end:#?}");
}

#[test]
fn shrink_keeps_the_operation_that_violates_the_rule() {
    let mut trace = record(Policy::LINUX_5_10, Features::default());
    let usual = trace.replay().violated().clone();
    assert!(!usual.contains(&Rule::CombinedNotInvalidated));
    // The last invalidation of combined entries is missing.
    let is_last = |event: &Event| matches!(event.action, Action::Tlbi(Tlbi::Stage1 { .. }));
    let last = trace.events.iter().rposition(is_last).unwrap();
    trace.events.remove(last);
    assert!(trace.is_possible());

    let short = trace.shrink(Rule::CombinedNotInvalidated);

    assert!(short.is_possible());
    assert!(short.replay().violated().contains(&Rule::CombinedNotInvalidated));
    assert!(
        short.events.len() * 2 < trace.events.len(),
        "{} of {}",
        short.events.len(),
        trace.events.len()
    );
    let again: Trace = short.to_string().parse().unwrap();
    assert_eq!(again, short);
}

#[test]
fn shrink_returns_a_trace_without_violations_unchanged() {
    let trace = record(Policy::GRANULE, Features::default());

    assert!(trace.is_possible());
    assert_eq!(trace.replay().violations(), []);
    assert_eq!(trace.shrink(Rule::BreakBeforeMake), trace);
}

#[test]
fn a_trace_without_its_first_store_is_impossible() {
    let mut trace = record(Policy::GRANULE, Features::default());
    let first = |event: &Event| matches!(event.action, Action::Store { .. });
    let at = trace.events.iter().position(first).unwrap();
    trace.events.remove(at);

    assert!(!trace.is_possible());
}
