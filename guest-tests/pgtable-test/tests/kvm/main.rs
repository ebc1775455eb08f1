// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The machine on a real `/dev/kvm`: guest programs, their failures, dirty logging, dropped memory.
//! Without `/dev/kvm` these tests are ignored; `scripts/test` runs them where it exists:
//! `cargo test --package granule-pgtable-test --test kvm -- --ignored`.

mod host;

use std::{sync::mpsc, thread, time::Duration};

use granule_pgtable_test::{
    machine::{Machine, Vcpu},
    pgtable_vm::{KvmConfig, KvmMachine},
    task::{Access, Task},
};
use granule_types::{
    backing::Backing,
    units::{Bytes, GuestAddress},
};

const SEED: u64 = 0x5eed_0000_0000_5eed;
const SIZE: Bytes = Bytes::mib(4);

fn made(config: KvmConfig) -> KvmMachine {
    KvmMachine::new(config).expect("a machine; this test needs /dev/kvm")
}

fn small(vcpus: u32) -> KvmConfig {
    KvmConfig { events: false, ..KvmConfig::new(Backing::Anonymous, SIZE, vcpus) }
}

/// Returns a task that accesses every host page of the region.
fn task(machine: &KvmMachine, access: Access) -> Task {
    let region = machine.region();
    let pages = region.size.0 / region.host_page.0;
    Task { seed: SEED, ..Task::new(access, region.start, pages, region.host_page) }
}

/// Makes a machine and binds its first vCPU to this thread.
fn machine_and_vcpu(config: KvmConfig) -> (KvmMachine, Box<dyn Vcpu>) {
    let mut machine = made(config);
    let mut vcpu = machine.take_vcpus().remove(0);
    vcpu.bind().expect("a thread to run on");
    (machine, vcpu)
}

#[test]
#[ignore = "needs /dev/kvm"]
fn guest_and_host_verify_written_values_after_planting() {
    let (machine, mut vcpu) = machine_and_vcpu(small(1));

    for access in [
        Access::Nothing,
        Access::Read,
        Access::Write,
        Access::Plant,
        Access::Execute,
        Access::Verify,
    ] {
        vcpu.run(&task(&machine, access)).unwrap();
    }

    let region = machine.region();
    for page in 0..region.size.0 / region.host_page.0 {
        let address = GuestAddress(region.start.0 + page * region.host_page.0);
        let value = machine.read_u64(address).unwrap();
        assert_eq!(value, Task::value_at(SEED, address));
    }
}

#[test]
#[ignore = "needs /dev/kvm"]
fn reads_after_a_write_touch_only_their_pages() {
    let (machine, mut vcpu) = machine_and_vcpu(small(1));
    let page = machine.region().host_page;
    let half = SIZE.0 / page.0 / 2;

    vcpu.run(&Task {
        count: 1,
        inner_first: Bytes(SIZE.0 / 2),
        inner_count: half,
        inner_stride: page,
        ..task(&machine, Access::WriteThenRead)
    })
    .unwrap();

    // One page written; the zero page behind those only read counts nowhere.
    let resident: u64 = machine.obtained().unwrap().resident.values().sum();
    assert_eq!(resident, page.0);
}

#[test]
#[ignore = "needs /dev/kvm"]
fn a_difference_is_reported_with_its_address() {
    let (machine, mut vcpu) = machine_and_vcpu(small(1));
    let write = task(&machine, Access::Write);
    let wrong = GuestAddress(write.start.0 + 3 * write.stride.0);
    vcpu.run(&write).unwrap();
    vcpu.run(&Task { start: wrong, count: 1, seed: 0, ..write }).unwrap();

    let failure = vcpu.run(&task(&machine, Access::Verify)).unwrap_err();

    assert_eq!(failure.address, Some(wrong));
    assert!(failure.detail.contains(&format!("{:#x}", wrong.0)), "{failure}");
}

#[test]
#[ignore = "needs /dev/kvm"]
fn a_vcpu_continues_after_a_difference() {
    let (machine, mut vcpu) = machine_and_vcpu(small(1));
    let _ = vcpu.run(&task(&machine, Access::Verify)).unwrap_err();

    vcpu.run(&task(&machine, Access::Write)).unwrap();
    vcpu.run(&task(&machine, Access::Verify)).unwrap();
}

#[test]
#[ignore = "needs /dev/kvm"]
fn an_unmapped_stage_1_address_is_reported_as_a_fault() {
    let (machine, mut vcpu) = machine_and_vcpu(small(1));
    let outside = GuestAddress(0x4000_0000);

    let failure = vcpu.run(&Task { start: outside, ..task(&machine, Access::Read) }).unwrap_err();

    assert_eq!(failure.address, Some(outside));
    assert!(failure.pc.is_some() && failure.syndrome.is_some());
    assert!(failure.detail.contains("by a read"), "{failure}");
}

#[test]
#[ignore = "needs /dev/kvm"]
fn executing_an_unplanted_page_is_reported_with_its_address() {
    // Below the width of virtual addresses, so that they equal the physical ones.
    let (machine, mut vcpu) =
        machine_and_vcpu(KvmConfig { phys_offset: Some(GuestAddress(0x4000_0000)), ..small(1) });

    let failure = vcpu.run(&task(&machine, Access::Execute)).unwrap_err();

    assert_eq!(failure.pc, Some(machine.region().start.0 + 8));
    assert!(failure.syndrome.is_some(), "{failure}");
}

#[test]
#[ignore = "needs /dev/kvm"]
fn a_store_without_memory_is_reported_with_its_address() {
    let (machine, mut vcpu) = machine_and_vcpu(small(1));

    let failure = vcpu
        .run(&Task { start: GuestAddress(0x8100), count: 1, ..task(&machine, Access::Write) })
        .unwrap_err();

    assert!(failure.to_string().contains("0x8100"), "{failure}");
}

#[test]
#[ignore = "needs /dev/kvm"]
fn a_kicked_vcpu_never_enters_the_guest_again() {
    let mut machine = made(small(1));
    let endless = Task { count: u64::MAX, stride: Bytes(0), ..task(&machine, Access::Read) };
    let nothing = task(&machine, Access::Nothing);
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
    // The vCPU is dropped, so another kick has no effect.
    kick.kick();
}

#[test]
#[ignore = "needs /dev/kvm"]
fn a_kick_before_the_guest_entry_is_not_lost() {
    let mut machine = made(small(1));
    let nothing = task(&machine, Access::Nothing);
    let mut vcpu = machine.take_vcpus().remove(0);

    vcpu.bind().unwrap().kick();

    assert_eq!(vcpu.run(&nothing).unwrap_err().exit, "KVM_EXIT_INTR");
}
