// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Known defects of this field, as traces: each is caught, by the rule that it breaks.
//!
//! The first five are public defects of page-table code, the others the traps of the known series
//! for Linux. Every trace has a twin without the defect that breaks no rule at all.
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::collections::BTreeSet;

use granule_stage2::check::{Checker, Outcome, Rule, Trace};

const FIRST: &str = "granule-trace 1 granule=4096 ipa-bits=40 vmid=1 root=0x80000000 cpus=2 \
                     fwb=0 dic=0 tlbrange=0 bbm=0\n";

/// A root of level 1, below it a table of level 2 (0x80004000), and one that is not linked yet; the
/// lock is held.
macro_rules! one_table {
    () => {
        "
    0 allocate 0x80004000
    0 allocate 0x80005000
    0 add-memory 0x0 0x100000000 0x200000
    0 dc 0x100000000 0x200000
    0 dsb ish
    0 lock exclusive
    0 store 0x80000000 0 0x80004003 release
    0 ref 0x80000000 1
"
    };
}

/// The same, and the other is one of level 3 (0x80005000) for the first 2M.
macro_rules! tables {
    () => {
        concat!(
            one_table!(),
            "
    0 store 0x80004000 0 0x80005003 release
    0 ref 0x80004000 1
"
        )
    };
}

/// In the table of level 3 two pages.
const TWO_PAGES: &str = concat!(
    tables!(),
    "
    0 store 0x80005000 0 PAGE0 release
    0 store 0x80005008 0 PAGE1 release
    0 ref 0x80005000 2
    0 unlock
"
);
/// Writable normal pages of the memory, and the block of both, not executable.
const WORDS: [(&str, u64); 4] = [
    ("PAGE0", 0x0040_0001_0000_07ff),
    ("PAGE1", 0x0040_0001_0000_17ff),
    ("XBLOCK", 0x0000_0001_0000_07fd),
    ("BLOCK", 0x0040_0001_0000_07fd),
];
/// An ISB-framed switch to the guest's VMID, and back.
const ENTER: &str = "0 dsb ishst\n0 vmid 1\n0 isb\n";
const LEAVE: &str = "0 vmid 0\n0 isb\n";
/// What the guest wrote past the caches is not hidden from the host.
const CLEAN: &str = "0 dc 0x100000000 0x200000\n0 dsb ish\n";
const FLUSH: &str =
    "0 dsb ishst\n0 vmid 1\n0 isb\n0 tlbi vmalls12e1is\n0 dsb ish\n0 vmid 0\n0 isb\n";

fn rules(parts: &[&str]) -> BTreeSet<Rule> {
    replayed(parts).violated().clone()
}

fn replayed(parts: &[&str]) -> Checker {
    let mut text = parts.concat();
    for (word, value) in WORDS {
        text = text.replace(word, &format!("{value:#x}"));
    }
    let trace: Trace = (FIRST.to_owned() + &text).parse().unwrap();
    let again: Trace = trace.to_string().parse().unwrap();
    assert_eq!(again, trace, "a trace is read as it is written");
    let mut checker = Checker::new(trace.setup);
    trace.events.iter().for_each(|event| checker.check(event));
    checker
}

fn only(rule: Rule) -> BTreeSet<Rule> {
    [rule].into()
}

/// What can still be reached cannot be cleaned for its return either: that follows by itself.
fn but_returned(mut rules: BTreeSet<Rule>) -> BTreeSet<Rule> {
    rules.remove(&Rule::ReturnedUnclean);
    rules
}

#[test]
fn aarch64_paging_0_12_2_invalidated_only_the_first_address_of_a_removed_subtable() {
    let unlink = "0 lock exclusive\n0 store 0x80004000 0x80005003 0 plain\n0 ref 0x80004000 -1\n";
    let first = "0 tlbi ipas2e1is 0x0\n0 dsb ish\n0 tlbi vmalle1is\n0 dsb ish\n";
    let rest = "0 ref 0x80005000 -2\n0 free 0x80005000\n0 unlock\n";

    let wrong = rules(&[TWO_PAGES, unlink, ENTER, first, LEAVE, "0 unlock\n"]);
    let right = rules(&[TWO_PAGES, unlink, FLUSH, CLEAN, rest]);

    assert_eq!(but_returned(wrong), only(Rule::TableRemovalSpan));
    assert_eq!(right, BTreeSet::new());
}

#[test]
fn aarch64_paging_leaves_combined_entries_behind() {
    let unmap = "0 lock exclusive\n0 store 0x80005000 PAGE0 0 plain\n0 ref 0x80005000 -1\n";
    let half = "0 tlbi ipas2e1is 0x0 ttl=3\n0 dsb ish\n";
    let whole = "0 tlbi ipas2e1is 0x0 ttl=3\n0 dsb ish\n0 tlbi vmalle1is\n0 dsb ish\n";

    let wrong = rules(&[TWO_PAGES, unmap, ENTER, half, LEAVE, "0 unlock\n"]);
    let right = rules(&[TWO_PAGES, unmap, ENTER, whole, LEAVE, CLEAN, "0 unlock\n"]);

    assert_eq!(but_returned(wrong), only(Rule::CombinedNotInvalidated));
    assert_eq!(right, BTreeSet::new());
}

#[test]
fn bao_writes_a_table_over_a_live_block() {
    let block = "
        0 allocate 0x80004000
        0 allocate 0x80005000
        0 add-memory 0x0 0x100000000 0x200000
        0 dc 0x100000000 0x200000
        0 dsb ish
        0 lock exclusive
        0 store 0x80000000 0 0x80004003 release
        0 ref 0x80000000 1
        0 store 0x80004000 0 BLOCK release
        0 ref 0x80004000 1
    ";
    let over = "0 store 0x80004000 BLOCK 0x80005003 release\n";
    let broken = "0 store 0x80004000 BLOCK 0 plain\n";
    let made = "0 store 0x80004000 0 0x80005003 release\n";

    let wrong = rules(&[block, over, FLUSH, "0 unlock\n"]);
    let right = rules(&[block, broken, FLUSH, CLEAN, made, "0 unlock\n"]);

    assert!(wrong.contains(&Rule::BreakBeforeMake), "{wrong:?}");
    assert_eq!(right, BTreeSet::new());
}

#[test]
fn hvisor_flushes_nothing() {
    let unmap = "0 lock exclusive\n0 store 0x80005000 PAGE0 0 plain\n0 ref 0x80005000 -1\n";

    let wrong = rules(&[TWO_PAGES, unmap, "0 unlock\n"]);

    assert_eq!(but_returned(wrong), only(Rule::ReductionNotComplete));
}

#[test]
fn rust_shyper_frees_empty_tables_without_an_invalidation() {
    let unmap = "0 lock exclusive\n0 store 0x80005000 PAGE0 0 plain\n0 store 0x80005008 PAGE1 0 plain\n\
                 0 ref 0x80005000 -2\n";
    let unlink = "0 store 0x80004000 0x80005003 0 plain\n0 ref 0x80004000 -1\n";
    let free = "0 free 0x80005000\n";

    let wrong = rules(&[TWO_PAGES, unmap, FLUSH, unlink, free]);
    let right = rules(&[
        TWO_PAGES,
        unmap,
        FLUSH,
        CLEAN,
        unlink,
        FLUSH,
        free,
        "0 unlock\n",
    ]);

    assert_eq!(but_returned(wrong), only(Rule::FreedWhileWalked));
    assert_eq!(right, BTreeSet::new());
}

#[test]
fn axaddrspace_invalidates_the_wrong_regime_at_an_unshifted_address() {
    let unmap = "0 lock exclusive\n0 store 0x80005008 PAGE1 0 plain\n0 ref 0x80005000 -1\n";
    let wrong_regime = "0 tlbi vmalle1is\n0 dsb ish\n";
    // The operand holds the address from bit 12 on: unshifted, another page is meant.
    let unshifted = "0 tlbi ipas2e1is 0x1000000\n0 dsb ish\n0 tlbi vmalle1is\n0 dsb ish\n";

    for flush in [wrong_regime, unshifted] {
        let wrong = rules(&[TWO_PAGES, unmap, ENTER, flush, LEAVE, "0 unlock\n"]);
        assert_eq!(but_returned(wrong), only(Rule::ReductionNotComplete));
    }
}

#[test]
fn trap_1_maintenance_that_goes_by_the_old_entry_flushes_a_device() {
    // Device-nGnRE, read and write, accessed, not executable.
    let device = "
        0 allocate 0x80004000
        0 allocate 0x80005000
        0 add-memory 0x0 0x9000000 0x1000 device
        0 lock exclusive
        0 store 0x80000000 0 0x80004003 release
        0 ref 0x80000000 1
        0 store 0x80004000 0 0x80005003 release
        0 ref 0x80004000 1
    ";
    let map = "0 store 0x80005000 0 0x400000090004c7 release\n0 ref 0x80005000 1\n0 unlock\n";

    let wrong = rules(&[device, "0 dc 0x9000000 0x1000\n0 dsb ish\n", map]);
    let right = rules(&[device, map]);

    assert_eq!(wrong, only(Rule::DeviceMaintained));
    assert_eq!(right, BTreeSet::new());
}

/// One page mapped and clean, the rest of its 2M never; then a block in the table's place.
fn coalesce(maintenance: &str, block: &str) -> BTreeSet<Rule> {
    let page = "
        0 allocate 0x80004000
        0 allocate 0x80005000
        0 add-memory 0x0 0x100000000 0x200000
        0 lock exclusive
        0 dc 0x100000000 0x1000
        0 dsb ish
        0 store 0x80000000 0 0x80004003 release
        0 ref 0x80000000 1
        0 store 0x80004000 0 0x80005003 release
        0 ref 0x80004000 1
        0 store 0x80005000 0 PAGE0 release
        0 ref 0x80005000 1
    ";
    let broken = "0 store 0x80004000 0x80005003 0 plain\n";
    let made = format!(
        "0 store 0x80004000 0 {block} release\n0 ref 0x80005000 -1\n0 free 0x80005000\n0 unlock\n"
    );
    rules(&[page, maintenance, broken, FLUSH, &made])
}

#[test]
fn trap_2_a_block_put_together_without_maintenance_reaches_the_guest_unclean() {
    let clean = "0 dc 0x100000000 0x200000\n0 dsb ish\n";
    let both = format!("{clean}0 ic\n0 dsb ish\n0 isb\n");
    let i_side_first = format!("0 ic\n0 dsb ish\n{clean}");

    assert_eq!(coalesce("", "BLOCK"), only(Rule::UncleanReachable));
    assert_eq!(coalesce(clean, "BLOCK"), BTreeSet::new());
    assert_eq!(coalesce(clean, "XBLOCK"), only(Rule::StaleInstructions));
    assert_eq!(
        coalesce(&i_side_first, "XBLOCK"),
        only(Rule::StaleInstructions)
    );
    assert_eq!(coalesce(&both, "XBLOCK"), BTreeSet::new());
}

#[test]
fn trap_3_a_top_up_under_the_lock_sleeps_and_an_early_return_leaks_it() {
    let sleeps = rules(&["0 lock exclusive\n0 top-up\n0 unlock\n"]);
    let leaks = rules(&[
        "0 lock exclusive\n0 empty\n",
        "1 lock exclusive\n1 unlock\n",
    ]);
    let right = rules(&["0 top-up\n0 lock exclusive\n0 unlock\n1 lock exclusive\n1 unlock\n"]);

    assert_eq!(sleeps, only(Rule::SleepUnderLock));
    assert_eq!(leaks, [Rule::EmptyMemcache, Rule::LockDiscipline].into());
    assert_eq!(right, BTreeSet::new());
}

#[test]
fn a_local_invalidation_left_out_makes_a_vcpu_fault_for_ever() {
    let read_only = "0 lock exclusive\n0 store 0x80005000 PAGE0 0x004000010000077f plain\n";
    let wide = "1 lock shared\n1 store 0x80005000 0x004000010000077f PAGE0 swap\n1 unlock\n";
    let local = "0 dsb nshst\n0 vmid 1\n0 isb\n0 tlbi ipas2e1 0x0 ttl=3\n0 dsb nsh\n0 tlbi vmalle1\n\
                 0 dsb nsh\n0 vmid 0\n0 isb\n";
    let handled = "0 lock shared\n";
    let write = "0 unlock\n0 resume 0x0 write permission 3\n";

    let wrong = rules(&[
        TWO_PAGES,
        read_only,
        FLUSH,
        "0 unlock
",
        wide,
        handled,
        write,
    ]);
    let right = rules(&[
        TWO_PAGES,
        read_only,
        FLUSH,
        "0 unlock
",
        wide,
        handled,
        local,
        write,
    ]);

    assert_eq!(wrong, only(Rule::NoProgress));
    assert_eq!(right, BTreeSet::new());
}

#[test]
fn a_cpu_that_has_seen_another_widen_a_leaf_loses_its_own_entry_by_a_broadcast_too() {
    let read_only = "0 lock exclusive\n0 store 0x80005000 PAGE0 0x004000010000077f plain\n";
    let wide = "0 unlock\n1 lock shared\n0 lock shared\n1 store 0x80005000 0x004000010000077f PAGE0 swap\n";
    let broadcast = "0 dsb ishst\n0 vmid 1\n0 isb\n0 tlbi ipas2e1is 0x0 ttl=3\n0 dsb ish\n\
                     0 tlbi vmalle1is\n0 dsb ish\n0 vmid 0\n0 isb\n";
    let goes_on = "0 unlock\n0 resume 0x0 write permission 3\n1 unlock\n";

    let found = rules(&[TWO_PAGES, read_only, FLUSH, wide, broadcast, goes_on]);

    assert_eq!(found, BTreeSet::new());
}

#[test]
fn a_range_invalidation_that_names_another_level_reaches_no_page() {
    let unmap = "0 lock exclusive\n0 store 0x80005000 PAGE0 0 plain\n0 ref 0x80005000 -1\n";
    let range = |ttl: &str| {
        format!("0 tlbi ripas2e1is 0x0 0x2000{ttl}\n0 dsb ish\n0 tlbi vmalle1is\n0 dsb ish\n")
    };
    let with = |ttl| {
        let range = range(ttl);
        rules(&[TWO_PAGES, unmap, ENTER, &range, LEAVE, CLEAN, "0 unlock\n"])
    };

    let wrong = but_returned(with(" ttl=2"));

    assert_eq!(wrong, [Rule::WrongTtl, Rule::ReductionNotComplete].into());
    assert_eq!((with(" ttl=3"), with("")), Default::default());
}

#[test]
fn a_split_gives_no_more_than_the_one_page_that_was_asked_for() {
    // A block that is read alone, and a table for it with these two pages.
    let split = |pages: &str| {
        let block =
            "0 store 0x80004000 0 0x004000010000077d release\n0 ref 0x80004000 1\n0 unlock\n";
        let table = "0 lock exclusive\n0 store 0x80004000 0x004000010000077d 0 plain\n";
        let link = "0 ref 0x80005000 2\n0 store 0x80004000 0 0x80005003 release\n0 unlock\n";
        let first = one_table!();
        but_returned(rules(&[first, block, table, FLUSH, pages, link]))
    };
    let page = |entry: &str, leaf: &str| format!("0 store {entry} 0 {leaf} plain\n");
    let (read_0, read_1) = ("0x004000010000077f", "0x004000010000177f");

    let both = split(&(page("0x80005000", "PAGE0") + &page("0x80005008", "PAGE1")));
    let one = split(&(page("0x80005000", "PAGE0") + &page("0x80005008", read_1)));
    let none = split(&(page("0x80005000", read_0) + &page("0x80005008", read_1)));

    assert_eq!(both, only(Rule::SplitRelaxed));
    assert_eq!((one, none), Default::default());
}

#[test]
fn what_a_guest_may_see_is_counted_by_its_accesses() {
    let look = "1 access 0x0 read uncached\n";
    let broken = "0 lock exclusive\n0 store 0x80005000 PAGE0 0 plain\n0 ref 0x80005000 -1\n";
    let written = "0 write 0x100000000 0x40\n0 store 0x80005000 0 PAGE0 release\n";
    let seen = |parts: &[&str]| -> Vec<_> {
        let checker = replayed(parts);
        checker
            .outcomes()
            .iter()
            .map(|(outcome, n)| (*outcome, *n))
            .collect()
    };

    let mapped = seen(&[TWO_PAGES, look, look]);
    let unmapped = seen(&[TWO_PAGES, broken, look]);
    let gone = seen(&[TWO_PAGES, broken, FLUSH, look]);
    let unclean = seen(&[TWO_PAGES, broken, FLUSH, written, look]);

    assert_eq!(mapped, [(Outcome::RightData, 2)]);
    assert_eq!(
        unmapped,
        [(Outcome::StaleTranslation, 1), (Outcome::Fault, 1)]
    );
    assert_eq!(gone, [(Outcome::Fault, 1)]);
    assert_eq!(unclean, [(Outcome::StaleData, 1)]);
}

#[test]
fn a_vcpu_that_goes_on_while_another_takes_the_entry_away_does_not_fault_for_ever() {
    let read_only = "0 lock exclusive\n0 store 0x80005000 PAGE0 0x004000010000077f plain\n";
    let wide = "0 unlock\n1 lock shared\n1 store 0x80005000 0x004000010000077f PAGE0 swap\n";
    let broken = "1 store 0x80005000 PAGE0 0x400 swap\n";
    let goes_on = "0 lock shared\n0 unlock\n0 resume 0x0 write permission 3\n";
    let invalidated = FLUSH.replace("0 dsb", "1 dsb").replace("0 vmid", "1 vmid");
    let invalidated = invalidated
        .replace("0 isb", "1 isb")
        .replace("0 tlbi", "1 tlbi");
    let made = "1 store 0x80005000 0x400 PAGE0 release\n1 unlock\n";

    let found = rules(&[
        TWO_PAGES,
        read_only,
        FLUSH,
        wide,
        broken,
        goes_on,
        &invalidated,
        made,
    ]);

    assert_eq!(found, BTreeSet::new());
}

/// A run of 16 pages with the contiguous hint, in a table that has nothing else.
fn contiguous_run() -> String {
    let pages: String = (0..16)
        .map(|n| {
            let page = HINTED + n * 0x1000;
            format!("0 store {:#x} 0 {page:#x} release\n", 0x8000_5000 + n * 8)
        })
        .collect();
    tables!().to_owned() + "0 ref 0x80005000 16\n" + &pages + "0 unlock\n"
}

/// The first page of the run.
const HINTED: u64 = 0x0050_0001_0000_07ff;

/// Breaks some entries of the run.
fn break_pages(pages: std::ops::Range<u64>) -> String {
    let store = |n| {
        let page = HINTED + n * 0x1000;
        format!("0 store {:#x} {page:#x} 0 plain\n", 0x8000_5000 + n * 8)
    };
    pages.map(store).collect()
}

/// Makes the whole run again without the hint, its first page read-only.
fn make_pages() -> String {
    let store = |n: u64| {
        let page = (HINTED & !(1 << 52) & !(u64::from(n == 0) << 7)) + n * 0x1000;
        format!("0 store {:#x} 0 {page:#x} release\n", 0x8000_5000 + n * 8)
    };
    (0..16).map(store).collect()
}

#[test]
fn a_page_of_a_contiguous_run_is_changed_with_all_the_others_broken() {
    let run = contiguous_run();
    let first = (HINTED, HINTED & !(1 << 7));
    let in_place = format!("0 store 0x80005000 {:#x} {:#x} plain\n", first.0, first.1);
    let lock = "0 lock exclusive\n";
    let (all, one) = (break_pages(0..16), break_pages(0..1));
    let (made, unlock) = (make_pages(), "0 unlock\n");

    let right = rules(&[&run, lock, &all, FLUSH, &made, unlock]);
    let without_break = rules(&[&run, lock, &in_place, FLUSH, unlock]);
    let without_tlbi = rules(&[&run, lock, &all, &made, unlock]);
    let hole = rules(&[&run, lock, &one, "0 ref 0x80005000 -1\n", FLUSH, unlock]);

    assert_eq!(right, BTreeSet::new());
    assert_eq!(without_break, only(Rule::ContiguousRun));
    assert!(without_tlbi.contains(&Rule::MakeBeforeInvalidated));
    assert!(hole.contains(&Rule::ContiguousRun));
    assert!(hole.contains(&Rule::ReductionNotComplete));
}

/// A TLB need not hold a run as one: every page is invalidated for itself.
#[test]
fn an_invalidation_of_one_page_of_a_run_is_not_enough_for_the_others() {
    let run = contiguous_run();
    let broken = "0 lock exclusive\n".to_owned() + &break_pages(0..16) + "0 ref 0x80005000 -16\n";
    let invalidated = |pages: std::ops::Range<u64>| -> String {
        pages
            .map(|n| format!("0 tlbi ipas2e1is {:#x} ttl=3\n", n * 0x1000))
            .collect()
    };
    let rest = "0 dsb ish\n0 tlbi vmalle1is\n0 dsb ish\n0 vmid 0\n0 isb\n";
    let end = CLEAN.to_owned() + "0 unlock\n";

    let right = rules(&[&run, &broken, ENTER, &invalidated(0..16), rest, &end]);
    let wrong = rules(&[&run, &broken, ENTER, &invalidated(1..16), rest, &end]);

    assert_eq!(right, BTreeSet::new());
    assert_eq!(but_returned(wrong), only(Rule::ReductionNotComplete));
}

#[test]
fn a_run_that_is_invalidated_page_by_page_may_be_fetched_again_from_the_rest() {
    let run = contiguous_run();
    let lock = "0 lock exclusive\n";
    let (one, rest) = (break_pages(0..1), break_pages(1..16));
    let made = make_pages();
    let first = made.lines().next().unwrap().to_owned() + "\n";

    // The first is made again while the others could still bring the old one back.
    let found = rules(&[
        &run,
        lock,
        &one,
        FLUSH,
        &first,
        &rest,
        FLUSH,
        &made[first.len()..],
        "0 unlock\n",
    ]);

    assert_eq!(found, only(Rule::MakeBeforeInvalidated));
}

#[test]
fn what_is_no_trace_is_refused_with_its_line() {
    for (text, line) in [
        ("", 1),
        ("granule-trace 2 granule=4096", 1),
        (&(FIRST.to_owned() + "0 dsb ish\n0 dsb osh"), 3),
        (&(FIRST.to_owned() + "0 store 1 2 3"), 2),
        (&(FIRST.to_owned() + "0 isb now"), 2),
        (&(FIRST.to_owned() + "300 isb"), 2),
    ] {
        let error = text.parse::<Trace>().unwrap_err();
        assert_eq!(error.line, line, "{error}");
    }
}
