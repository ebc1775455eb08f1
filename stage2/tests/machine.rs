// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The observer of machines: a trace of a correct hypervisor has no finding, and each trace without one
//! of its steps has the finding of the missing step.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use granule_stage2::check::{Rule, machine::LockType};
use support::machine::{observe, rules};

/// Two guests run; the first one maps a page, then a block of the same addresses, as CPU 0 of a
/// hypervisor with E2H does it.
const TRACE: &str = "
0 stack 1 ffff800010053174
0 id ctr_el0 a444c004
0 vtcr 80023558
0 hcr 488000000
0 table 41180000 1 -
0 vttbr 1000041180000
0 hcr 80000001
0 hcr 488000000
0 isb
1 vtcr 80023558
1 hcr 488000000
1 table 42180000 1 -
1 vttbr 2000042180000
1 hcr 80000001
1 hcr 488000000
1 isb
0 write 41a00000
0 word 50000000 0 1
0 dc civac 41a00000 1000 @1
0 dsb sy
0 table 41185000 3 -
0 table 41184000 2 0 0=41185003
0 store 41180000 0 41184003 release @1
0 store 41185000 0 40000041a007ff plain @1
0 word 50000000 1 0
0 word 50000000 0 1
0 dc civac 41a00000 200000 @1
0 dsb sy
0 store 41184000 41185003 0 plain @1
0 dsb ishst
0 hcr 480000000
0 isb
0 tlbi ipas2e1is 0 @1
0 dsb ish
0 tlbi vmalle1is 0 @1
0 dsb ish
0 isb
0 hcr 488000000
0 isb
0 store 41184000 0 40000041a007fd plain @1
0 word 50000000 1 0
0 enter 2 0 0 0 0
0 word 50000000 0 1
0 store 41184000 40000041a007fd 40000041a0077d plain @1
0 word 50000000 1 0
0 dsb ishst
0 hcr 480000000
0 isb
0 tlbi vmalls12e1is 0
0 dsb ish
0 isb
0 hcr 488000000
0 isb
0 leave 2 0
0 free 41180000
";

fn findings(trace: &str) -> Vec<(Rule, u64)> {
    let observer = observe(trace, LockType::Spinlock);
    assert_eq!(observer.totals().guests, 2);
    observer.findings().iter().map(|finding| (finding.rule, finding.count)).collect()
}

#[test]
fn a_correct_hypervisor_has_no_finding() {
    assert_eq!(findings(TRACE), []);
}

#[test]
fn each_missing_or_weaker_step_is_found() {
    for (step, replacement, rule) in [
        ("0 dc civac 41a00000 1000 @1\n", "", Rule::UncleanReachable),
        ("0 dc civac 41a00000 200000 @1\n", "", Rule::UncleanReachable),
        ("0 dc civac 41a00000 200000", "0 dc cvau 41a00000 200000", Rule::UncleanReachable),
        ("0 dc civac 41a00000 200000", "0 dc ivac 41a00000 200000", Rule::UncleanReachable),
        ("0 dsb sy\n0 table", "0 table", Rule::UncleanReachable),
        ("0 tlbi ipas2e1is 0 @1\n", "0 tlbi ripas2le1is 400000000000 @1\n", Rule::TableRemovalSpan),
        ("release", "plain", Rule::TableNotPublished),
        ("release", "relaxed-swap", Rule::TableNotPublished),
        ("0 store 41180000 0 41184003 release", NSH_LINK, Rule::TableNotPublished),
        (
            "0 dsb ish\n0 tlbi vmalle1is 0 @1\n0 dsb ish\n",
            "0 dsb ishnxs\n0 tlbi vmalle1is 0 @1\n0 dsb ish\n",
            Rule::CombinedNotInvalidated,
        ),
        ("0 tlbi ipas2e1is 0 @1\n", "", Rule::TableRemovalSpan),
        ("0 tlbi ipas2e1is 0 @1\n", "0 tlbi ipas2e1 0 @1\n", Rule::TableRemovalSpan),
        ("0 tlbi vmalle1is 0 @1\n", "", Rule::CombinedNotInvalidated),
        (
            "plain @1\n0 dsb ishst\n0 hcr 480000000\n0 isb\n0 tlbi ipas2",
            "plain @1\n0 hcr 480000000\n0 isb\n0 tlbi ipas2",
            Rule::TableRemovalSpan,
        ),
        // A range of 64K granules, and hints of them: no entry need be invalidated.
        ("0 tlbi ipas2e1is 0 @1\n", "0 tlbi ripas2e1is c00000000000 @1\n", Rule::TableRemovalSpan),
        ("0 tlbi ipas2e1is 0 @1\n", "0 tlbi ipas2e1is f00000000000 @1\n", Rule::WrongTtl),
        ("0 tlbi vmalls12e1is 0\n", "", Rule::ReductionNotComplete),
        ("0 tlbi vmalls12e1is 0\n", "0 tlbi vmalls12e1 0\n", Rule::ReductionNotComplete),
        ("0 tlbi vmalls12e1is 0\n", "0 tlbi vmalle1is 0\n", Rule::ReductionNotComplete),
        (
            "0 hcr 480000000\n0 isb\n0 tlbi ipas2e1is 0 @1\n0 dsb ish\n",
            "0 tlbi ipas2e1is 0 @1\n0 dsb ish\n",
            Rule::CombinedNotInvalidated,
        ),
        (
            "0 hcr 480000000\n0 isb\n0 tlbi vmalls",
            "0 hcr 480000000\n0 tlbi vmalls",
            Rule::VmidNotCurrent,
        ),
        ("0 isb\n0 store 41184000 0", "0 store 41184000 0", Rule::VmidNotRestored),
        (
            "0 word 50000000 0 1\n0 dc civac 41a00000 200000",
            "0 dc civac 41a00000 200000",
            Rule::LockDiscipline,
        ),
    ] {
        let trace = TRACE.replacen(step, replacement, 1);
        assert_ne!(trace, TRACE, "{step}");

        let found = findings(&trace);

        assert!(found.iter().any(|(found, _)| *found == rule), "{step:?}: {rule}, not {found:?}");
    }
}

/// A relaxed link behind a barrier that orders loads, or stores of this CPU alone.
const NSH_LINK: &str =
    "0 dmb ishld\n0 dmb nsh\n0 dsb nshst\n0 store 41180000 0 41184003 relaxed-swap";

#[test]
fn a_barrier_or_a_release_orders_a_table_before_its_link() {
    for link in [
        "0 store 41180000 0 41184003 swap",
        "0 dmb ish\n0 store 41180000 0 41184003 plain",
        "0 dmb ishst\n0 store 41180000 0 41184003 relaxed-swap",
        "0 dsb ishst\n0 store 41180000 0 41184003 plain",
        "0 dsb ishnxs\n0 store 41180000 0 41184003 plain",
    ] {
        let trace = TRACE.replace("0 store 41180000 0 41184003 release", link);

        assert_eq!(findings(&trace), [], "{link}");
    }
}

#[test]
fn a_dmb_completes_no_store_for_an_invalidation() {
    let steps = "plain @1\n0 dsb ishst\n0 hcr 480000000\n0 isb\n0 tlbi ipas2";
    let trace = TRACE.replace(steps, &steps.replace("dsb ishst", "dmb ish"));
    assert_ne!(trace, TRACE);

    assert!(findings(&trace).iter().any(|(rule, _)| *rule == Rule::TableRemovalSpan));
}

#[test]
fn stage_2_is_invalidated_with_e2h_and_tge_and_stage_1_is_the_hosts() {
    let with_tge = TRACE.replace("0 hcr 480000000\n0 isb\n0 tlbi vmalls", "0 tlbi vmalls");
    let vttbr = |text: &str| format!("0 vttbr {text}\n0 isb\n0 tlbi vmalls");
    let with_vttbr = |text: &str| with_tge.replace("0 tlbi vmalls", &vttbr(text));
    let running = "0 hcr 80000001\n0 hcr 488000000\n0 isb\n0 write 41a00000\n";

    assert_eq!(findings(&with_tge), []);
    assert_eq!(findings(&with_vttbr("1000041180000")), []);
    let without_isb =
        with_vttbr("1000041180000").replace("41180000\n0 isb\n0 tlbi", "41180000\n0 tlbi");
    assert_eq!(findings(&without_isb)[0].0, Rule::VmidNotCurrent);
    let other = with_vttbr("41180000").replacen("0 write 41a00000\n", running, 1);
    assert_eq!(findings(&other)[0].0, Rule::VmidNotCurrent);
}

#[test]
fn a_barrier_nxs_completes_only_invalidations_nxs_which_leave_out_devices() {
    let tlbi = |trace: &str| trace.replace("e1is ", "e1isnxs ");
    let dsb = |trace: &str| trace.replace("0 dsb ish\n", "0 dsb ishnxs\n");
    let device = TRACE.replace("0 40000041a007ff plain", "0 40000041a007c7 plain");
    let device_with_fnxs = TRACE.replace("0 40000041a007ff plain", "0 40000041a00fc7 plain");
    let is_incomplete = |trace: &str| {
        let rules = [Rule::TableRemovalSpan, Rule::CombinedNotInvalidated];
        findings(trace).iter().any(|(rule, _)| rules.contains(rule))
    };

    assert_eq!(findings(&tlbi(TRACE)), []);
    assert_eq!(findings(&dsb(&tlbi(TRACE))), []);
    assert!(is_incomplete(&dsb(TRACE)));
    assert!(!is_incomplete(&device) && is_incomplete(&tlbi(&device)));
    assert!(!is_incomplete(&tlbi(&device_with_fnxs)));
}

#[test]
fn a_restriction_after_ageing_is_invalidated() {
    let aged = TRACE.replace(
        "0 store 41184000 40000041a007fd 40000041a0077d plain @1\n",
        "0 store 41184000 40000041a007fd 40000041a003fd plain @1\n\
         0 store 41184000 40000041a003fd 40000041a0037d plain @1\n",
    );
    assert_ne!(aged, TRACE);

    assert_eq!(findings(&aged), []);
    let incomplete = findings(&aged.replace("0 tlbi vmalls12e1is 0\n", ""));
    assert!(incomplete.iter().any(|(rule, _)| *rule == Rule::ReductionNotComplete));
}

#[test]
fn a_vmid_other_than_that_of_the_running_guest_is_found() {
    let running = "0 hcr 80000001\n0 hcr 488000000\n0 isb\n0 write 41a00000\n";
    let trace = TRACE.replacen("0 write 41a00000\n", running, 1);
    let other = "0 vttbr 41180000\n0 hcr 480000000\n0 isb\n0 tlbi vmalls";
    let unknown = trace.replacen("0 hcr 480000000\n0 isb\n0 tlbi vmalls", other, 1);
    let next = "0 vttbr 3000041180000\n0 hcr 80000001\n0 isb\n0 hcr 488000000\n0 isb\n0 enter 2 ";
    let changed = trace.replacen("0 enter 2 ", next, 1);
    let reassigned = changed.replacen("0 vttbr 3", "0 tlbi alle1is 0\n0 dsb ish\n0 vttbr 3", 1);

    assert_eq!(findings(&trace), []);
    assert_eq!(findings(&unknown), [(Rule::VmidNotCurrent, 1), (Rule::ReductionNotComplete, 1)]);
    assert_eq!(findings(&changed), [(Rule::VmidNotCurrent, 1)]);
    assert_eq!(findings(&reassigned), []);
}

#[test]
fn a_split_that_remaps_parts_of_the_block_is_found() {
    let (before, _) = TRACE.split_once("0 enter 2").unwrap();
    let (_, flush) = before.split_once("0 dsb ishst\n").unwrap();
    let (flush, _) = flush.split_once("0 store").unwrap();
    let with_parts = |first: &str, second: &str| {
        format!(
            "{before}0 word 50000000 0 1\n0 store 41184000 40000041a007fd 0 plain @1\n\
             0 dsb ishst\n{flush}0 table 41186000 3 - 0={first} 1={second}\n\
             0 store 41184000 0 41186003 release @1\n0 word 50000000 1 0\n0 free 41180000\n"
        )
    };
    let correct = with_parts("40000041a007ff", "40000041a017ff");
    let exchanged = with_parts("40000041a017ff", "40000041a007ff");
    let device = with_parts("40000041a007c7", "40000041a017c7");

    assert!(!findings(&correct).iter().any(|(rule, _)| *rule == Rule::SplitRelaxed));
    assert!(findings(&exchanged).contains(&(Rule::SplitRelaxed, 1)));
    assert!(findings(&device).contains(&(Rule::SplitRelaxed, 1)));
}

#[test]
fn a_replaced_table_without_a_break_is_found() {
    let trace = TRACE
        .replace("0 store 41184000 41185003 0 plain @1\n", "")
        .replace("0 store 41184000 0 4", "0 store 41184000 41185003 4");

    assert!(findings(&trace).contains(&(Rule::BreakBeforeMake, 1)));
}

#[test]
fn a_live_page_that_moves_by_64k_is_found() {
    let trace = TRACE.replace(
        "0 word 50000000 1 0\n0 word 50000000 0 1\n0 dc civac 41a00000 200000",
        "0 dc civac 41a10000 1000 @1\n0 dsb sy\n\
         0 store 41185000 40000041a007ff 40000041a107ff plain @1\n\
         0 word 50000000 1 0\n0 word 50000000 0 1\n0 dc civac 41a00000 200000",
    );
    assert_ne!(trace, TRACE);

    assert!(findings(&trace).contains(&(Rule::BreakBeforeMake, 1)));
}

#[test]
fn violations_of_one_place_are_one_finding() {
    let unclean = TRACE.replace("0 dc civac 41a00000 200000 @1\n", "");
    let store = "0 store 41184000 0 40000041a007fd plain @1\n";
    let again = "0 store 41184000 40000041a007fd 0 plain @1\n";

    let twice = findings(&unclean.replace(store, &[store, again, store].concat()));

    assert!(twice.contains(&(Rule::UncleanReachable, 2)), "{twice:?}");
}

/// A guest with a mapped block, and CPU 1 that shares the lock.
const SHARED: &str = "
0 stack 1 ffff800010053174
1 stack 2 ffff800010060000
0 vtcr 80023558
0 hcr 488000000
0 table 41180000 1 - 0=41184003
0 table 41184000 2 - 0=40000041a0077d
0 vttbr 1000041180000
0 hcr 80000001
0 hcr 488000000
0 isb
0 word 50000000 0 ff
0 store 41184000 40000041a0077d 40000041a007fd plain @1
0 word 50000000 ff 0
1 word 50000000 0 200
1 stack 3 ffff800010070000
";

#[test]
fn without_locked_entries_a_shared_walker_may_only_relax() {
    for (new, rules) in [("0041a007fd", &[][..]), ("0041a0077d", &[Rule::SharedStore][..])] {
        let trace = format!("{SHARED}1 store 41184000 40000041a007fd {new} plain @2\n");

        let observer = observe(&trace, LockType::ReaderWriter);

        let found = observer.findings();
        let found: Vec<_> = found.iter().map(|finding| finding.rule).collect();
        assert_eq!(
            found.into_iter().filter(|r| *r == Rule::SharedStore).collect::<Vec<_>>(),
            rules
        );
    }
}

#[test]
fn unmapped_memory_without_maintenance_is_found_where_it_was_unmapped() {
    let unmap = "
1 word 50000000 200 0
0 word 50000000 0 200
1 word 50000000 200 400
0 store 41184000 40000041a007fd 0 swap @1
0 dsb ishst
0 hcr 480000000
0 isb
0 tlbi vmalls12e1is 0 @1
0 dsb ish
0 isb
0 hcr 488000000
0 isb
0 word 50000000 400 200
1 word 50000000 200 0 @3
";

    let observer = observe(&[SHARED, unmap].concat(), LockType::ReaderWriter);

    let found = observer.findings();
    let unclean = found.iter().find(|finding| finding.rule == Rule::ReturnedUnclean).unwrap();
    assert_eq!((unclean.cpu, unclean.stack.as_slice()), (0, &[0xffff_8000_1005_3174][..]));
}

/// Returns the innermost address of each finding of a rule.
fn innermost(trace: &str, rule: Rule) -> Vec<Option<u64>> {
    let trace = format!("0 stack 2 ffff800010060000\n0 stack 3 ffff800010070000{trace}");
    let observer = observe(&trace, LockType::Spinlock);
    let found = observer.findings().into_iter().filter(|finding| finding.rule == rule);
    found.map(|finding| finding.stack.first().copied()).collect()
}

/// A CMO and its barrier, which are correct, in stack 2.
const UNRELATED: &str = "0 dc civac 7fff0000 1000 @2\n0 dsb sy\n";

#[test]
fn a_violation_at_an_event_without_a_stack_is_where_its_cause_is() {
    let block = "0 store 41184000 0 40000041a007fd plain @1\n";
    let unlock = "0 word 50000000 1 0\n0 enter 2";
    let switch = "0 vttbr 2000041180000 @3\n0 isb\n";
    let enter = format!("0 vttbr 1000041180000 @3\n0 hcr 480000000\n0 isb\n{UNRELATED}");
    let (store, other) = (0xffff_8000_1005_3174, 0xffff_8000_1007_0000);
    for (removed, step, before, rule, place) in [
        ("0 tlbi vmalls12e1is 0\n", UNRELATED, "0 leave 2 0\n", Rule::ReductionNotComplete, store),
        (block, UNRELATED, unlock, Rule::CombinedNotInvalidated, store),
        (block, "0 dc civac 41a00000 1000 @3\n", unlock, Rule::UnfinishedCmo, other),
        (block, &enter, unlock, Rule::VmidNotRestored, other),
        (
            "0 write 41a00000\n",
            &format!("0 hcr 80000001\n0 hcr 80000000\n{switch}{UNRELATED}0 hcr 80000001\n"),
            "0 word",
            Rule::VmidNotCurrent,
            other,
        ),
    ] {
        // The removal of the table is not complete at the unlock.
        let trace = TRACE.replacen("0 tlbi vmalle1is 0 @1\n0 dsb ish\n", "", 1);
        let trace = trace.replacen(removed, "", 1).replacen(before, &[step, before].concat(), 1);

        assert_eq!(innermost(&trace, rule), [Some(place)], "{rule}");
    }
}

#[test]
fn a_finding_names_the_kind_of_its_address() {
    let unclean = TRACE.replacen("0 dc civac 41a00000 200000 @1\n", "", 1);
    let held = TRACE.replacen("0 tlbi vmalls12e1is 0\n", "", 1);
    for (trace, detail) in [
        (unclean, "guest address 0x0 → physical address 0x41a00000, 0x200000 bytes: physical "),
        (held, "guest address 0x0, 0x200000 bytes: "),
    ] {
        let observer = observe(&trace, LockType::Spinlock);

        let found = observer.findings()[0];
        assert!(found.detail.starts_with(detail), "{}", found.detail);
    }
}

#[test]
fn a_violation_without_a_known_cause_has_no_stack() {
    let clean = "0 dc civac 41a00000 200000 @1\n0 dsb sy\n";
    let store = "0 store 41184000 0 40000041a007fd plain";
    let trace = TRACE.replacen(clean, UNRELATED, 1).replace(&[store, " @1"].concat(), store);

    assert_eq!(innermost(&trace, Rule::UncleanReachable), [None]);
}

#[test]
fn entries_made_before_a_guest_runs_need_clean_memory_without_fwb() {
    let (before, _) = SHARED.split_once("0 hcr 80000001").unwrap();
    let runs = |hcr: u64| rules(&format!("{before}0 hcr {hcr:x}\n0 isb\n"));

    assert_eq!(runs(0x4000_8000_0001), []);
    assert_eq!(runs(0x8000_0001), [Rule::UncleanReachable]);
}

#[test]
fn tables_of_the_host_and_of_nested_guests_are_counted_and_not_checked() {
    let host = SHARED.replace("vttbr 1000041180000", "vttbr 41180000");
    let both = "
0 table 42180000 1 -
0 vttbr 2000042180000
0 hcr 80000001
0 hcr 488000000
0 isb
1 word 50000000 200 0
0 word 50000000 0 ff
0 store 42180000 0 40000041a007ff plain @1
0 store 42180000 40000041a007ff 40000041c007ff plain @1
0 word 50000000 ff 0
";
    let totals = |trace: &str| {
        let observer = observe(trace, LockType::ReaderWriter);
        let totals = observer.totals();
        (totals.guests, totals.host, totals.shadows, observer.findings().len())
    };
    let found = totals(SHARED).3;

    assert_eq!(totals(&host), (0, 1, 0, 0));
    assert_eq!(totals(&[SHARED, both].concat()), (2, 0, 1, found));
}

#[test]
fn tables_of_16k_and_64k_are_checked() {
    // 40 address bits from level 2: VTCR_EL2 with TG0 and SL0, the table, the bytes of a page.
    for (vtcr, table, size) in
        [(0x8002_a558_u64, 0x4118_4000_u64, 0x4000), (0x8002_6558, 0x4119_0000, 0x1_0000)]
    {
        let trace = |cleaned: u64| {
            format!(
                "0 stack 1 ffff800010053174\n0 vtcr {vtcr:x}\n0 hcr 488000000\n\
                 0 table 40800000 2 -\n0 vttbr 1000040800000\n0 hcr 80000001\n\
                 0 hcr 488000000\n0 isb\n0 word 50000000 0 1\n\
                 0 dc civac 41a00000 {cleaned:x} @1\n0 dsb sy\n0 table {table:x} 3 -\n\
                 0 store 40800000 0 {:x} release @1\n\
                 0 store {table:x} 0 40000041a007ff plain @1\n0 word 50000000 1 0\n",
                table | 3,
            )
        };

        assert_eq!(rules(&trace(size)), []);
        assert_eq!(rules(&trace(size / 2)), [Rule::UncleanReachable]);
    }
}
