// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Replay of a trace, and shrinking of a trace that violates a rule.
//!
//! Shrinking removes whole operations, each from a lock to its release. It never removes a barrier
//! or an invalidation from an operation: the shorter trace would then violate the rule for another
//! reason. The rest must be [possible](Trace::is_possible), so an operation that others depend on
//! stays. Shrinking first removes the events after the violation, then halves of the operations,
//! quarters, and so on down to single operations (delta debugging: Zeller and Hildebrandt, 2002).

use alloc::{
    collections::{BTreeMap, BTreeSet},
    vec,
    vec::Vec,
};

use super::{
    checker::Checker,
    event::{Action, Event},
    rule::Rule,
    trace::Trace,
};
use crate::{address::TableAddress, operations::Note};

impl Trace {
    /// Checks all events. Returns the checker.
    pub fn replay(&self) -> Checker {
        let mut checker = Checker::new(self.setup);
        self.events.iter().for_each(|event| checker.check(event));
        checker
    }

    /// Returns whether every store finds the old value that its event names, in an allocated table.
    pub fn is_possible(&self) -> bool {
        let granule = self.setup.geometry.granule().size();
        let roots = 0..self.setup.geometry.root_tables();
        let mut tables: BTreeSet<_> = roots.map(|n| self.setup.root.0 + n * granule).collect();
        let mut memory = BTreeMap::new();
        self.events.iter().all(|event| match event.action {
            Action::Allocate(TableAddress(at)) => {
                memory.retain(|entry, _| !(at..at + granule).contains(entry));
                tables.insert(at)
            }
            Action::Free(table) => tables.remove(&table.0),
            Action::Store { entry, old, new, .. } => {
                let allocated = tables.contains(&(entry.0 & !(granule - 1)));
                allocated && memory.insert(entry.0, new).unwrap_or_default() == old
            }
            _ => true,
        })
    }

    /// Returns a shorter trace that violates `rule`, and no rule that this trace does not violate.
    /// Returns a copy of this trace if it does not violate `rule`.
    #[must_use]
    pub fn shrink(&self, rule: Rule) -> Self {
        let whole = self.replay();
        let mut found = whole.violations().iter().filter(|v| v.rule == rule);
        let Some(at) = found.next().map(|v| v.event) else {
            return self.clone();
        };
        let usual = whole.violated_rules();
        let violates_same_rules = |trace: &Self| {
            trace.is_possible() && {
                let replayed = trace.replay();
                replayed.violated_rules().contains(&rule)
                    && replayed.violated_rules().is_subset(usual)
            }
        };
        let mut best = self.clone();
        best.events.truncate(crate::geometry::to_usize(at + 1));
        if !violates_same_rules(&best) {
            best = self.clone();
        }
        let mut chunk = operation_events(&best.events).len();
        while chunk > 0 {
            let smaller = best.remove_chunks(chunk, &violates_same_rules);
            if !smaller || chunk > 1 {
                chunk /= 2;
            }
        }
        best
    }

    /// Removes each sequence of `chunk` operations that `keeps` does not need. Returns whether it
    /// removed any.
    fn remove_chunks(&mut self, chunk: usize, keeps: &impl Fn(&Self) -> bool) -> bool {
        let mut from = 0;
        let mut removed = false;
        loop {
            let operations = operation_events(&self.events);
            if from >= operations.len() {
                return removed;
            }
            let chunk_events = operations.iter().skip(from).take(chunk).flatten();
            let candidate = self.without_events(&chunk_events.copied().collect());
            if keeps(&candidate) {
                *self = candidate;
                removed = true;
            } else {
                from += chunk;
            }
        }
    }

    fn without_events(&self, removed: &BTreeSet<usize>) -> Self {
        let events = self.events.iter().enumerate();
        Self {
            setup: self.setup,
            events: events
                .filter(|(index, _)| !removed.contains(index))
                .map(|(_, event)| *event)
                .collect(),
        }
    }
}

/// Returns the event indices of each operation. An event outside an operation is its own operation.
fn operation_events(events: &[Event]) -> Vec<Vec<usize>> {
    let mut units: Vec<Vec<usize>> = Vec::new();
    let mut open: BTreeMap<u8, usize> = BTreeMap::new();
    for (index, event) in events.iter().enumerate() {
        match (event.action, open.get(&event.cpu)) {
            (_, Some(unit)) => units[*unit].push(index),
            (action, None) => {
                if matches!(action, Action::Note(Note::Lock { .. })) {
                    open.insert(event.cpu, units.len());
                }
                units.push(vec![index]);
            }
        }
        if event.action == Action::Note(Note::Unlock) {
            open.remove(&event.cpu);
        }
    }
    units
}
