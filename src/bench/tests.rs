// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of the options of `granule bench`.

use clap::Parser;
use granule_pgtable_test::{
    config::PhaseSelection,
    harness::HarnessError,
    pgtable_vm::{CountedEvents, KvmConfig},
    software_machine::DEFAULT_POLICY,
};
use granule_types::{
    backing::Backing,
    guest_mode::GuestMode,
    units::{Bytes, GuestAddress},
};
use granule_vmm::kvm::memslot::DirtyMode;

use super::{Args, WrongEngine, args::SweepConflict, outcome_of_error};
use crate::CommandOutcome;

#[derive(Debug, Parser)]
struct BenchArgs {
    #[command(flatten)]
    bench: Args,
}

fn parse(line: &str) -> Result<Args, String> {
    BenchArgs::try_parse_from(line.split_whitespace())
        .map(|cli| cli.bench)
        .map_err(|error| error.to_string())
}

#[test]
fn options_of_kvm_page_table_test_have_the_same_meaning() {
    let args = parse("bench -m 2 -s anonymous_hugetlb_2mb -b 64M -v 16 -p 0x40000000").unwrap();

    let machine = args.kvm_config().unwrap();

    assert_eq!(machine.mode, Some(GuestMode::P48V48_4K));
    assert_eq!(machine.backing, Backing::AnonymousHugetlb(Some(Bytes::mib(2))));
    assert_eq!((machine.memory, machine.vcpus), (Bytes::mib(64), 16));
    assert_eq!(machine.phys_offset, Some(GuestAddress(0x4000_0000)));
}

#[test]
fn defaults_equal_those_of_kvm_page_table_test() {
    let args = parse("bench").unwrap();

    let machine = args.kvm_config().unwrap();

    let kernels = KvmConfig::new(Backing::Anonymous, Bytes::gib(1), 1);
    assert_eq!(machine, kernels);
    assert_eq!(args.workload.phases, PhaseSelection::all());
}

#[test]
fn pre_fault_populates_host_memory_too() {
    let args = parse("bench --pre-fault").unwrap();

    let machine = args.kvm_config().unwrap();

    assert!(machine.prefault && machine.populates_stage2);
    assert!(!parse("bench --prefault").unwrap().kvm_config().unwrap().populates_stage2);
}

#[test]
fn vcpus_are_pinned_round_robin() {
    let args = parse("bench -v 5 --pin 0-1,7 --events off --dirty-log manual").unwrap();

    let machine = args.kvm_config().unwrap();

    assert_eq!(machine.pinned_cpus, [0, 1, 7, 0, 1]);
    assert_eq!(machine.events, CountedEvents::None);
    assert_eq!(machine.dirty_mode, DirtyMode::Manual);
}

#[test]
fn records_name_the_options_that_affect_results() {
    for (line, expected) in [
        ("--json -", &[][..]),
        ("--events off", &[("events", "off")]),
        ("--phys-offset 0x40000000", &[("phys-offset", "0x40000000")]),
        ("--phases exec", &[("phases", "exec")]),
        (
            "--guest-map pages --ipa-bits 40 --pin 0-1",
            &[("guest-map", "pages"), ("ipa-bits", "40"), ("pin", "0,1")],
        ),
        ("--events fault-types", &[("events", "fault-types")]),
        ("--pre-fault", &[("pre-fault", "yes")]),
        ("--log-untouched", &[("log-untouched", "yes")]),
        ("--migrate 4 --round-ms 20", &[("migrate", "4"), ("round-ms", "20")]),
    ] {
        let options = parse(&format!("bench {line}")).unwrap().options();
        let found: Vec<_> = options.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
        assert_eq!(found, expected, "{line}");
    }
}

#[test]
fn log_untouched_requires_update() {
    let phases = |phases: &str| {
        let args = parse(&format!("bench --log-untouched --phases {phases}")).unwrap();
        args.selected_phases().map(|phases| phases.to_string())
    };

    assert_eq!(phases("update,rebuild").unwrap(), "logging-on,update,logging-off,rebuild");
    assert!(phases("create").is_err());
}

#[test]
fn each_engine_refuses_the_options_of_the_other() {
    let plain = parse("bench --engine software").unwrap();
    let named = parse("bench --engine model --policy linux-5.10 -v 8").unwrap();
    let pinned = parse("bench --engine software --pin 0").unwrap();
    let migrating = parse("bench --migrate 4 --engine software").unwrap();
    let kvm = parse("bench --policy granule").unwrap();

    assert_eq!(plain.software_config().unwrap().policy, DEFAULT_POLICY);
    assert_eq!(named.software_config().unwrap().policy, "linux-5.10");
    assert_eq!(pinned.software_config(), Err(WrongEngine("--pin", "kvm")));
    assert_eq!(migrating.software_config(), Err(WrongEngine("--migrate", "kvm")));
    assert_eq!(kvm.kvm_config(), Err(WrongEngine("--policy", "software")));
}

#[test]
fn sweeps_make_a_matrix() {
    let args = parse("bench -s shmem --sweep vcpus=1,2,4 --sweep size=2M,8M").unwrap();
    let points: Vec<_> = args.sweep_points().iter().map(|p| (p.vcpus(), p.memory())).collect();
    let (small, large) = (Bytes::mib(2), Bytes::mib(8));
    let expected = [(1, small), (1, large), (2, small), (2, large), (4, small), (4, large)];
    assert_eq!(points, expected);
    assert!(args.sweep_points().iter().all(|point| point.workload.backing == Backing::Shmem));
    assert_eq!(parse("bench -v 3").unwrap().sweep_points().len(), 1);
}

#[test]
fn an_option_conflicts_with_its_own_sweep() {
    for (line, error) in [
        ("-v 4 --sweep vcpus=1,2", Some(SweepConflict("-v", "vcpus"))),
        ("-v 1 --sweep vcpus=1,2", Some(SweepConflict("-v", "vcpus"))),
        ("--sweep size=2M,4M -b 1G", Some(SweepConflict("-b", "size"))),
        ("-v 4 --sweep size=2M,4M", None),
        ("-b 2M --sweep vcpus=1,2", None),
    ] {
        let args = parse(&format!("bench {line}")).unwrap();
        assert_eq!(args.check_sweeps().err(), error, "{line}");
    }
}

#[test]
fn counts_below_one_are_refused() {
    for (line, words) in [
        ("-v 0", "'0' for '--vcpus <VCPUS>': expected a whole number of at least 1"),
        ("-v two", "expected a whole number of at least 1"),
        ("-v 5000000000", "expected a whole number from 1 to 4294967295"),
        ("-i 0", "expected a whole number of at least 1"),
    ] {
        let error = parse(&format!("bench {line}")).unwrap_err();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn malformed_options_are_refused() {
    for line in [
        "bench --sweep vcpus",
        "bench --sweep vcpus=1,0",
        "bench --sweep vcpus=1,2,1",
        "bench --sweep size=",
        "bench --sweep seed=1",
        "bench -b 0",
        "bench -s huge",
        "bench -m 99",
        "bench --engine xen",
        "bench --phases destroy",
        "bench --deadline 0",
        "bench --pin 3-1",
        "bench --pin ,",
        "bench --pin 0-99999",
        "bench --log-untouched --migrate 4",
        "bench --migrate 4 --phases create",
        "bench --migrate 0",
        "bench --round-ms 20",
    ] {
        assert!(parse(line).is_err(), "{line}");
    }
}

#[test]
fn a_test_that_cannot_run_as_configured_is_no_failed_test() {
    let lost = HarnessError::WrongContents { address: GuestAddress(0x1000), expected: 1, found: 0 };

    assert!(outcome_of_error(HarnessError::TooManyVcpus(513, 512)).is_err());
    assert!(outcome_of_error(HarnessError::MigrationUnsupported).is_err());
    assert_eq!(outcome_of_error(lost).unwrap(), CommandOutcome::Failed);
}
