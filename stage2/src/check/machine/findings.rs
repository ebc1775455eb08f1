// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Violations, one for each rule and call stack, with the events that led to the first one.

use alloc::{
    collections::{BTreeMap, VecDeque},
    string::String,
    vec::Vec,
};

use super::event::{MachineAction, MachineEvent};
use crate::{
    address::{Ipa, TableAddress, VirtAddr},
    check::{Rule, Violation},
    geometry::Level,
    operations::Vmid,
};

/// Number of events that are kept for the history of a finding.
const KEPT_EVENTS: usize = 4096;
/// Number of events of a finding's history.
const HISTORY: usize = 16;
/// Functions of a call stack that distinguish findings: more would repeat one defect for each caller.
const DISTINGUISHED_BY: usize = 4;

/// The first address that an entry translates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TranslatedAddress {
    /// An address of a guest: stage 2.
    Guest(Ipa),
    /// An address of the running kernel: stage 1.
    Kernel(VirtAddr),
}

/// A change of an entry by a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableChange {
    /// The first address that the entry translates.
    pub address: TranslatedAddress,
    /// The level of the entry.
    pub level: Level,
    /// The value before.
    pub old: u64,
    /// The value after.
    pub new: u64,
}

/// The tables of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckedTables {
    /// The stage-2 tables of a guest: the root table, and the VMID at the event.
    Guest(TableAddress, Vmid),
    /// The stage-1 tables of the running kernel: the last root.
    Kernel(TableAddress),
}

/// A defect: a violated rule and the place in the hypervisor.
#[derive(Debug, Clone)]
pub struct Finding {
    /// The violated rule.
    pub rule: Rule,
    /// The number of the first violating event, counted from 0.
    pub event: u64,
    /// The CPU of the first violating event.
    pub cpu: u8,
    /// The tables.
    pub tables: CheckedTables,
    /// The last change of these tables by this CPU until the first violation, if any.
    pub change: Option<TableChange>,
    /// The addresses and values of the first violation.
    pub detail: String,
    /// Return addresses of the first violating event, from the innermost function on.
    pub stack: Vec<u64>,
    /// Events before the first violation that concern the guest or its CPU, numbered, the last one is
    /// the violating event.
    pub history: Vec<(u64, MachineEvent)>,
    /// The number of violations.
    pub count: u64,
}

/// Collects findings and the last events.
#[derive(Debug, Default)]
pub(super) struct Findings {
    found: BTreeMap<(Rule, Vec<u64>), Finding>,
    recent: VecDeque<(u64, MachineEvent)>,
}

impl Findings {
    pub(super) fn remember(&mut self, index: u64, event: &MachineEvent) {
        if matches!(event.action, MachineAction::HostWrite(_) | MachineAction::Stack(..)) {
            return;
        }
        if self.recent.len() == KEPT_EVENTS {
            self.recent.pop_front();
        }
        self.recent.push_back((index, event.clone()));
    }

    pub(super) fn add(
        &mut self,
        violation: Violation,
        event: u64,
        tables: CheckedTables,
        (stack, change): (&[u64], Option<TableChange>),
    ) {
        let key = (violation.rule, stack.iter().copied().take(DISTINGUISHED_BY).collect());
        let recent = &self.recent;
        let finding = self.found.entry(key).or_insert_with(|| Finding {
            rule: violation.rule,
            event,
            cpu: violation.cpu,
            tables,
            change,
            detail: violation.detail,
            stack: stack.to_vec(),
            history: history(recent, violation.cpu),
            count: 0,
        });
        finding.count += 1;
    }

    /// Returns the findings in the order of their first events.
    pub(super) fn in_order(&self) -> Vec<&Finding> {
        let mut found: Vec<_> = self.found.values().collect();
        found.sort_by_key(|finding| (finding.event, finding.rule));
        found
    }
}

/// Returns the last stores of all CPUs, and other events of one CPU.
fn history(recent: &VecDeque<(u64, MachineEvent)>, cpu: u8) -> Vec<(u64, MachineEvent)> {
    let concerns = |(_, event): &&(u64, MachineEvent)| {
        event.cpu == cpu || matches!(event.action, MachineAction::Store { .. })
    };
    let mut last: Vec<_> = recent.iter().rev().filter(concerns).take(HISTORY).cloned().collect();
    last.reverse();
    last
}
