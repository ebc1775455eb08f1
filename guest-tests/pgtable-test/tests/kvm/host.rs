// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's part: dirty logging, migration, dropped memory, configuration.

use std::{error::Error as _, time::Duration};

use granule_pgtable_test::{
    config::Migration,
    harness::{self, Plan, Progress},
    machine::Machine,
    pgtable_vm::{KvmConfig, KvmMachine},
    task::{Access, Task},
};
use granule_types::{
    backing::Backing,
    phase::Phase,
    record::Record,
    testing::skip,
    units::{Bytes, GuestAddress},
};
use granule_vmm::kvm::memslot::DirtyMode;

use super::{SIZE, machine_and_vcpu, made, small, task};

/// Returns the modes of dirty logging that this host supports.
fn dirty_modes() -> Vec<DirtyMode> {
    let dirty = DirtyMode::Ring;
    let mut modes = vec![DirtyMode::Plain, DirtyMode::Manual, DirtyMode::ManualInitiallySet];
    match KvmMachine::new(KvmConfig { dirty, ..small(1) }) {
        Ok(_) => modes.push(dirty),
        Err(error) => skip(format_args!("{dirty:?} logging: {error}: {:?}", error.source())),
    }
    modes
}

#[test]
#[ignore = "needs /dev/kvm"]
fn written_pages_are_logged_in_every_mode() {
    for dirty in dirty_modes() {
        let (mut machine, mut vcpu) = machine_and_vcpu(KvmConfig { dirty, ..small(1) });
        let all = task(&machine, Access::Write);
        vcpu.run(&all).unwrap();
        assert!(machine.dirty_log().is_err(), "logging is off");

        machine.set_dirty_logging(true).unwrap();
        vcpu.run(&Task { count: 3, stride: Bytes(2 * all.stride.0), ..all }).unwrap();

        for _ in 0..2 {
            let log = machine.dirty_log().unwrap();
            assert_eq!(log[0], 0b1_0101, "{dirty:?}");
            assert!(log[1..].iter().all(|word| *word == 0), "{dirty:?}");
        }
        machine.set_dirty_logging(false).unwrap();
        assert!(machine.dirty_log().is_err(), "logging is off");
    }
}

/// The vCPU writes more pages than a ring has entries, so it exits to have the ring harvested. Some
/// hosts' KVM lets vCPUs exit too late and loses pages, which must be an error.
#[test]
#[ignore = "needs /dev/kvm"]
fn a_full_ring_loses_no_page_silently() {
    if !dirty_modes().contains(&DirtyMode::Ring) {
        return;
    }
    let memory = Bytes::mib(300);
    let (mut machine, mut vcpu) =
        machine_and_vcpu(KvmConfig { dirty: DirtyMode::Ring, memory, ..small(1) });
    let all = task(&machine, Access::Write);
    vcpu.run(&all).unwrap();

    machine.set_dirty_logging(true).unwrap();
    let written = vcpu.run(&all);

    if let Err(error) = written {
        let text = format!("{error:?}");
        assert!(text.contains("no free entry"), "{text}");
        return skip(format_args!("this host's KVM overruns dirty rings: {text}"));
    }
    let log = machine.dirty_log().unwrap();
    let dirty: u64 = log.iter().map(|word| u64::from(word.count_ones())).sum();
    assert_eq!(dirty, memory.0 / machine.region().host_page.0);
}

#[test]
#[ignore = "needs /dev/kvm"]
fn a_migration_loses_no_write_in_any_mode() {
    for dirty in dirty_modes() {
        let vcpus = 3;
        let mut machine = made(KvmConfig { dirty, ..small(vcpus) });
        let mode = machine.mode().to_string();
        let mut plan = Plan {
            iterations: 2,
            migration: Some(Migration { rounds: 6, round_time: Duration::from_millis(20) }),
            ..Plan::new(mode, Backing::Anonymous, SIZE, vcpus)
        };
        plan.config.seed = 7;
        let mut rounds: Vec<Record> = Vec::new();

        // The harness compares source and destination with each other and with the vCPUs' writes.
        let result = harness::run(&mut machine, &plan, &mut |progress| {
            if let Progress::Phase(record) = progress
                && record.phase == Phase::Round
            {
                rounds.push(record.clone());
            }
            Ok(())
        });

        result.unwrap_or_else(|error| panic!("{dirty:?}: {error}"));
        assert_eq!(rounds.len(), 12);
        let total = |name: &str| -> u64 { rounds.iter().map(|round| round.events[name]).sum() };
        assert!(total("guest_writes") > 0 && total("pages_logged") > 0);
    }
}

#[test]
#[ignore = "needs /dev/kvm"]
fn dropped_memory_is_empty_and_usable_again() {
    for backing in [Backing::Anonymous, Backing::Shmem] {
        let (mut machine, mut vcpu) = machine_and_vcpu(KvmConfig { backing, ..small(1) });
        let start = machine.region().start;
        vcpu.run(&task(&machine, Access::Write)).unwrap();

        machine.drop_backing().unwrap();
        let resident: u64 = machine.obtained().unwrap().resident.values().sum();
        machine.restore_backing().unwrap();

        assert_eq!(resident, 0);
        assert_eq!(machine.read_u64(start).unwrap(), 0);
        let _ = vcpu.run(&task(&machine, Access::Verify)).unwrap_err();
        vcpu.run(&task(&machine, Access::Write)).unwrap();
        vcpu.run(&task(&machine, Access::Verify)).unwrap();
    }
}

#[test]
#[ignore = "needs /dev/kvm"]
fn vcpus_outlive_their_machine() {
    let (machine, mut vcpu) = machine_and_vcpu(small(2));
    let write = task(&machine, Access::Write);

    drop(machine);

    vcpu.run(&write).unwrap();
}

#[test]
#[ignore = "needs /dev/kvm"]
fn the_address_width_is_configurable() {
    let (machine, mut vcpu) = machine_and_vcpu(KvmConfig {
        phys_offset: Some(GuestAddress(0x4000_0000)),
        ipa_bits: Some(36),
        ..small(1)
    });

    vcpu.run(&task(&machine, Access::Write)).unwrap();

    assert_eq!(machine.ipa_bits(), 36);
}

#[test]
fn a_pin_list_of_another_length_is_refused() {
    let error = KvmMachine::new(KvmConfig { pin: vec![0], ..small(2) }).unwrap_err();

    assert_eq!(error.to_string(), "pinning vCPUs");
}
