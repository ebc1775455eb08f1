// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Replay and shrinking of recorded traces.
#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::sync::Mutex;

use granule_stage2::{
    Access, Features, Policy,
    check::{Action, Event, Rule, Trace},
    operations::Tlbi,
};
use support::{BLOCK, PAGE, test_vm::TestVm};

/// Records two CPUs that map a block, split it for the dirty log, recover it and unmap it.
fn record(policy: Policy) -> Trace {
    let vm = TestVm::new(policy, Features::default(), 2, 2);
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

#[test]
fn shrink_keeps_the_operation_that_violates_the_rule() {
    let mut trace = record(Policy::LINUX_5_10);
    let usual = trace.replay().violated_rules().clone();
    assert!(!usual.contains(&Rule::CombinedNotInvalidated));
    // Removes the last invalidation of combined entries.
    let is_last = |event: &Event| matches!(event.action, Action::Tlbi(Tlbi::Stage1 { .. }));
    let last = trace.events.iter().rposition(is_last).unwrap();
    trace.events.remove(last);
    assert!(trace.is_possible());

    let short = trace.shrink(Rule::CombinedNotInvalidated);

    assert!(short.is_possible());
    assert!(short.replay().violated_rules().contains(&Rule::CombinedNotInvalidated));
    let lengths = (short.events.len(), trace.events.len());
    assert!(lengths.0 * 2 < lengths.1, "{lengths:?}");
    assert_eq!(short.to_string().parse(), Ok(short));
}

#[test]
fn shrink_returns_a_trace_without_violations_unchanged() {
    let mut trace = record(Policy::GRANULE);

    assert!(trace.is_possible());
    assert_eq!(trace.replay().violations(), []);
    assert_eq!(trace.shrink(Rule::BreakBeforeMake), trace);

    // Without its first store, the trace is not possible.
    let is_store = |event: &Event| matches!(event.action, Action::Store { .. });
    let first = trace.events.iter().position(is_store).unwrap();
    trace.events.remove(first);
    assert!(!trace.is_possible());
}
