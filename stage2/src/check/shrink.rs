// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Making a trace that breaks a rule as short as it can be and still tell the same story.
//!
//! Whole operations go, from a lock taken to its release, never a barrier or an invalidation out of
//! one: without it the trace would break the rule as well, for another reason. What is left must be
//! [possible](Trace::is_possible), so an operation stays if others build on it. First what is behind
//! the break goes, then halves of the rest, quarters, and so on to single operations (the method of
//! delta debugging: Zeller and Hildebrandt, 2002).

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
    /// Holds every event against the rules.
    pub fn replay(&self) -> Checker {
        let mut checker = Checker::new(self.setup);
        self.events.iter().for_each(|event| checker.check(event));
        checker
    }

    /// Whether every store finds in memory what it says it found, in a table that is there.
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
            Action::Store {
                entry, old, new, ..
            } => {
                let there = tables.contains(&(entry.0 & !(granule - 1)));
                there && memory.insert(entry.0, new).unwrap_or_default() == old
            }
            _ => true,
        })
    }

    /// A shorter trace in which a rule is broken, and no rule that is not broken here; the trace
    /// itself if it breaks another rule or none.
    #[must_use]
    pub fn shrink(&self, rule: Rule) -> Self {
        let whole = self.replay();
        let mut found = whole.violations().iter().filter(|v| v.rule == rule);
        let Some(at) = found.next().map(|v| v.event) else {
            return self.clone();
        };
        let usual = whole.violated();
        let still = |trace: &Self| {
            trace.is_possible() && {
                let broken = trace.replay();
                broken.violated().contains(&rule) && broken.violated().is_subset(usual)
            }
        };
        let mut best = Self {
            setup: self.setup,
            events: self
                .events
                .iter()
                .copied()
                .take(crate::geometry::index(at + 1))
                .collect(),
        };
        if !still(&best) {
            best = self.clone();
        }
        let mut chunk = operations(&best.events).len();
        while chunk > 0 {
            let mut from = 0;
            let mut smaller = false;
            loop {
                let units = operations(&best.events);
                if from >= units.len() {
                    break;
                }
                let gone: BTreeSet<usize> = units
                    .iter()
                    .skip(from)
                    .take(chunk)
                    .flatten()
                    .copied()
                    .collect();
                let candidate = best.without(&gone);
                if still(&candidate) {
                    best = candidate;
                    smaller = true;
                } else {
                    from += chunk;
                }
            }
            if !smaller || chunk > 1 {
                chunk /= 2;
            }
        }
        best
    }

    fn without(&self, gone: &BTreeSet<usize>) -> Self {
        let events = self.events.iter().enumerate();
        Self {
            setup: self.setup,
            events: events
                .filter(|(index, _)| !gone.contains(index))
                .map(|(_, event)| *event)
                .collect(),
        }
    }
}

/// What goes or stays as one, as indices of events.
fn operations(events: &[Event]) -> Vec<Vec<usize>> {
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
