// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The software machine in real and in virtual time under the harness, whose checks of contents and
//! dirty bitmap must hold.

use std::{collections::BTreeMap, time::Duration};

use granule_stage2::Policy;

use super::{
    SoftwareMachine, SoftwareMachineConfig, SoftwareMachineError,
    real_time::CacheMaintenance,
    simulation::{
        PublishedKernel, SimulatedMachine, SimulationConfig,
        cost::CostTable,
        published::{FITS, JudgedRow, PublishedRow, ROWS, gain, simulate},
    },
};
use crate::{
    harness::{self, RunEvent, RunPlan},
    machine::Machine,
};
use granule_types::{backing::Backing, phase::Phase, record::Record, units::Bytes};

fn config(backing: Backing, policy: &str) -> SoftwareMachineConfig {
    SoftwareMachineConfig { backing, memory: Bytes::mib(8), vcpus: 4, policy: policy.to_owned() }
}

/// Returns a simulation of untouched memory with the costs of a Kunpeng 920.
fn simulation(backing: Backing, policy: &str) -> SimulationConfig {
    SimulationConfig::new(config(backing, policy), "kunpeng920", false).unwrap()
}

/// Returns the records of two iterations of all phases on a machine.
fn records(
    machine: &mut dyn Machine,
    config: &SoftwareMachineConfig,
    seed: u64,
    prefault: bool,
) -> Vec<Record> {
    let memory = machine.region().size;
    let mut plan = RunPlan {
        iterations: 2,
        deadline: Duration::from_secs(600),
        accept_fallback: !prefault,
        ..RunPlan::new("P48V48_4K".to_owned(), config.backing, memory, config.vcpus)
    };
    plan.config.seed = seed;
    plan.config.prefault = prefault;
    let mut records = Vec::new();
    harness::run(machine, &plan, &mut |progress| {
        if let RunEvent::Phase(record) = progress {
            records.push(record.clone());
        }
        Ok(())
    })
    .unwrap();
    records
}

fn run(config: &SoftwareMachineConfig) -> Vec<Record> {
    records(&mut SoftwareMachine::new(config).unwrap(), config, 1, true)
}

fn run_simulation(config: &SimulationConfig, seed: u64) -> Vec<Record> {
    let mut machine = SimulatedMachine::new(config).unwrap();
    records(&mut machine, &config.machine, seed, config.prefault)
}

fn total(records: &[Record], phase: Phase, event: &str) -> u64 {
    let of = records.iter().filter(|record| record.phase == phase);
    of.map(|record| record.events[event]).sum()
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
fn the_series_cleans_each_line_once_in_create() {
    let line = CacheMaintenance::of_this_cpu().data_line as u64;
    let lines = Bytes::mib(8).0 / line;

    let after = run(&config(Backing::AnonymousThp, "linux-5.10+series"));

    assert_eq!(total(&after, Phase::Create, "model_dc_lines"), 2 * lines);
}

#[test]
fn populating_the_table_of_a_split_leaves_one_fault_for_each_block() {
    let before = run(&config(Backing::AnonymousThp, "linux-5.10"));
    let after = run(&config(Backing::AnonymousThp, "granule"));

    let faults = |records| total(records, Phase::Update, "model_faults");
    assert!(faults(&before) >= 2 * 4 * 257, "{}", faults(&before));
    assert!(faults(&after) <= 2 * 4 * 4 * 2, "{}", faults(&after));
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
    assert!(matches!(SoftwareMachine::new(&config), Err(SoftwareMachineError::Vcpus(99_999_999))));
}

fn policies() -> impl Iterator<Item = &'static str> {
    let presets = Policy::PRESETS.into_iter().map(|(name, _)| name);
    presets.chain(PublishedKernel::ALL.map(PublishedKernel::name))
}

#[test]
fn every_policy_runs_every_phase_on_every_page_allocation() {
    for policy in policies() {
        for backing in [Backing::Anonymous, Backing::AnonymousThp, Backing::SharedHugetlb] {
            let records = run_simulation(&simulation(backing, policy), 3);

            assert_eq!(records.len(), 2 * Phase::ALL.len(), "{policy} {backing}");
            let worked = records.iter().filter(|r| r.phase.is_guest_work());
            assert!(worked.clone().all(|r| r.ns.0 > 0 && r.vcpu_ns.len() == 4));
            assert!(records.iter().all(|r| r.engine == "simulation"));
        }
    }
}

#[test]
fn results_repeat_to_the_byte_and_differ_between_seeds() {
    let bytes = |seed| -> Vec<_> {
        let records = run_simulation(&simulation(Backing::AnonymousThp, "linux-6.12"), seed);
        records.iter().map(|r| serde_json::to_string(r).unwrap()).collect()
    };

    let (one, again, other) = (bytes(1), bytes(1), bytes(2));

    assert_eq!(one, again);
    assert_ne!(one, other);
}

#[test]
fn populated_memory_has_the_configured_page_size() {
    let config =
        SimulationConfig { prefault: true, ..simulation(Backing::AnonymousThp, "granule") };

    let records = run_simulation(&config, 0);

    let whole: BTreeMap<u64, u64> = [(2 << 20, 8 << 20)].into();
    assert_eq!(records[0].obtained.as_ref().unwrap().resident, whole);
    assert_eq!(records[0].events["model_host_invalidations"], 0);
}

fn costs() -> CostTable {
    simulation(Backing::Anonymous, "granule").costs
}

/// Simulates a row on memory `divisor` times smaller.
fn judged(row: PublishedRow, divisor: u64) -> JudgedRow {
    let costs = costs();
    let seconds = |kernel| {
        let all = simulate(row.workload, kernel, &costs, (row.phase, divisor)).unwrap();
        all[&row.phase]
    };
    let (before, after) = row.kernels();
    JudgedRow { row, simulated: (seconds(before), seconds(after)) }
}

/// This row takes 800 faults, so its full size is quick.
#[test]
fn the_row_with_the_greatest_gain_holds_at_full_size() {
    let judged = judged(ROWS[5], 1);

    assert!(judged.holds(), "{judged:?}");
}

/// The example `kunpeng920`, which `scripts/test` runs, judges all rows.
#[test]
fn rows_of_small_pages_gain_on_a_part_of_the_memory() {
    for row in [ROWS[0], ROWS[2], ROWS[3], ROWS[4]] {
        let judged = judged(row, 20 << 9);

        assert!(gain(judged.simulated) > 0.0, "{judged:?}");
    }
}

#[test]
fn costs_are_fitted_to_at_most_four_rows_and_name_them() {
    let mut costs = costs();
    let numbers = costs.numbers();
    let source = |name| &numbers.iter().find(|n| n.0 == name).unwrap().1.source;

    assert!(ROWS.iter().filter(|row| row.fitted).count() <= 4);
    for fit in FITS {
        assert!(ROWS[fit.row].fitted, "{}", fit.number);
        let expected = format!("fit: row {}", fit.row + 1);
        assert!(source(fit.number).starts_with(&expected), "{}", fit.number);
    }
    let fitted = numbers.iter().filter(|n| n.1.source.starts_with("fit"));
    assert_eq!(fitted.count(), FITS.len());
}

/// Returns faults and nanoseconds of a phase in which 16 vCPUs access the same blocks of populated
/// memory at the same time.
fn contended_blocks(policy: &str, phase: Phase) -> (u64, u64) {
    let mut config = simulation(Backing::AnonymousThp, policy);
    config.machine.vcpus = 16;
    config.machine.memory = Bytes::mib(64);
    config.prefault = true;
    let records = run_simulation(&config, 1);
    let of = || records.iter().filter(|record| record.phase == phase);
    let faults = of().map(|record| record.events["model_faults"]).sum();
    (faults, of().map(|record| record.ns.0).sum())
}

#[test]
fn waiting_for_a_locked_entry_saves_faults_for_at_most_two_percent_of_time() {
    for phase in [Phase::Create, Phase::Update] {
        let (refault, wait) =
            (contended_blocks("linux-6.12", phase), contended_blocks("linux-6.12+wait", phase));
        println!("{phase}: faults and ns {refault:?} refaulting, {wait:?} waiting");

        assert!(wait.0 < refault.0, "{phase}: {wait:?} {refault:?}");
        assert!(wait.1 <= refault.1 + refault.1 / 50, "{phase}: {wait:?} {refault:?}");
    }
}

#[test]
fn the_costs_of_neoverse_n1_run_every_phase() {
    for policy in ["linux-5.10", "linux-6.12+series"] {
        let machine = config(Backing::Anonymous, policy);
        let config = SimulationConfig::new(machine, "neoverse-n1", false).unwrap();

        assert_eq!(run_simulation(&config, 1).len(), 2 * Phase::ALL.len());
    }
}
