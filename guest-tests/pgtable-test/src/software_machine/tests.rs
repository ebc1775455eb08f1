// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of the software machine under the harness, which checks contents and dirty bitmap.

use std::time::Duration;

use granule_stage2::Policy;

use super::{
    SoftwareMachine, SoftwareMachineConfig, SoftwareMachineError, cache::CacheMaintenance,
};
use crate::{
    harness::{self, RunEvent, RunPlan},
    machine::Machine,
};
use granule_types::{backing::Backing, phase::Phase, record::Record, units::Bytes};

fn config(backing: Backing, policy: &str) -> SoftwareMachineConfig {
    SoftwareMachineConfig { backing, memory: Bytes::mib(8), vcpus: 4, policy: policy.to_owned() }
}

/// Runs two iterations of all phases and returns their records.
fn run(config: &SoftwareMachineConfig) -> Vec<Record> {
    let mut machine = SoftwareMachine::new(config).unwrap();
    let memory = machine.region().size;
    let mut plan = RunPlan {
        iterations: 2,
        deadline: Duration::from_secs(600),
        ..RunPlan::new("P48V48_4K".to_owned(), config.backing, memory, config.vcpus)
    };
    plan.config.seed = 1;
    plan.config.prefault = true;
    let mut records = Vec::new();
    harness::run(&mut machine, &plan, &mut |progress| {
        if let RunEvent::PhaseComplete(record) = progress {
            records.push(record.clone());
        }
        Ok(())
    })
    .unwrap();
    records
}

fn total(records: &[Record], phase: Phase, event: &str) -> u64 {
    let records = records.iter().filter(|record| record.phase == phase);
    records.map(|record| record.events[event]).sum()
}

#[test]
fn every_policy_runs_every_phase_on_every_page_size() {
    for (policy, _) in Policy::PRESETS {
        for backing in [Backing::Anonymous, Backing::AnonymousThp] {
            let records = run(&config(backing, policy));

            assert_eq!(records.len(), 2 * Phase::ALL.len(), "{policy} {backing}");
        }
    }
}

#[test]
fn the_series_cleans_and_invalidates_each_line_once_in_create() {
    let line = CacheMaintenance::of_this_cpu().data_line_size as u64;
    let lines = Bytes::mib(8).0 / line;

    let records = run(&config(Backing::AnonymousThp, "linux-5.10+series"));

    assert_eq!(total(&records, Phase::Create, "model_dc_lines"), 2 * lines);
}

#[test]
fn populating_the_table_of_a_split_leaves_one_fault_for_each_block() {
    let before = run(&config(Backing::AnonymousThp, "linux-5.10"));
    let after = run(&config(Backing::AnonymousThp, "granule"));

    let faults = |records| total(records, Phase::Update, "model_faults");
    assert!(faults(&before) >= 2 * 4 * 257, "{}", faults(&before));
    // While the host preempts the vCPU that locked an entry, the others retry without limit.
    let resolved = faults(&after) - total(&after, Phase::Update, "model_retries");
    assert!(resolved <= 2 * 4 * 4 * 2, "{resolved}");
    assert_eq!(total(&after, Phase::Rebuild, "model_dc_lines"), 0);
}

#[test]
fn unsupported_configurations_are_refused() {
    let error =
        |config: &SoftwareMachineConfig| SoftwareMachine::new(config).unwrap_err().to_string();

    let size = Backing::AnonymousHugetlb(Some(Bytes::kib(64)));
    assert!(error(&config(size, "granule")).contains("support anonymous_hugetlb_64kb"));
    assert!(error(&config(Backing::Anonymous, "linux-2.6")).contains("--policy linux-2.6"));
    let huge =
        SoftwareMachineConfig { memory: Bytes::gib(300), ..config(Backing::Anonymous, "granule") };
    assert!(error(&huge).contains("300G is too large"));
}

#[test]
fn too_many_vcpus_are_refused() {
    let mut config = config(Backing::Anonymous, "linux-5.10");
    config.vcpus = 99_999_999;
    let error = SoftwareMachine::new(&config).unwrap_err();
    assert!(matches!(error, SoftwareMachineError::TooManyVcpus(99_999_999)));
}
