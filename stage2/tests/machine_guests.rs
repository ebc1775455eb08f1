// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests of observed machines: hypervisors without a known lock, the number of CPUs, registers,
//! VMIDs.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use granule_stage2::check::{
    Rule,
    machine::{LockType, Machine},
};
use support::machine::{machine, observe_on, rules};

/// A guest that one block maps, and CPU 0 that may change its tables.
const BLOCK: &str = "
0 stack 1 ffff800010053174
0 dc civac 41a00000 200000 @1
0 dsb sy
0 vtcr 80023558
0 hcr 480000000
0 table 41184000 2 - 0=40000041a007fd
0 table 41180000 1 - 0=41184003
0 vttbr 1000041180000
0 hcr 80000001
0 hcr 488000000
0 isb
";

const FLUSH: &str = "0 dsb ishst\n0 tlbi vmalls12e1is 0\n0 dsb ish\n";

#[test]
fn without_a_known_lock_a_later_table_is_no_split() {
    let (lock, unlock) = ("0 word 50000000 0 1\n", "0 word 50000000 1 0\n");
    let unmap = ["0 store 41184000 40000041a007fd 0 plain @1\n", FLUSH].concat();
    // Two pages exchange their memory.
    let link = "0 table 41186000 3 - 0=40000041a017ff 1=40000041a007ff\n\
                0 store 41184000 0 41186003 release @1\n";
    let is_found =
        |steps: &[&str]| rules(&[&[BLOCK], steps].concat().concat()).contains(&Rule::SplitRelaxed);

    assert!(is_found(&[lock, &unmap, link, unlock]));
    assert!(!is_found(&[lock, &unmap, unlock, lock, link, unlock]));
    assert!(!is_found(&[&unmap, link]));
}

#[test]
fn events_of_cpus_that_do_not_exist_are_ignored() {
    let unknown = [BLOCK, "64 dsb ish\n255 isb\n1 dsb ish\n"].concat();
    for (cpus, guests) in [(0, 0), (1, 1), (64, 1), (u8::MAX, 1)] {
        let observer = observe_on(Machine { cpus, ..machine(LockType::Spinlock) }, &unknown);

        assert_eq!(observer.totals().guests, guests, "{cpus} CPUs");
        assert!(observer.findings().is_empty());
    }
}

#[test]
fn a_root_is_checked_whichever_of_its_registers_is_written_last() {
    let (vtcr, hcr) = ("0 vtcr 80023558\n", "0 hcr 480000000\n");
    let (vttbr, rest) = ("0 vttbr 1000041180000\n", "0 isb\n");
    let run = "0 hcr 480000001\n";
    let (clean, registers) = BLOCK.split_once(vtcr).unwrap();
    let tables = registers.replace(hcr, "").replace(vttbr, "").replace(rest, "");
    let moved = "0 store 41184000 40000041a007fd 40000041c007fd plain @1\n";
    // The tables are known when the last register is written.
    for order in [
        [vtcr, &tables, vttbr, run],
        [vttbr, vtcr, &tables, run],
        [run, vttbr, vtcr, &tables],
        [vttbr, run, vtcr, &tables],
    ] {
        let trace = [clean, &order.concat(), rest, moved].concat();

        let observer = observe_on(machine(LockType::Spinlock), &trace);

        let totals = observer.totals();
        assert_eq!((totals.guests, totals.unsupported), (1, 0), "{order:?}");
        let found = observer.findings().iter().any(|one| one.rule == Rule::BreakBeforeMake);
        assert!(found, "{order:?}");
    }
    // The geometry of another guest, which the CPU is about to select.
    let other = ["0 vtcr 800235d8\n", vttbr, vtcr].concat();
    let observer = observe_on(machine(LockType::Spinlock), &[clean, &*other].concat());
    assert_eq!((observer.totals().guests, observer.totals().unsupported), (0, 1));
}

/// Returns the events of a CPU that runs the guest of a root with a VMID.
fn run(cpu: u8, root: u64, vmid: u64) -> String {
    let vttbr = vmid << 48 | root;
    let steps = [
        format!("table {root:x} 1 -"),
        format!("vttbr {vttbr:x}"),
        "isb".into(),
        "hcr 480000001".into(),
        "hcr 480000000".into(),
    ];
    steps.map(|step| format!("{cpu} {step}\n")).concat()
}

/// Returns whether the runs of guests, and steps between them, use entries of another VMID.
fn mixes_vmids(steps: &[&str]) -> bool {
    let start = "0 vtcr 80023558\n1 vtcr 80023558\n0 hcr 480000000\n1 hcr 480000000\n";
    let trace = [&[start], steps].concat().concat();
    let observer = observe_on(machine(LockType::Spinlock), &trace);
    let rules: Vec<_> = observer.findings().iter().map(|finding| finding.rule).collect();
    assert!(rules.is_empty() || rules == [Rule::VmidNotCurrent], "{rules:?}");
    !rules.is_empty()
}

#[test]
fn a_vmid_changes_its_guest_only_after_an_invalidation() {
    let (one, other) = (0x4118_0000, 0x4218_0000);
    let (first, second) = (run(0, one, 1), run(0, other, 1));
    let between = |steps: &str| mixes_vmids(&[&first, steps, &second]);

    assert!(between(""));
    assert!(!between("0 tlbi alle1is 0\n0 dsb ish\n"));
    assert!(!between("1 tlbi alle1is 0\n1 dsb ish\n"));
    assert!(!between("0 tlbi alle1 0\n0 dsb nsh\n"));
    assert!(!between("0 tlbi vmalls12e1is 0\n0 dsb ish\n"));
    // Incomplete, of another CPU alone, of another VMID, of stage 1.
    assert!(between("0 tlbi alle1is 0\n0 dsb ishst\n"));
    assert!(between("0 tlbi alle1is 0\n0 dsb nsh\n1 dsb ish\n"));
    assert!(between("1 tlbi alle1 0\n1 dsb ish\n"));
    assert!(between("0 vttbr 2000041180000\n0 isb\n0 tlbi vmalls12e1is 0\n0 dsb ish\n"));
    assert!(between("0 tlbi vmalle1is 0\n0 dsb ish\n"));
    // CPU 1 runs the first guest at the invalidation.
    let still = run(1, one, 1).replace("1 hcr 480000000\n", "");
    let (flush, second) = ("0 tlbi vmalls12e1is 0\n0 dsb ish\n", run(1, other, 1));
    assert!(mixes_vmids(&[&first, &still, flush, &second]));

    assert!(!mixes_vmids(&[&first, &run(0, other, 2), &first, &run(1, other, 2)]));
    // A host with a table of its own, as with protected KVM.
    let host = run(1, 0x4318_0000, 0);
    assert!(!mixes_vmids(&[&host, &first, &run(0, other, 1)]));
}

#[test]
fn a_guest_changes_its_vmid_only_after_an_invalidation() {
    let root = 0x4118_0000;
    let (first, second) = (run(0, root, 1), run(0, root, 2));
    let flush = "0 tlbi vmalls12e1is 0\n0 dsb ish\n";
    let running = run(1, root, 1).replace("1 hcr 480000000\n", "");

    assert!(mixes_vmids(&[&first, &second]));
    assert!(!mixes_vmids(&[&first, flush, &second]));
    assert!(mixes_vmids(&[&first, "0 tlbi vmalls12e1 0\n0 dsb ish\n", &second]));
    assert!(mixes_vmids(&[&first, &running, flush, &second]));
}
