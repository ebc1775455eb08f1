// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Who watches a random run: the checker, and a record that is kept if the run fails.

use std::collections::BTreeSet;

use granule_stage2::{
    Coalesce, Features, Maintenance, Policy,
    check::{Checker, Event, Outcome, Rule, Setup, Sink, Trace},
};

/// A longer run keeps no trace: it would fill the memory, and nobody could read it.
const KEPT: u64 = 2_000_000;

/// A checker, and what it was told.
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
        Self {
            setup,
            checker: Checker::new(setup),
            events: Vec::new(),
        }
    }

    /// Panics if a rule was broken that this policy keeps; the trace is left in a file then.
    pub fn expect_good(&self, name: &str, policy: &Policy, seed: u64) {
        let found = self.checker.violations().iter();
        let known = known(policy);
        let mut unexpected = found.filter(|v| !known.contains(&v.rule)).peekable();
        if !known.contains(&Rule::UncleanReachable) {
            let outcomes = self.checker.outcomes();
            assert!(
                outcomes.contains_key(&Outcome::RightData),
                "{name}, seed {seed}"
            );
            assert!(
                !outcomes.contains_key(&Outcome::StaleData),
                "{name}, seed {seed}: {outcomes:?}"
            );
        }
        if unexpected.peek().is_none() {
            return;
        }
        let trace = Trace {
            setup: self.setup,
            events: self.events.clone(),
        };
        let at = format!("{}/{name}-{seed}.trace", env!("CARGO_TARGET_TMPDIR"));
        let at = match std::fs::write(&at, trace.to_string()) {
            Ok(()) => at,
            Err(error) => format!("lost: {error}"),
        };
        let list: String = unexpected.take(5).map(|v| format!("\n{v}")).collect();
        let features = self.setup.features;
        panic!("{name}, {features:?}, seed {seed}; the trace is {at}:{list}");
    }
}

/// CPUs without a feature, with some, with all.
pub fn features() -> [Features; 3] {
    let plain = Features::default();
    let middle = Features {
        tlb_range: true,
        bbm: 1,
        ..plain
    };
    let rich = Features {
        tlb_range: true,
        bbm: 3,
        dic: true,
        fwb: true,
    };
    [plain, middle, rich]
}

/// What the kernels themselves get wrong by these rules, found by this test.
///
/// Where a split leaves the block's other parts empty, they lose their mapping without maintenance;
/// if the host takes the memory before the guest comes back to them, what a guest wrote past the
/// caches may be hidden by a line of the host's. And in 5.10 a block that is put together for a
/// permission fault is not made ready at all (the series' patch 4 says so too).
fn known(policy: &Policy) -> BTreeSet<Rule> {
    let mut known = BTreeSet::new();
    if !policy.populate_on_split {
        known.insert(Rule::ReturnedUnclean);
    }
    let unready = policy.coalesce == Coalesce::InstallUnready;
    if unready || policy.maintenance == Maintenance::FaultPath {
        known.extend([Rule::UncleanReachable, Rule::StaleInstructions]);
    }
    known
}
