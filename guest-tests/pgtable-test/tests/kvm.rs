// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of `KvmMachine` on `/dev/kvm`, which `scripts/test` runs if `/dev/kvm` exists:
//! `cargo test --package granule-pgtable-test --test kvm -- --ignored`.

use std::{error::Error as _, sync::mpsc, thread, time::Duration};

use granule_pgtable_test::{
    config::Migration,
    harness::{self, RunEvent, RunPlan},
    machine::{Machine, TestVcpu},
    pgtable_vm::{CountedEvents, KvmConfig, KvmMachine},
    task::{Task, TaskAccess},
};
use granule_types::{
    backing::Backing,
    phase::Phase,
    record::Record,
    testing::skip,
    units::{Bytes, GuestAddress},
};
use granule_vmm::kvm::memslot::DirtyMode;

const SEED: u64 = 0x5eed_0000_0000_5eed;
const SIZE: Bytes = Bytes::mib(4);

fn new_machine(config: KvmConfig) -> KvmMachine {
    KvmMachine::new(config).expect("this test needs /dev/kvm")
}

fn small_config(vcpus: u32) -> KvmConfig {
    KvmConfig { events: CountedEvents::None, ..KvmConfig::new(Backing::Anonymous, SIZE, vcpus) }
}

/// Returns a task that accesses every host page of the region.
fn task(machine: &KvmMachine, access: TaskAccess) -> Task {
    let region = machine.region();
    let pages = region.size.0 / region.host_page_size.0;
    Task { seed: SEED, ..Task::new(access, region.start, pages, region.host_page_size) }
}

/// Creates a machine and binds its first vCPU to this thread.
fn machine_and_vcpu(config: KvmConfig) -> (KvmMachine, Box<dyn TestVcpu>) {
    let mut machine = new_machine(config);
    let mut vcpu = machine.take_vcpus().remove(0);
    vcpu.bind().expect("binding a vCPU to this thread");
    (machine, vcpu)
}

#[test]
#[ignore = "needs /dev/kvm"]
fn guest_and_host_verify_values_after_returns_are_installed() {
    let (machine, mut vcpu) = machine_and_vcpu(small_config(1));

    for access in [
        TaskAccess::Nothing,
        TaskAccess::Read,
        TaskAccess::Write,
        TaskAccess::InstallReturn,
        TaskAccess::Execute,
        TaskAccess::Verify,
    ] {
        vcpu.run(&task(&machine, access)).unwrap();
    }

    let region = machine.region();
    for page in 0..region.size.0 / region.host_page_size.0 {
        let address = GuestAddress(region.start.0 + page * region.host_page_size.0);
        let value = machine.read_u64(address).unwrap();
        assert_eq!(value, Task::value_at(SEED, address));
    }
}

#[test]
#[ignore = "needs /dev/kvm"]
fn reads_after_a_write_touch_only_their_pages() {
    let (machine, mut vcpu) = machine_and_vcpu(small_config(1));
    let page = machine.region().host_page_size;
    let half = SIZE.0 / page.0 / 2;

    vcpu.run(&Task {
        count: 1,
        read_offset: Bytes(SIZE.0 / 2),
        read_count: half,
        read_stride: page,
        ..task(&machine, TaskAccess::WriteThenRead)
    })
    .unwrap();

    // Only the written page is resident: reads map the zero page, which is not counted.
    let resident: u64 = machine.resident_pages().unwrap().resident_bytes.values().sum();
    assert_eq!(resident, page.0);
}

#[test]
#[ignore = "needs /dev/kvm"]
fn a_difference_is_reported_with_its_address_and_the_vcpu_continues() {
    let (machine, mut vcpu) = machine_and_vcpu(small_config(1));
    let write = task(&machine, TaskAccess::Write);
    let wrong = GuestAddress(write.start.0 + 3 * write.stride.0);
    vcpu.run(&write).unwrap();
    vcpu.run(&Task { start: wrong, count: 1, seed: 0, ..write }).unwrap();

    let failure = vcpu.run(&task(&machine, TaskAccess::Verify)).unwrap_err();

    assert_eq!(failure.address, Some(wrong));
    assert!(failure.detail.contains(&format!("{:#x}", wrong.0)), "{failure}");
    vcpu.run(&write).unwrap();
    vcpu.run(&task(&machine, TaskAccess::Verify)).unwrap();
}

#[test]
#[ignore = "needs /dev/kvm"]
fn a_failed_access_is_reported_with_its_address() {
    // The start is within the virtual address width, so virtual and physical addresses are equal.
    let start = GuestAddress(0x4000_0000);
    let config = || KvmConfig { phys_offset: Some(start), ..small_config(1) };
    let run = |access, at| {
        let (machine, mut vcpu) = machine_and_vcpu(config());
        vcpu.run(&Task { start: at, count: 1, ..task(&machine, access) }).unwrap_err()
    };

    let unmapped = run(TaskAccess::Read, GuestAddress(0x5000_0000));
    let without_return = run(TaskAccess::Execute, start);
    let without_memory = run(TaskAccess::Write, GuestAddress(0x8100));

    assert_eq!(unmapped.address, Some(GuestAddress(0x5000_0000)));
    assert!(unmapped.pc.is_some() && unmapped.syndrome.is_some());
    assert!(unmapped.detail.contains("by a read"), "{unmapped}");
    assert_eq!(without_return.pc, Some(start.0 + 8));
    assert!(without_return.syndrome.is_some(), "{without_return}");
    assert!(without_memory.to_string().contains("0x8100"), "{without_memory}");
}

#[test]
#[ignore = "needs /dev/kvm"]
fn a_kicked_vcpu_never_enters_the_guest_again() {
    let mut machine = new_machine(small_config(1));
    let endless = Task { count: u64::MAX, stride: Bytes(0), ..task(&machine, TaskAccess::Read) };
    let nothing = task(&machine, TaskAccess::Nothing);
    let mut vcpu = machine.take_vcpus().remove(0);
    let (sender, receiver) = mpsc::channel();
    let runner = thread::spawn(move || {
        sender.send(vcpu.bind().unwrap()).unwrap();
        let failure = vcpu.run(&endless).unwrap_err();
        let again = vcpu.run(&nothing).unwrap_err();
        (failure, again)
    });
    let kick = receiver.recv().unwrap();
    thread::sleep(Duration::from_millis(20));

    kick.kick();

    let (failure, again) = runner.join().unwrap();
    assert_eq!(failure.exit, "KVM_EXIT_INTR");
    assert!(failure.pc.is_some());
    assert_eq!(again.exit, "KVM_EXIT_INTR");
    // The vCPU has been dropped; kicking it again has no effect.
    kick.kick();
}

#[test]
#[ignore = "needs /dev/kvm"]
fn a_kick_before_the_guest_entry_is_not_lost() {
    let mut machine = new_machine(small_config(1));
    let nothing = task(&machine, TaskAccess::Nothing);
    let mut vcpu = machine.take_vcpus().remove(0);

    vcpu.bind().unwrap().kick();

    assert_eq!(vcpu.run(&nothing).unwrap_err().exit, "KVM_EXIT_INTR");
}

/// Returns the dirty logging modes that this host supports.
fn dirty_modes() -> Vec<DirtyMode> {
    let mut modes = vec![DirtyMode::Plain, DirtyMode::Manual, DirtyMode::ManualInitiallySet];
    for dirty_mode in [DirtyMode::Ring, DirtyMode::RingOnly] {
        match KvmMachine::new(KvmConfig { dirty_mode, ..small_config(1) }) {
            Ok(_) => modes.push(dirty_mode),
            Err(error) => {
                skip(format_args!("{dirty_mode:?} logging: {error}: {:?}", error.source()));
            }
        }
    }
    modes
}

#[test]
#[ignore = "needs /dev/kvm"]
fn written_pages_are_logged_in_every_mode() {
    for dirty_mode in dirty_modes() {
        let (mut machine, mut vcpu) = machine_and_vcpu(KvmConfig { dirty_mode, ..small_config(1) });
        let all = task(&machine, TaskAccess::Write);
        vcpu.run(&all).unwrap();
        assert!(machine.dirty_log().is_err(), "logging is off");

        machine.set_dirty_logging(true).unwrap();
        vcpu.run(&Task { count: 3, stride: Bytes(2 * all.stride.0), ..all }).unwrap();

        for _ in 0..2 {
            let log = machine.dirty_log().unwrap();
            assert_eq!(log[0], 0b1_0101, "{dirty_mode:?}");
            assert!(log[1..].iter().all(|word| *word == 0), "{dirty_mode:?}");
        }
        machine.set_dirty_logging(false).unwrap();
        assert!(machine.dirty_log().is_err(), "logging is off");
    }
}

/// Test of a vCPU that writes more pages than the ring has entries. If KVM exits too late and loses
/// pages, the run must fail.
#[test]
#[ignore = "needs /dev/kvm"]
fn a_full_ring_loses_no_page_silently() {
    if !dirty_modes().contains(&DirtyMode::Ring) {
        return;
    }
    let memory = Bytes::mib(300);
    let (mut machine, mut vcpu) =
        machine_and_vcpu(KvmConfig { dirty_mode: DirtyMode::Ring, memory, ..small_config(1) });
    let all = task(&machine, TaskAccess::Write);
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
    assert_eq!(dirty, memory.0 / machine.region().host_page_size.0);
}

#[test]
#[ignore = "needs /dev/kvm"]
fn a_migration_loses_no_write_in_any_mode() {
    for dirty_mode in dirty_modes() {
        let vcpus = 3;
        let mut machine = new_machine(KvmConfig { dirty_mode, ..small_config(vcpus) });
        let mode = machine.mode().to_string();
        let mut plan = RunPlan {
            iterations: 2,
            migration: Some(Migration { rounds: 6, round_time: Duration::from_millis(20) }),
            ..RunPlan::new(mode, Backing::Anonymous, SIZE, vcpus)
        };
        plan.config.seed = 7;
        let mut rounds: Vec<Record> = Vec::new();

        let result = harness::run(&mut machine, &plan, &mut |progress| {
            if let RunEvent::PhaseComplete(record) = progress
                && record.phase == Phase::Round
            {
                rounds.push(record.clone());
            }
            Ok(())
        });

        result.unwrap_or_else(|error| panic!("{dirty_mode:?}: {error}"));
        assert_eq!(rounds.len(), 12);
        let total = |name: &str| -> u64 { rounds.iter().map(|round| round.events[name]).sum() };
        assert!(total("guest_writes") > 0 && total("pages_logged") > 0);
    }
}

#[test]
#[ignore = "needs /dev/kvm"]
fn dropped_memory_is_empty_and_usable_again() {
    for backing in [Backing::Anonymous, Backing::Shmem] {
        let (mut machine, mut vcpu) = machine_and_vcpu(KvmConfig { backing, ..small_config(1) });
        let start = machine.region().start;
        vcpu.run(&task(&machine, TaskAccess::Write)).unwrap();

        machine.drop_backing().unwrap();
        let resident: u64 = machine.resident_pages().unwrap().resident_bytes.values().sum();
        machine.restore_backing().unwrap();

        assert_eq!(resident, 0);
        assert_eq!(machine.read_u64(start).unwrap(), 0);
        let _ = vcpu.run(&task(&machine, TaskAccess::Verify)).unwrap_err();
        vcpu.run(&task(&machine, TaskAccess::Write)).unwrap();
        vcpu.run(&task(&machine, TaskAccess::Verify)).unwrap();
    }
}

#[test]
#[ignore = "needs /dev/kvm"]
fn vcpus_outlive_their_machine() {
    let (machine, mut vcpu) = machine_and_vcpu(small_config(2));
    let write = task(&machine, TaskAccess::Write);

    drop(machine);

    vcpu.run(&write).unwrap();
}

#[test]
#[ignore = "needs /dev/kvm"]
fn the_address_width_is_configurable() {
    let (machine, mut vcpu) = machine_and_vcpu(KvmConfig {
        phys_offset: Some(GuestAddress(0x4000_0000)),
        ipa_bits: Some(36),
        ..small_config(1)
    });

    vcpu.run(&task(&machine, TaskAccess::Write)).unwrap();

    assert_eq!(machine.ipa_bits(), 36);
}

#[test]
#[ignore = "needs /dev/kvm"]
fn a_capability_that_the_host_lacks_is_refused() {
    let config = KvmConfig { vm_capabilities: vec![0xffff], ..small_config(1) };

    let error = KvmMachine::new(config).unwrap_err();

    let cause = error.source().expect("the reason of KVM").to_string();
    assert!(cause.starts_with("--vm-capability 65535: "), "{cause}");
}

#[test]
fn a_pin_list_of_another_length_is_refused() {
    let error = KvmMachine::new(KvmConfig { pinned_cpus: vec![0], ..small_config(2) }).unwrap_err();

    assert_eq!(error.to_string(), "pinning vCPUs");
}
