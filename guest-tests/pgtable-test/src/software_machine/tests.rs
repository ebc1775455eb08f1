// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The software machine under the harness, whose own checks of contents and dirty log must hold.

use std::{collections::BTreeMap, time::Duration};

use super::*;
use crate::{
    config::PhaseSelection,
    harness::{self, Plan, Progress},
};
use granule_types::{
    phase::Phase,
    record::{Record, RunConfig},
};

fn config(backing: Backing, policy: &str) -> ModelConfig {
    ModelConfig {
        backing,
        memory: Bytes::mib(8),
        vcpus: 4,
        policy: policy.to_owned(),
    }
}

fn run(config: &ModelConfig) -> Vec<Record> {
    let mut machine = ModelMachine::new(config).unwrap();
    let plan = Plan {
        config: RunConfig {
            mode: "P48V48_4K".to_owned(),
            backing: config.backing,
            memory: machine.region().size,
            vcpus: config.vcpus,
            seed: 1,
            iteration: 0,
            prefault: true,
            options: BTreeMap::new(),
        },
        iterations: 2,
        phases: PhaseSelection::all(),
        migration: None,
        deadline: Duration::from_secs(60),
        accept_fallback: false,
    };
    records(&mut machine, &plan)
}

/// What a plan gives on a machine.
pub(super) fn records(machine: &mut dyn Machine, plan: &Plan) -> Vec<Record> {
    let mut records = Vec::new();
    harness::run(machine, plan, &mut |progress| {
        if let Progress::Phase(record) = progress {
            records.push(record.clone());
        }
        Ok(())
    })
    .unwrap();
    records
}

fn total(records: &[Record], phase: Phase, event: &str) -> u64 {
    let of = records.iter().filter(|record| record.phase == phase);
    of.map(|record| record.events[event]).sum()
}

#[test]
fn every_policy_goes_through_every_phase_on_every_size_of_page() {
    for (policy, _) in Policy::PRESETS {
        for backing in [Backing::Anonymous, Backing::AnonymousThp] {
            let records = run(&config(backing, policy));

            assert_eq!(records.len(), 2 * Phase::ALL.len(), "{policy} {backing}");
        }
    }
}

#[test]
fn the_series_cleans_each_line_once_in_create() {
    let lines = Bytes::mib(8).0 / Cleaner::of_this_cpu().line() as u64;

    let after = run(&config(Backing::AnonymousThp, "linux-5.10+series"));

    assert_eq!(total(&after, Phase::Create, "model_dc_lines"), 2 * lines);
}

#[test]
fn a_populated_split_leaves_one_fault_a_block() {
    let before = run(&config(Backing::AnonymousThp, "linux-5.10"));
    let after = run(&config(Backing::AnonymousThp, "granule"));

    let faults = |records| total(records, Phase::Update, "model_faults");
    assert!(faults(&before) >= 2 * 4 * 257, "{}", faults(&before));
    assert!(faults(&after) <= 2 * 4 * 4 * 2, "{}", faults(&after));
    assert_eq!(total(&after, Phase::Rebuild, "model_dc_lines"), 0);
}

#[test]
fn what_cannot_be_modelled_is_refused() {
    let error = |config: &ModelConfig| ModelMachine::new(config).unwrap_err().to_string();

    let size = Backing::AnonymousHugetlb(Some(Bytes::kib(64)));
    assert!(error(&config(size, "granule")).contains("anonymous_hugetlb_64kb cannot"));
    assert!(error(&config(Backing::Anonymous, "linux-2.6")).contains("--policy linux-2.6"));
    let huge = ModelConfig {
        memory: Bytes::gib(300),
        ..config(Backing::Anonymous, "granule")
    };
    assert!(error(&huge).contains("300G is too much"));
}

#[test]
fn more_vcpus_than_any_host_has_are_refused() {
    let mut config = config(Backing::Anonymous, "linux-5.10");
    config.vcpus = 99_999_999;
    assert!(matches!(
        ModelMachine::new(&config),
        Err(ModelError::Vcpus { vcpus: 99_999_999 })
    ));
}
