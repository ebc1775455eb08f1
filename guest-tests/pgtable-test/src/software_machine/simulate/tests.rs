// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The simulation under the harness, whose own checks of contents and dirty log must hold.

use std::collections::BTreeMap;

use super::{
    published::{FITS, Judged, ROWS, gain, simulate},
    *,
};
use crate::{config::PhaseSelection, harness::Plan, software_machine::tests::records};
use granule_types::{
    phase::Phase,
    record::{Record, RunConfig},
};

fn config(backing: Backing, policy: &str) -> SimulationConfig {
    let model = ModelConfig {
        backing,
        memory: Bytes::mib(8),
        vcpus: 4,
        policy: policy.to_owned(),
    };
    SimulationConfig::new(model, "kunpeng920", false).unwrap()
}

fn run(config: &SimulationConfig, seed: u64) -> Vec<Record> {
    let mut machine = SimulatedMachine::new(config).unwrap();
    let plan = Plan {
        config: RunConfig {
            mode: "P48V48_4K".to_owned(),
            backing: config.model.backing,
            memory: machine.region().size,
            vcpus: config.model.vcpus,
            seed,
            iteration: 0,
            prefault: config.prefault,
            options: BTreeMap::new(),
        },
        iterations: 2,
        phases: PhaseSelection::all(),
        migration: None,
        deadline: Duration::from_secs(600),
        accept_fallback: true,
    };
    records(&mut machine, &plan)
}

fn names() -> impl Iterator<Item = &'static str> {
    let presets = Policy::PRESETS.into_iter().map(|(name, _)| name);
    presets.chain(Kernel::ALL.map(Kernel::name))
}

#[test]
fn every_policy_goes_through_every_phase_on_every_kind_of_memory() {
    for policy in names() {
        for backing in [
            Backing::Anonymous,
            Backing::AnonymousThp,
            Backing::SharedHugetlb,
        ] {
            let records = run(&config(backing, policy), 3);

            assert_eq!(records.len(), 2 * Phase::ALL.len(), "{policy} {backing}");
            let worked = records.iter().filter(|r| r.phase.is_guest_work());
            assert!(worked.clone().all(|r| r.ns.0 > 0 && r.vcpu_ns.len() == 4));
            assert!(records.iter().all(|r| r.engine == "simulation"));
        }
    }
}

#[test]
fn the_same_inputs_give_the_same_bytes_and_another_seed_others() {
    let bytes = |seed| -> Vec<_> {
        let records = run(&config(Backing::AnonymousThp, "linux-6.12"), seed);
        records
            .iter()
            .map(|r| serde_json::to_string(r).unwrap())
            .collect()
    };

    let (one, again, other) = (bytes(1), bytes(1), bytes(2));

    assert_eq!(one, again);
    assert_ne!(one, other);
}

#[test]
fn memory_that_was_populated_beforehand_is_as_asked_for() {
    let config = SimulationConfig {
        prefault: true,
        ..config(Backing::AnonymousThp, "granule")
    };

    let records = run(&config, 0);

    let whole: BTreeMap<u64, u64> = [(2 << 20, 8 << 20)].into();
    assert_eq!(records[0].obtained.as_ref().unwrap().resident, whole);
    assert_eq!(records[0].events["model_host_invalidations"], 0);
}

/// 800 faults in the first phase: at its full size this row is quick.
#[test]
fn the_row_that_gains_most_is_simulated_at_its_size() {
    let costs = config(Backing::Anonymous, "granule").costs;
    let row = ROWS[5];
    let seconds = |kernel| {
        let all = simulate(row.load, kernel, &costs, (row.phase, 1)).unwrap();
        all[&row.phase]
    };

    let (before, after) = row.kernels();
    let simulated = (seconds(before), seconds(after));

    let judged = Judged { row, simulated };
    assert!(judged.holds(), "{:?} is {:.1}%", simulated, gain(simulated));
}

/// All rows at their sizes are judged by `examples/kunpeng920.rs`, which `scripts/test` runs.
#[test]
fn small_pages_go_the_published_way_on_a_part_of_the_memory() {
    let costs = config(Backing::Anonymous, "granule").costs;
    for row in [ROWS[0], ROWS[2], ROWS[3], ROWS[4]] {
        let seconds = |kernel| {
            let all = simulate(row.load, kernel, &costs, (row.phase, 20 << 9)).unwrap();
            all[&row.phase]
        };

        let (before, after) = row.kernels();
        let simulated = (seconds(before), seconds(after));

        assert!(
            gain(simulated) > 0.0,
            "{} {}: {simulated:?}",
            row.load,
            row.phase
        );
    }
}

#[test]
fn at_most_four_rows_are_fitted_and_they_say_so() {
    let fitted = ROWS.iter().filter(|row| row.fitted).count();

    assert!(fitted <= 4);
    for fit in FITS {
        assert!(ROWS[fit.row].fitted, "{}", fit.number);
        let costs = config(Backing::Anonymous, "granule").costs;
        let number = costs
            .numbers()
            .into_iter()
            .find(|n| n.0 == fit.number)
            .unwrap();
        let said = format!("fit: row {}", fit.row + 1);
        assert!(number.1.source.starts_with(&said), "{}", fit.number);
    }
    let costs = config(Backing::Anonymous, "granule").costs;
    let fits = |source: &str| source.starts_with("fit");
    let count = costs.numbers().iter().filter(|n| fits(&n.1.source)).count();
    assert_eq!(count, FITS.len());
}

/// Of [`meet`]: a fault is one that the guest takes.
const FAULTS: &str = "model_faults";

/// Many vCPUs that touch one block after the other at the same time, on memory that is there.
fn meet(policy: &str, phase: Phase) -> (u64, u64) {
    let mut config = config(Backing::AnonymousThp, policy);
    config.model.vcpus = 16;
    config.model.memory = Bytes::mib(64);
    config.prefault = true;
    let records = run(&config, 1);
    let of = || records.iter().filter(|record| record.phase == phase);
    let faults = of().map(|record| record.events[FAULTS]).sum();
    (faults, of().map(|record| record.ns.0).sum())
}

#[test]
fn waiting_for_a_locked_entry_saves_faults_for_two_percent_of_time_at_most() {
    for phase in [Phase::Create, Phase::Update] {
        let (again, waits) = (meet("linux-6.12", phase), meet("linux-6.12+wait", phase));
        println!("{phase}: faults and ns {again:?} faulting again, {waits:?} waiting");

        assert!(waits.0 < again.0, "{phase}: {waits:?} {again:?}");
        assert!(
            waits.1 <= again.1 + again.1 / 50,
            "{phase}: {waits:?} {again:?}"
        );
    }
}

#[test]
fn another_machines_costs_go_through_every_phase() {
    let model = config(Backing::Anonymous, "granule").model;
    for policy in ["linux-5.10", "linux-6.12+series"] {
        let policy = policy.to_owned();
        let model = ModelConfig {
            policy,
            ..model.clone()
        };
        let config = SimulationConfig::new(model, "neoverse-n1", false).unwrap();

        assert_eq!(run(&config, 1).len(), 2 * Phase::ALL.len());
    }
}
