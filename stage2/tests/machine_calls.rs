// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The observer's rules for calls of a hypervisor's functions.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use granule_stage2::{
    check::{
        Rule,
        machine::{Hypervisor, LockType, Role},
    },
    geometry::Granule,
};
use support::machine::{observe, rules, rules_with_granule};

/// CPU 0 handles an abort: it looks up the page, maps it, and marks it dirty. The table has a reference
/// for its entry, and the root for the table.
const FAULT: &str = "
0 stack 1 ffff800010053174
0 vtcr 80023558
0 hcr 488000000
0 enter 8 2000 0 0 0
0 leave 8 41180000
0 table 41180000 1 -
0 vttbr 1000041180000
0 hcr 80000001
0 hcr 488000000
0 isb
0 enter 1 ffff000001000000 0 0 0
0 enter 6 0 0 0 0
0 enter 5 0 0 0 0
0 leave 5 41a00
0 word 50000000 0 1
0 enter 6 0 0 0 0
0 dc civac 41a00000 200000 @1
0 dsb sy
0 enter 9 ffff000001000080 0 0 0
0 leave 9 41184000
0 enter 10 41184000 0 0 0
0 enter 10 41180000 0 0 0
0 table 41184000 2 0 0=40000041a007fd
0 store 41180000 0 41184003 release @1
0 enter 4 ffff000001000000 10 0 0
0 word 50000000 1 0
0 leave 1 0
";

/// The host frees the table without an invalidation.
const UNMAP: &str = "
0 word 50000000 0 1
0 store 41180000 41184003 0 plain @1
0 enter 11 41180000 0 0 0
0 enter 11 41184000 0 0 0
0 enter 11 41184000 0 0 0
";

#[test]
fn a_fault_that_keeps_the_rules_of_calls_has_no_finding() {
    assert_eq!(rules(FAULT), []);
}

#[test]
fn each_missing_call_is_found() {
    let lock = "0 word 50000000 0 1\n";
    for (step, replacement, rule) in [
        ("0 enter 4 ffff000001000000 10 0 0\n", "", Rule::NotMarkedDirty),
        ("0 enter 4 ffff000001000000 10 ", "0 enter 4 ffff000001000000 200 ", Rule::NotMarkedDirty),
        ("0 word 50000000 0 1\n0 enter 6 0 0 0 0\n", lock, Rule::StaleLookUp),
        ("0 enter 10 41184000 0 0 0\n", "", Rule::WrongReferences),
        ("0 enter 10 41180000 0 0 0\n", "", Rule::WrongReferences),
    ] {
        let trace = FAULT.replacen(step, replacement, 1);
        assert_ne!(trace, FAULT, "{step}");

        assert_eq!(rules(&trace), [rule], "{step:?}");
    }
}

#[test]
fn references_are_counted_by_table_before_a_guest_has_shown_its_page_size() {
    // The host fills a table of 64K, and links it, before a CPU selects the root.
    let trace = "0 stack 1 ffff800010053174\n0 enter 8 10000 0 0 0\n0 leave 8 41180000\n\
                 0 enter 9 ffff000001000080 0 0 0\n0 leave 9 41190000\n\
                 0 enter 10 41190000 0 0 0\n0 enter 10 4119fff8 0 0 0\n\
                 0 enter 10 41180000 0 0 0\n0 dc civac 41a00000 20000 @1\n0 dsb sy\n\
                 0 vtcr 80026558\n0 hcr 488000000\n\
                 0 table 41190000 3 - 0=40000041a007ff 1fff=40000041a107ff\n\
                 0 table 41180000 2 - 0=41190003\n0 vttbr 1000041180000\n\
                 0 hcr 80000001\n0 hcr 488000000\n0 isb\n0 word 50000000 0 1\n\
                 0 store 41190000 40000041a007ff 40000041a0077f plain @1\n\
                 0 word 50000000 1 0\n";
    let with = |taken: &str| {
        let trace = trace.replacen("0 enter 10 4119fff8 0 0 0\n", taken, 1);
        rules_with_granule(Granule::K64, &trace)
    };

    assert_eq!(with("0 enter 10 4119fff8 0 0 0\n"), []);
    assert_eq!(with(""), [Rule::WrongReferences]);
}

#[test]
fn references_of_several_entries_count_by_their_number() {
    let taken = |number: &str| {
        let at_once = format!("0 enter 15 41184000 {number} 0 0\n");
        FAULT.replacen("0 enter 10 41184000 0 0 0\n", &at_once, 1)
    };

    assert_eq!(rules(&taken("1")), []);
    // The upper half of the register is not part of the number.
    assert_eq!(rules(&taken("ffff000000000001")), []);
    assert_eq!(rules(&taken("2")), [Rule::WrongReferences]);
    let dropped = "0 enter 15 41184000 3 0 0\n0 enter 16 41184000 2 0 0\n";
    assert_eq!(rules(&FAULT.replacen("0 enter 10 41184000 0 0 0\n", dropped, 1)), []);
}

#[test]
fn a_finding_at_the_end_of_a_fault_is_in_the_function_that_changed_the_leaf() {
    let trace =
        FAULT.replace("10 0 0\n", "200 0 0 @2\n").replace("0 vtcr", "0 stack 2 1000\n0 vtcr");

    let observer = observe(&trace, LockType::Spinlock);

    let stacks: Vec<_> = observer.findings().iter().map(|finding| finding.stack.clone()).collect();
    assert_eq!(stacks, [[0xffff_8000_1005_3174]]);
}

#[test]
fn an_invalidation_between_look_up_and_map_is_found() {
    let second = "
0 enter 1 ffff000001000000 0 0 0
0 enter 5 0 0 0 0
0 leave 5 41c00
INVALIDATION
0 word 50000000 0 1
0 enter 6 0 0 0 0
0 dc civac 41c00000 200000 @1
0 dsb sy
0 enter 10 41184000 0 0 0
0 store 41184008 0 40000041c007fd plain @1
0 enter 4 ffff000001000000 200 0 0
0 word 50000000 1 0
0 leave 1 0
";
    let invalidation = "1 word 50000000 0 1\n1 enter 7 0 0 0 0\n1 word 50000000 1 0";
    let with = |text| [FAULT, &second.replace("INVALIDATION", text)].concat();

    assert_eq!(rules(&with("")), []);
    assert_eq!(rules(&with(invalidation)), [Rule::StaleLookUp]);
}

#[test]
fn a_table_that_is_freed_before_the_invalidation_is_found() {
    assert_eq!(rules(&[FAULT, UNMAP].concat()), [Rule::FreedWhileWalked]);
}

#[test]
fn a_table_may_be_freed_before_the_invalidation_of_its_last_leaf() {
    let unmap = "
0 hcr 480000000
0 isb
0 enter 2 0 0 0 0
0 word 50000000 0 1
0 store 41184000 40000041a007fd 0 plain @1
0 enter 11 41184000 0 0 0
0 store 41180000 41184003 0 plain @1
0 dsb ishst
0 tlbi ipas2e1is 0 @1
0 dsb ish
0 tlbi vmalle1is 0 @1
0 dsb ish
0 enter 11 41180000 0 0 0
0 enter 11 41184000 0 0 0
0 dc civac 41a00000 200000 @1
0 dsb sy
0 word 50000000 1 0
0 leave 2 0
";
    // A hint of the leaf's level invalidates the table only if it is missing.
    let only_leaf = unmap.replace("ipas2e1is 0", "ipas2e1is 600000000000");

    assert_eq!(rules(&[FAULT, unmap].concat()), []);
    assert!(rules(&[FAULT, &only_leaf].concat()).contains(&Rule::FreedWhileWalked));
}

#[test]
fn a_table_page_that_is_freed_while_it_is_linked_is_found() {
    let free = |page| [FAULT, &format!("0 enter 12 {page} 0 0 0\n")].concat();

    assert_eq!(rules(&free("41a00000")), []);
    assert_eq!(rules(&free("41184000")), [Rule::FreedWhileWalked]);
}

/// CPU 0 handles a permission fault: it makes the block writable and marks its first page dirty.
const RELAX: &str = "
0 enter 1 ffff000001000000 0 0 0
0 word 50000000 0 1
0 store 41184000 40000041a0077d 40000041a007fd plain @1
0 dsb ishst
0 hcr 480000000
0 isb
0 tlbi ipas2e1 0 @1
0 dsb nsh
0 tlbi vmalle1 0 @1
0 dsb nsh
0 hcr 488000000
0 isb
0 enter 4 ffff000001000000 10 0 0
0 word 50000000 1 0
0 leave 1 0
";

#[test]
fn a_fault_that_relaxes_a_leaf_invalidates_it_on_its_own_cpu() {
    let start = FAULT.replace("40000041a007fd", "40000041a0077d");
    let relax = |removed: &str| {
        let trace = [&start, &*RELAX.replace(removed, "")].concat();
        rules(&trace)
    };

    assert_eq!(relax("none"), []);
    for step in ["0 tlbi ipas2e1 0 @1\n", "0 dsb nsh\n", "0 tlbi vmalle1 0 @1\n"] {
        assert_eq!(relax(step), [Rule::NoProgress], "{step:?}");
    }
}

#[test]
fn a_leaf_that_is_younger_than_the_fault_needs_no_invalidation() {
    let start = FAULT.replace("40000041a007fd", "40000041a0077d");
    let relax = RELAX.replace("0 tlbi ipas2e1 0 @1\n", "");
    let (abort, fault) = relax.split_once("0 word").unwrap();
    // CPU 1 makes the entry that CPU 0 relaxes.
    let other = "
1 word 50000000 0 1
1 store 41184000 40000041a0077d 40000041a0037d plain @1
1 store 41184000 40000041a0037d 40000041a0077d plain @1
1 word 50000000 1 0
";
    let fault = format!("0 word{fault}");

    // CPU 0 ceases to run the guest (HCR_EL2.TGE) before its function is called.
    let (guest, host) = ("0 hcr 480000001\n0 isb\n", "0 hcr 488000000\n0 isb\n");

    assert_eq!(rules(&[&start, abort, other, &fault].concat()), []);
    assert_eq!(rules(&[&start, guest, host, other, abort, &fault].concat()), []);
    // CPU 0 may have taken its exception earlier, which the trace does not have.
    assert_eq!(rules(&[&start, guest, other, host, abort, &fault].concat()), []);
    assert_eq!(rules(&[&start, other, guest, host, abort, &fault].concat()), [Rule::NoProgress]);
}

/// The fault of `FAULT` by a thread that another one preempts before the page is marked dirty.
const PREEMPTED: &str = "
0 thread ffff000000008000
0 enter 1 ffff000001000000 0 0 0
0 leave 1 0
";

#[test]
fn a_fault_belongs_to_its_thread() {
    let (start, end) = FAULT.split_once("0 enter 4").unwrap();
    let own = "0 thread ffff000000009000\n";
    let start = start.replacen("0 enter 1 ", &format!("{own}0 enter 1 "), 1);
    let preempted = |own| [&start, PREEMPTED, own, "0 enter 4", end].concat();
    let unmarked = |text: &str| text.replace("0 enter 4 ffff000001000000 10 0 0\n", "");

    assert_eq!(rules(&preempted(own)), []);
    assert_eq!(rules(&unmarked(&preempted(own))), [Rule::NotMarkedDirty]);
    // The other thread's mark is none of this fault.
    let other = PREEMPTED.replace("0 leave", "0 enter 4 ffff000001000000 10 0 0\n0 leave");
    let marked_by_other = unmarked(&preempted(own)).replace(PREEMPTED, &other);
    assert_eq!(rules(&marked_by_other), [Rule::NotMarkedDirty]);
}

#[test]
fn a_fault_continues_on_another_cpu() {
    let (start, end) = FAULT.split_once("0 enter 4").unwrap();
    let start = start.replacen("0 enter 1 ", "0 thread ffff000000009000\n0 enter 1 ", 1);
    let moves = |end: &str| {
        let end = end.replace("0 word 50000000 1 0\n", "").replace("0 leave", "1 leave");
        let unlock = "0 word 50000000 1 0\n1 thread ffff000000009000\n";
        [&start, unlock, &end].concat()
    };

    assert_eq!(rules(&moves(&format!("1 enter 4{end}"))), []);
    let (_, unmarked) = end.split_once('\n').unwrap();
    assert_eq!(rules(&moves(unmarked)), [Rule::NotMarkedDirty]);
}

#[test]
fn a_fault_that_relaxes_a_leaf_and_changes_the_cpu_has_invalidated_it_before_or_after() {
    let start = FAULT.replace("40000041a007fd", "40000041a0077d");
    let fault = RELAX.replacen("0 enter 1", "0 thread ffff000000009000\n0 enter 1", 1);
    let fault = fault.replace("0 leave 1", "1 thread ffff000000009000\n1 leave 1");
    let invalidation = "0 tlbi ipas2e1 0 @1\n0 dsb nsh\n0 tlbi vmalle1 0 @1\n0 dsb nsh\n";
    let missing = fault.replace(invalidation, "");
    assert!(missing.len() < fault.len());
    let select = "1 vtcr 80023558\n1 hcr 480000000\n1 vttbr 1000041180000\n1 isb\n";
    let after = [select, &invalidation.replace("0 ", "1 ").replace("1 @1", "0 @1")].concat();
    let after = after.replace("nsh", "ish").replace("e1 ", "e1is ");
    let after = missing.replace("0 word 50000000 1 0", &format!("{after}0 word 50000000 1 0"));

    assert_eq!(rules(&[&start, &*fault].concat()), []);
    assert_eq!(rules(&[&start, &*missing].concat()), [Rule::NoProgress]);
    assert_eq!(rules(&[&start, &*after].concat()), []);
}

#[test]
fn restrictions_of_a_call_are_complete_when_the_last_thread_returns() {
    let call = "
0 thread ffff000000009000
0 enter 2 0 0 0 0
0 hcr 480000000
0 isb
0 word 50000000 0 1
0 store 41184000 40000041a007fd 40000041a0077d plain @1
0 word 50000000 1 0
0 thread ffff000000008000
0 enter 2 0 0 0 0
0 leave 2 0
INVALIDATION0 thread ffff000000009000
0 leave 2 0
";
    let invalidation = "0 dsb ishst\n0 tlbi vmalls12e1is 0\n0 dsb ish\n";
    let with = |text| [FAULT, &call.replace("INVALIDATION", text)].concat();

    assert_eq!(rules(&with(invalidation)), []);
    assert_eq!(rules(&with("")), [Rule::ReductionNotComplete]);
}

#[test]
fn a_call_whose_end_is_missing_is_counted_and_ends_with_the_next_one() {
    let thread = "0 thread ffff000000009000\n";
    let unbalanced = |text: &str| {
        let observer = observe(&[FAULT, thread, text].concat(), LockType::Spinlock);
        observer.totals().unbalanced_calls
    };

    assert_eq!(unbalanced("0 enter 2 0 0 0 0\n0 leave 2 0\n"), 0);
    assert_eq!(unbalanced("0 enter 2 0 0 0 0\n0 enter 2 0 0 0 0\n0 leave 2 0\n"), 1);
    assert_eq!(unbalanced("0 leave 2 0\n0 leave 1 0\n"), 2);
    assert_eq!(unbalanced("0 enter 1 0 0 0 0\n0 enter 1 0 0 0 0\n"), 1);
}

#[test]
fn a_block_that_becomes_writable_under_logging_is_found() {
    let start = FAULT.replace("40000041a007fd", "40000041a0077d");
    let with = |changes: &[&str]| rules(&[&start, &*changes.concat(), RELAX].concat());
    let (prepare, commit) = ("0 enter 13 50000000 0 200 1\n", "0 enter 14 50000000 0 200 1\n");

    assert_eq!(with(&[prepare]), [], "faults may not observe the change");
    assert_eq!(with(&[prepare, commit]), [Rule::NotMarkedDirty]);
    assert_eq!(with(&[commit, "0 enter 13 50000000 0 200 0\n"]), [], "logging ends");
    assert_eq!(with(&["0 enter 14 50000000 200 200 1\n"]), [], "other addresses");
    assert_eq!(with(&["0 enter 14 60000000 0 200 1\n"]), [], "another guest");
}

#[test]
fn memory_without_a_log_needs_no_mark() {
    let unmarked = FAULT.replace("0 enter 4 ffff000001000000 10 0 0\n", "");
    let with = |change: &str| rules(&[change, &unmarked].concat());

    assert_eq!(with("0 enter 14 50000000 0 200 0\n"), [], "no memory is logged");
    assert_eq!(with("0 enter 14 50000000 200 200 1\n"), [], "other addresses");
    assert_eq!(with(""), [Rule::NotMarkedDirty], "the trace has no change of the memory");
    assert_eq!(with("0 enter 14 60000000 0 200 0\n"), [Rule::NotMarkedDirty], "another guest");
}

#[test]
fn logged_memory_ends_at_the_highest_address() {
    for arguments in ["fffffffffffff 1", "fffffffffffff ffffffffffffffff", "ffffffffffffffff 1"] {
        let trace = format!("{FAULT}0 enter 14 50000000 {arguments} 1\n");

        assert_eq!(rules(&trace), [], "{arguments}");
    }
}

#[test]
fn memory_that_is_logged_before_a_guest_runs_has_pages_of_the_host() {
    // Logging of 512M from 512M on, in pages of 64K; a fault then makes a block there writable.
    let trace = "0 stack 1 ffff800010053174\n0 enter 14 50000000 2000 2000 1\n\
                 0 vtcr 80026558\n0 hcr 488000000\n0 table 41180000 2 -\n0 vttbr 1000041180000\n\
                 0 hcr 80000001\n0 hcr 488000000\n0 isb\n0 enter 1 ffff000001000000 0 0 0\n0 enter 6 0 0 0 0\n0 enter 5 0 0 0 0\n\
                 0 leave 5 6000\n0 word 50000000 0 1\n0 enter 6 0 0 0 0\n\
                 0 dc civac 60000000 20000000 @1\n0 dsb sy\n\
                 0 store 41180008 0 400000600007fd release @1\n\
                 0 enter 4 ffff000001000080 2000 0 0\n0 word 50000000 1 0\n0 leave 1 0\n";

    assert_eq!(rules_with_granule(Granule::K64, trace), [Rule::NotMarkedDirty]);
    assert_eq!(rules_with_granule(Granule::K64, &trace.replacen("2000 1", "2000 0", 1)), []);
}

#[test]
fn rules_without_a_function_are_unchecked() {
    let hypervisor = |functions: &[(u16, Role)]| Hypervisor {
        lock: LockType::Spinlock,
        locked_entry: None,
        granule: Granule::K4,
        functions: functions.iter().copied().collect(),
    };
    let is_unchecked = |hypervisor: &Hypervisor, rule| {
        hypervisor.unchecked_rules().iter().any(|(unchecked, _)| *unchecked == rule)
    };

    let none = hypervisor(&[]);
    let dirty = hypervisor(&[(1, Role::Abort), (2, Role::MarkDirty { argument: 2 })]);

    assert!(is_unchecked(&none, Rule::RangeNotEncodable));
    assert!(is_unchecked(&none, Rule::NotMarkedDirty) && is_unchecked(&none, Rule::StaleLookUp));
    assert!(is_unchecked(&none, Rule::WrongReferences) && !is_unchecked(&none, Rule::WrongTtl));
    assert!(!is_unchecked(&dirty, Rule::NotMarkedDirty) && is_unchecked(&dirty, Rule::StaleLookUp));
}
