// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A checker that keeps the events of a random run and writes them to a file when the run fails.

use std::collections::BTreeSet;

use granule_stage2::{
    CmoPlacement, Coalesce, Policy,
    check::{Checker, Event, Outcome, Rule, Setup, Sink, Trace},
};

/// Events of the longest trace that is kept; a longer one fills the memory and helps no reader.
const KEPT: u64 = 2_000_000;

/// A checker and the events that it has checked.
#[derive(Debug)]
pub struct RecordingChecker {
    setup: Setup,
    checker: Checker,
    events: Vec<Event>,
}

impl Sink for RecordingChecker {
    fn event(&mut self, event: Event) {
        self.checker.event(event);
        if self.checker.events() <= KEPT {
            self.events.push(event);
        } else {
            self.events = Vec::new();
        }
    }
}

impl RecordingChecker {
    pub fn new(setup: Setup) -> Self {
        Self { setup, checker: Checker::new(setup), events: Vec::new() }
    }

    /// Panics if the run violates a rule that its policy keeps, after writing the trace to a file.
    pub fn assert_clean(&self, name: &str, policy: &Policy, seed: u64) {
        let known = known_violations(policy);
        if !known.contains(&Rule::UncleanReachable) {
            let outcomes = self.checker.outcomes();
            let right = outcomes.contains_key(&Outcome::RightData);
            let stale = outcomes.contains_key(&Outcome::StaleData);
            assert!(right && !stale, "{name}, seed {seed}: {outcomes:?}");
        }
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
    let without_cmo = policy.coalesce == Coalesce::InstallWithoutCmo;
    if without_cmo || policy.cmo == CmoPlacement::FaultPath {
        known.extend([Rule::UncleanReachable, Rule::StaleInstructions]);
    }
    known
}
