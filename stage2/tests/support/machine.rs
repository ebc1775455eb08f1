// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An observed machine of two CPUs whose hypervisor has a function for each role.

use std::collections::{BTreeMap, BTreeSet};

use granule_stage2::{
    BbmLevel, PhysAddr,
    check::{
        Rule,
        machine::{Hypervisor, LockType, Machine, MachineEvent, Observer, Role},
    },
    geometry::Granule,
};

/// Returns a machine whose mmu_lock has this type.
pub fn machine(lock: LockType) -> Machine {
    let functions = [(2, Role::Call), (1, Role::Abort), (4, Role::MarkDirty { argument: 1 })];
    let look_up = [(5, Role::LookUp), (6, Role::ReadSequence), (7, Role::ChangeSequence)];
    let tables = [
        (8, Role::Allocate { has_size: true }),
        (9, Role::Allocate { has_size: false }),
        (10, Role::GetTable),
        (11, Role::PutTable),
        (12, Role::FreePage),
        (13, Role::PrepareMemory),
        (14, Role::CommitMemory),
        (15, Role::GetTableReferences),
        (16, Role::PutTableReferences),
    ];
    let functions = BTreeMap::from_iter(functions.into_iter().chain(look_up).chain(tables));
    Machine {
        cpus: 2,
        memory: (PhysAddr(0x4000_0000), 1 << 30),
        hypervisor: Hypervisor { lock, locked_entry: None, granule: Granule::K4, functions },
        disabled_rules: BTreeSet::from([Rule::OutsideSlot]),
        bbm: None,
    }
}

pub fn observe_on(machine: Machine, trace: &str) -> Observer {
    let mut observer = Observer::new(machine);
    for line in trace.lines().filter(|line| !line.is_empty()) {
        observer.observe(&line.parse::<MachineEvent>().unwrap());
    }
    observer
}

/// Returns the violated rules of a trace of one guest of a host with this page size.
pub fn rules_with_granule(granule: Granule, trace: &str) -> Vec<Rule> {
    let mut machine = machine(LockType::Spinlock);
    machine.hypervisor.granule = granule;
    rules_of(observe_on(machine, trace))
}

/// Returns an observer that has seen a trace.
pub fn observe(trace: &str, lock: LockType) -> Observer {
    observe_on(machine(lock), trace)
}

/// Returns the violated rules of a trace of one guest.
pub fn rules(trace: &str) -> Vec<Rule> {
    rules_of(observe(trace, LockType::Spinlock))
}

/// Returns the violated rules of a trace of one guest on CPUs with a level of FEAT_BBM.
pub fn rules_with_bbm(level: BbmLevel, trace: &str) -> Vec<Rule> {
    rules_of(observe_on(Machine { bbm: Some(level), ..machine(LockType::Spinlock) }, trace))
}

fn rules_of(observer: Observer) -> Vec<Rule> {
    assert_eq!(observer.totals().guests, 1);
    observer.findings().iter().map(|finding| finding.rule).collect()
}
