// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of each rule: a script that violates only this rule, and a twin that violates none.
//!
//! To add a rule, add a row (`docs/checker-tests.md`, "Add a rule"). `GRANULE_GOLDEN=write` writes
//! the table of `docs/checking.md`.
#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::collections::BTreeSet;

use granule_stage2::check::Rule;
use support::script::replay;

/// CPUs that need no CMOs, so that a row tests one rule only.
const FWB_DIC: &str = "fwb=1 dic=1";
/// CPUs that need D-cache and I-cache CMOs.
const NO_FWB_DIC: &str = "fwb=0 dic=0";
const FWB_ONLY: &str = "fwb=1 dic=0";

struct Case {
    rule: Rule,
    features: &'static str,
    /// Events before both scripts.
    preceding_events: &'static str,
    violating_script: &'static str,
    conforming_script: &'static str,
}

const fn case(
    rule: Rule,
    features: &'static str,
    preceding_events: &'static str,
    violating_script: &'static str,
    conforming_script: &'static str,
) -> Case {
    Case { rule, features, preceding_events, violating_script, conforming_script }
}

#[rustfmt::skip]
const CASES: &[Case] = &[
    case(Rule::BreakBeforeMake, FWB_DIC, "ONE_BLOCK; lock exclusive",
        "store T2 BLOCK LINK3 release; FLUSH; unlock",
        "store T2 BLOCK 0 plain; FLUSH; store T2 0 LINK3 release; unlock"),
    case(Rule::BlockSizeChange, "fwb=1 dic=1 bbm=1", "ONE_BLOCK; lock exclusive",
        "store T2 BLOCK LINK3 release; FLUSH; unlock",
        "store T2 BLOCK NTBLOCK release; FLUSH; store T2 NTBLOCK LINK3 release; FLUSH; unlock"),
    // The Contiguous bit.
    case(Rule::BlockSizeChange, "fwb=1 dic=1 bbm=2", "LINKED; 0..16 * store ENTRY# 0 PAGE# release; ref T3 16",
        "0..16 * store ENTRY# PAGE# HINTED# plain; FLUSH; unlock",
        "0..16 * store ENTRY# PAGE# 0 plain; FLUSH; 0..16 * store ENTRY# 0 HINTED# release; unlock"),
    case(Rule::BreakBeforeMake, FWB_DIC, "LINKED; 0..16 * store ENTRY# 0 PAGE# release; ref T3 16",
        "0..16 * store ENTRY# PAGE# HINTED# plain; FLUSH; unlock",
        "0..16 * store ENTRY# PAGE# 0 plain; FLUSH; 0..16 * store ENTRY# 0 HINTED# release; unlock"),
    case(Rule::ContiguousRun, "fwb=1 dic=1 bbm=3", "LINKED; 0..16 * store ENTRY# 0 PAGE# release; ref T3 16",
        "0..15 * store ENTRY# PAGE# HINTED# plain; unlock",
        "0..16 * store ENTRY# PAGE# HINTED# plain; 0..16 * store ENTRY# HINTED# PAGE# plain; unlock"),
    // A TLB may hold the block without nT.
    case(Rule::BlockSizeChange, "fwb=1 dic=1 bbm=1", "ONE_BLOCK; lock exclusive",
        "store T2 BLOCK NTBLOCK release; store T2 NTBLOCK LINK3 release; FLUSH; unlock",
        "store T2 BLOCK NTBLOCK release; FLUSH; store T2 NTBLOCK LINK3 release; FLUSH; unlock"),
    // A TLB may hold the pages of the table.
    case(Rule::MakeBeforeInvalidated, "fwb=1 dic=1 bbm=1", "LINKED; TWO_PAGES; lock exclusive; store T2 LINK3 NTBLOCK release",
        "store T2 NTBLOCK BLOCK plain; FLUSH; unlock",
        "FLUSH; store T2 NTBLOCK BLOCK plain; FLUSH; unlock"),
    case(Rule::ContiguousRun, FWB_DIC, "LINKED",
        "store ENTRY0 0 HINTED0 release; ref T3 1; unlock",
        "store ENTRY0 0 PAGE0 release; ref T3 1; unlock"),
    case(Rule::MakeBeforeInvalidated, FWB_DIC, "LINKED; TWO_PAGES; lock exclusive",
        "store ENTRY0 PAGE0 0 plain; store ENTRY0 0 RPAGE0 release; FLUSH; unlock",
        "store ENTRY0 PAGE0 0 plain; FLUSH; store ENTRY0 0 RPAGE0 release; unlock"),
    case(Rule::CombinedNotInvalidated, FWB_DIC, "LINKED; TWO_PAGES; lock exclusive; UNMAP0; ENTER",
        "tlbi ipas2e1is 0 ttl=3; dsb ish; LEAVE; unlock",
        "tlbi ipas2e1is 0 ttl=3; STAGE1; LEAVE; unlock"),
    case(Rule::VmidNotCurrent, FWB_DIC, "LINKED; TWO_PAGES; lock exclusive; UNMAP0; FLUSH",
        "tlbi vmalls12e1is; unlock",
        "unlock"),
    case(Rule::VmidNotRestored, FWB_DIC, "lock exclusive; ENTER",
        "unlock",
        "LEAVE; unlock"),
    case(Rule::WrongTtl, FWB_DIC, "LINKED; TWO_PAGES; lock exclusive; UNMAP0; ENTER",
        "tlbi ipas2e1is 0 ttl=2; tlbi vmalls12e1is; dsb ish; LEAVE; unlock",
        "tlbi ipas2e1is 0 ttl=3; tlbi vmalls12e1is; dsb ish; LEAVE; unlock"),
    case(Rule::TableRemovalSpan, FWB_DIC, "LINKED; TWO_PAGES; lock exclusive; UNLINK_T3; ENTER",
        "tlbi ipas2e1is 0; STAGE1; LEAVE; unlock",
        "tlbi vmalls12e1is; dsb ish; LEAVE; unlock"),
    case(Rule::RangeNotEncodable, "fwb=1 dic=1 tlbrange=1", "ENTER",
        "tlbi ripas2e1is 0 0x1000; dsb ish; LEAVE",
        "tlbi ripas2e1is 0 0x2000; dsb ish; LEAVE"),
    case(Rule::ReductionNotComplete, FWB_DIC, "LINKED; TWO_PAGES; lock exclusive; UNMAP0",
        "unlock",
        "FLUSH; unlock"),
    case(Rule::ReductionNotComplete, FWB_DIC, "LINKED; TWO_PAGES; lock exclusive",
        "store ENTRY0 PAGE0 0 plain; store ENTRY1 PAGE1 0 plain; store ENTRY0 0 PAGE0 release; ref T3 -1; unlock",
        "store ENTRY0 PAGE0 0 plain; store ENTRY0 0 PAGE0 release; unlock"),
    case(Rule::LogReadTooEarly, FWB_DIC, "LINKED; TWO_PAGES; PROTECT0",
        "logging 0 0x2000 on",
        "logging 0 0x1000 on"),
    case(Rule::ReusedWhileReachable, FWB_DIC, "LINKED; TWO_PAGES",
        "remove-memory 0 0x200000",
        "lock exclusive; UNMAP0; UNMAP1; FLUSH; unlock; remove-memory 0 0x200000"),
    case(Rule::NoProgress, FWB_DIC,
        "LINKED; TWO_PAGES; PROTECT0; 1 lock shared; 1 store ENTRY0 RPAGE0 PAGE0 swap; 1 unlock; lock shared",
        "unlock; resume 0 write permission 3",
        "FLUSH_LOCAL; unlock; resume 0 write permission 3"),
    case(Rule::TableNotPublished, FWB_DIC, "TABLES",
        "store ROOT 0 LINK2 plain; ref ROOT 1; unlock",
        "store ROOT 0 LINK2 release; ref ROOT 1; unlock"),
    case(Rule::UncleanReachable, NO_FWB_DIC, "LINKED",
        "store ENTRY0 0 PAGE0 release; ref T3 1; unlock",
        "dc PHYS 0x1000; dsb ish; store ENTRY0 0 PAGE0 release; ref T3 1; unlock"),
    case(Rule::DeviceCmo, NO_FWB_DIC, "add-memory 0 0x9000000 0x1000 device",
        "dc 0x9000000 0x1000; dsb ish",
        "dc 0x9001000 0x1000; dsb ish"),
    case(Rule::UnfinishedCmo, NO_FWB_DIC, "TABLES; dc PHYS 0x1000",
        "unlock",
        "dsb ish; unlock"),
    case(Rule::ReturnedUnclean, NO_FWB_DIC, "LINKED; CLEAN; TWO_PAGES; lock exclusive; UNMAP0; FLUSH",
        "unlock",
        "CLEAN; unlock"),
    case(Rule::NeedlessCmo, FWB_DIC, "TABLES",
        "CLEAN; unlock",
        "unlock"),
    case(Rule::StaleInstructions, FWB_ONLY, "LINKED",
        "store ENTRY0 0 XPAGE0 release; ref T3 1; unlock",
        "ic; dsb ish; store ENTRY0 0 XPAGE0 release; ref T3 1; unlock"),
    case(Rule::StaleInstructions, FWB_ONLY,
        "LINKED; ic; dsb ish; store ENTRY0 0 XPAGE0 release; ref T3 1; store ENTRY0 XPAGE0 PAGE0 plain; FLUSH; unlock; \
         write PHYS 0x40; lock exclusive",
        "store ENTRY0 PAGE0 XPAGE0 plain; FLUSH; unlock",
        "ic PHYS 0x1000; dsb ish; store ENTRY0 PAGE0 XPAGE0 plain; FLUSH; unlock"),
    case(Rule::FreedWhileWalked, FWB_DIC, "LINKED; TWO_PAGES; lock exclusive; UNLINK_T3; ref T3 -2",
        "free T3; FLUSH; unlock",
        "FLUSH; free T3; unlock"),
    case(Rule::FreedInGracePeriod, FWB_DIC,
        "LINKED; TWO_PAGES; 1 walk begin; lock exclusive; UNLINK_T3; ref T3 -2; FLUSH",
        "free T3; unlock; 1 walk end",
        "1 walk end; free T3; unlock"),
    case(Rule::TableNotOwned, FWB_DIC, "allocate T3; free T3",
        "free T3",
        "allocate T3; free T3"),
    case(Rule::WrongReferences, FWB_DIC, "LINKED; store ENTRY0 0 PAGE0 release",
        "unlock",
        "ref T3 1; unlock"),
    case(Rule::LockedEntry, FWB_DIC, "LINKED; TWO_PAGES; lock shared; store ENTRY0 PAGE0 LOCKED swap; FLUSH",
        "unlock",
        "store ENTRY0 LOCKED PAGE0 release; unlock"),
    case(Rule::SharedStore, FWB_DIC, "LINKED; TWO_PAGES; lock shared",
        "store ENTRY0 PAGE0 RPAGE0 plain; FLUSH; unlock",
        "store ENTRY0 PAGE0 RPAGE0 swap; FLUSH; unlock"),
    case(Rule::StaleLookUp, FWB_DIC, "LINKED; TWO_PAGES",
        "look-up; sequence; lock shared; store ENTRY2 0 PAGE2 swap; ref T3 1; unlock",
        "sequence; look-up; lock shared; store ENTRY2 0 PAGE2 swap; ref T3 1; unlock"),
    case(Rule::NotMarkedDirty, FWB_DIC,
        "LINKED; TWO_PAGES; PROTECT0; logging 0 0x1000 on; lock exclusive; store ENTRY0 RPAGE0 PAGE0 plain",
        "FLUSH; unlock; PROTECT0; read-log 0 0x1000",
        "mark-dirty 0 0x1000; FLUSH; unlock; PROTECT0; read-log 0 0x1000"),
    // Logging of other memory starts between the mark and the store.
    case(Rule::NotMarkedDirty, FWB_DIC,
        "LINKED; TWO_PAGES; PROTECT0; logging 0 0x1000 on; lock exclusive",
        "logging 0x100000 0x1000 on; store ENTRY0 RPAGE0 PAGE0 plain; FLUSH; unlock; PROTECT0; read-log 0 0x1000",
        "mark-dirty 0 0x1000; logging 0x100000 0x1000 on; store ENTRY0 RPAGE0 PAGE0 plain; FLUSH; unlock; PROTECT0; read-log 0 0x1000"),
    case(Rule::SplitRelaxed, FWB_DIC,
        "TABLES; LINK_T2; store T2 0 RBLOCK release; ref T2 1; store T2 RBLOCK 0 plain; FLUSH; store ENTRY0 0 PAGE0 plain; ref T3 2",
        "store ENTRY1 0 PAGE1 plain; store T2 0 LINK3 release; unlock",
        "store ENTRY1 0 RPAGE1 plain; store T2 0 LINK3 release; unlock"),
    case(Rule::SleepUnderLock, FWB_DIC, "",
        "lock exclusive; top-up; unlock",
        "top-up; lock exclusive; unlock"),
    case(Rule::EmptyMemcache, FWB_DIC, "lock exclusive",
        "empty; unlock",
        "unlock"),
    case(Rule::LockDiscipline, FWB_DIC, "lock exclusive",
        "1 lock shared; 1 unlock; unlock",
        "unlock; 1 lock shared; 1 unlock"),
    case(Rule::Misaligned, FWB_DIC,
        "allocate T2; allocate T3; add-memory 0 0x100001000 0x200000; lock exclusive; LINK_T2; ref T2 1",
        "store T2 0 0x00400001000017fd release; unlock",
        "store T2 0 LINK3 release; store ENTRY0 0 PAGE1 release; ref T3 1; unlock"),
    case(Rule::OutsideSlot, FWB_DIC, "LINKED; ref T3 1",
        "store ENTRY0 0 PAGE1 release; unlock",
        "store ENTRY0 0 PAGE0 release; unlock"),
];

#[test]
fn each_case_violates_only_its_rule_and_its_twin_violates_none() {
    for case in CASES {
        let violated = |script: &str| {
            let whole = format!("{}; {script}", case.preceding_events);
            replay(case.features, &whole).violated_rules().clone()
        };

        let found = (violated(case.violating_script), violated(case.conforming_script));

        assert_eq!(found, ([case.rule].into(), BTreeSet::new()), "{}", case.rule);
    }
}

#[test]
fn every_rule_has_a_case() {
    let with_case: BTreeSet<_> = CASES.iter().map(|case| case.rule).collect();
    let all = Rule::ALL.iter().copied().collect();

    assert_eq!(with_case, all);
}

#[test]
fn checking_md_lists_every_rule() {
    const BEGIN: &str = "<!-- rules: written by stage2/tests/rules.rs -->\n";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/checking.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (before, rest) = page.split_once(BEGIN).unwrap();
    let (_, after) = rest.split_once("\n\n").unwrap();
    let rows: String = Rule::ALL
        .iter()
        .map(|r| format!("\n| `{r}` | {} | {} |", r.description(), r.source()))
        .collect();
    let table = format!("| rule | reports | source |\n|---|---|---|{rows}");
    let expected = format!("{before}{BEGIN}{table}\n\n{after}");

    if std::env::var_os("GRANULE_GOLDEN").is_some_and(|value| value == "write") {
        return std::fs::write(path, &expected).unwrap();
    }
    let command = "GRANULE_GOLDEN=write cargo test -p granule-stage2 --test rules";
    assert!(page == expected, "{path}: `{command}` writes the table");
}
