// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The simulation under the harness, whose checks of contents and dirty bitmap must hold.

use std::{collections::BTreeMap, time::Duration};

use granule_stage2::Policy;

use super::{
    PublishedKernel, SimulatedMachine, SimulationConfig,
    published::{FITS, JudgedRow, ROWS, Row, gain, simulate},
};
use crate::{
    harness::Plan,
    machine::Machine,
    software_machine::{SoftwareMachineConfig, tests::records},
};
use granule_types::{backing::Backing, phase::Phase, record::Record, units::Bytes};

fn config(backing: Backing, policy: &str) -> SimulationConfig {
    let machine = SoftwareMachineConfig {
        backing,
        memory: Bytes::mib(8),
        vcpus: 4,
        policy: policy.to_owned(),
    };
    SimulationConfig::new(machine, "kunpeng920", false).unwrap()
}

fn run(config: &SimulationConfig, seed: u64) -> Vec<Record> {
    let mut machine = SimulatedMachine::new(config).unwrap();
    let memory = machine.region().size;
    let SoftwareMachineConfig { backing, vcpus, .. } = config.machine;
    let mut plan = Plan {
        iterations: 2,
        deadline: Duration::from_secs(600),
        accept_fallback: true,
        ..Plan::new("P48V48_4K".to_owned(), backing, memory, vcpus)
    };
    plan.config.seed = seed;
    plan.config.prefault = config.prefault;
    records(&mut machine, &plan)
}

fn policies() -> impl Iterator<Item = &'static str> {
    let presets = Policy::PRESETS.into_iter().map(|(name, _)| name);
    presets.chain(PublishedKernel::ALL.map(PublishedKernel::name))
}

#[test]
fn every_policy_runs_every_phase_on_every_page_allocation() {
    for policy in policies() {
        for backing in [Backing::Anonymous, Backing::AnonymousThp, Backing::SharedHugetlb] {
            let records = run(&config(backing, policy), 3);

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
        let records = run(&config(Backing::AnonymousThp, "linux-6.12"), seed);
        records.iter().map(|r| serde_json::to_string(r).unwrap()).collect()
    };

    let (one, again, other) = (bytes(1), bytes(1), bytes(2));

    assert_eq!(one, again);
    assert_ne!(one, other);
}

#[test]
fn populated_memory_has_the_configured_page_size() {
    let config = SimulationConfig { prefault: true, ..config(Backing::AnonymousThp, "granule") };

    let records = run(&config, 0);

    let whole: BTreeMap<u64, u64> = [(2 << 20, 8 << 20)].into();
    assert_eq!(records[0].obtained.as_ref().unwrap().resident, whole);
    assert_eq!(records[0].events["model_host_invalidations"], 0);
}

/// Simulates a row on memory `divisor` times smaller.
fn judged(row: Row, divisor: u64) -> JudgedRow {
    let costs = config(Backing::Anonymous, "granule").costs;
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
    let costs = config(Backing::Anonymous, "granule").costs;
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
    let mut config = config(Backing::AnonymousThp, policy);
    config.machine.vcpus = 16;
    config.machine.memory = Bytes::mib(64);
    config.prefault = true;
    let records = run(&config, 1);
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
    let machine = config(Backing::Anonymous, "granule").machine;
    for policy in ["linux-5.10", "linux-6.12+series"] {
        let policy = policy.to_owned();
        let machine = SoftwareMachineConfig { policy, ..machine.clone() };
        let config = SimulationConfig::new(machine, "neoverse-n1", false).unwrap();

        assert_eq!(run(&config, 1).len(), 2 * Phase::ALL.len());
    }
}
