// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Traces in addition to `rules.rs`: known bugs in page-table code of other projects, mistakes that
//! the Linux series must avoid, and concurrent operations of several CPUs. Each trace violates the
//! expected rules; the corrected trace, if there is one, violates none.
#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::collections::BTreeSet;

use granule_stage2::check::{Action, Checker, Event, Rule, Setup, Trace};
use support::script::{first_line, replay};

/// Returns the rules that a script violates on CPUs without FEAT_S2FWB and CTR_EL0.DIC.
fn violated_rules(script: &str) -> BTreeSet<Rule> {
    replay("", script).violated_rules().clone()
}

/// Two mapped pages whose memory is cleaned and invalidated.
const TWO_PAGES: &str = "LINKED; CLEAN; TWO_PAGES";

/// A run of 16 contiguous pages.
const CONTIGUOUS_RUN: &str =
    "LINKED; CLEAN; ref T3 16; 0..16 * store ENTRY# 0 HINTED# release; unlock; lock exclusive";

/// Name, preceding events, and scripts with the rules that each violates. A script that unmaps
/// memory without a CMO after the invalidation also violates `returned-unclean`.
type Defect = (&'static str, &'static str, &'static [(&'static str, &'static [Rule])]);

#[rustfmt::skip]
const DEFECTS: &[Defect] = &[
    ("Rust-Shyper frees empty tables without an invalidation", TWO_PAGES, &[
        ("lock exclusive; UNMAP0; UNMAP1; FLUSH; UNLINK_T3; free T3", &[Rule::FreedWhileWalked]),
        ("lock exclusive; UNMAP0; UNMAP1; FLUSH; CLEAN; UNLINK_T3; FLUSH; free T3; unlock", &[]),
    ]),
    ("axaddrspace invalidates the wrong translation regime", TWO_PAGES, &[
        ("lock exclusive; UNMAP1; ENTER; tlbi vmalle1is; dsb ish; LEAVE; unlock",
            &[Rule::ReductionNotComplete, Rule::ReturnedUnclean]),
    ]),
    // The operand holds address bits 12 and up; without the shift it encodes another page.
    ("axaddrspace invalidates an unshifted address", TWO_PAGES, &[
        ("lock exclusive; UNMAP1; ENTER; tlbi ipas2e1is 0x1000000; STAGE1; LEAVE; unlock",
            &[Rule::ReductionNotComplete, Rule::ReturnedUnclean]),
    ]),
    // A block replaces a table with one page, whose memory is clean. The rest of the 2M is not
    // clean.
    ("a coalesced block without CMOs is unclean",
        "LINKED; dc PHYS 0x1000; dsb ish; store ENTRY0 0 PAGE0 release; ref T3 1", &[
        ("COALESCE; store T2 0 BLOCK release; FREE_T3; unlock", &[Rule::UncleanReachable]),
        ("CLEAN; COALESCE; store T2 0 BLOCK release; FREE_T3; unlock", &[]),
        ("CLEAN; COALESCE; store T2 0 XBLOCK release; FREE_T3; unlock", &[Rule::StaleInstructions]),
        ("ic; dsb ish; CLEAN; COALESCE; store T2 0 XBLOCK release; FREE_T3; unlock", &[Rule::StaleInstructions]),
        ("CLEAN; ic; dsb ish; isb; COALESCE; store T2 0 XBLOCK release; FREE_T3; unlock", &[]),
    ]),
    ("bytes written during a CMO stay dirty, and stale for fetches", "LINKED", &[
        ("dc PHYS 0x200000; write 0x100001000 0x40; dsb ish; store ENTRY0 0 PAGE0 release; ref T3 1; unlock", &[]),
        ("dc PHYS 0x200000; write 0x100001000 0x40; dsb ish; store ENTRY1 0 PAGE1 release; ref T3 1; unlock",
            &[Rule::UncleanReachable]),
        ("CLEAN; ic; write 0x100001000 0x40; dsb ish; CLEAN; store ENTRY0 0 XPAGE0 release; ref T3 1; unlock", &[]),
        ("CLEAN; ic; write 0x100001000 0x40; dsb ish; CLEAN; store ENTRY1 0 XPAGE1 release; ref T3 1; unlock",
            &[Rule::StaleInstructions]),
    ]),
    ("a CMO without effect needs a DSB too", "TABLES; CLEAN", &[
        ("dc PHYS 0x40; write PHYS 0x40; unlock", &[Rule::UnfinishedCmo]),
    ]),
    ("a walker takes a table from an empty memcache, and another takes the lock", "", &[
        ("lock exclusive; empty; 1 lock exclusive; 1 unlock", &[Rule::EmptyMemcache, Rule::LockDiscipline]),
        ("top-up; lock exclusive; unlock; 1 lock exclusive; 1 unlock", &[]),
    ]),
    ("a broadcast invalidates the CPU's own entry that another CPU has relaxed",
        "LINKED; CLEAN; TWO_PAGES; PROTECT0; 1 lock shared; lock shared; 1 store ENTRY0 RPAGE0 PAGE0 swap", &[
        ("ENTER; tlbi ipas2e1is 0x0 ttl=3; STAGE1; LEAVE; unlock; resume 0x0 write permission 3; 1 unlock", &[]),
    ]),
    ("a vCPU makes progress if another CPU removes the relaxed entry",
        "LINKED; CLEAN; TWO_PAGES; PROTECT0; 1 lock shared; 1 store ENTRY0 RPAGE0 PAGE0 swap", &[
        ("1 store ENTRY0 PAGE0 LOCKED swap; lock shared; unlock; resume 0x0 write permission 3; \
          1 FLUSH; 1 store ENTRY0 LOCKED PAGE0 release; 1 unlock", &[]),
    ]),
    ("a range invalidation with the TTL of another level covers no page",
        "LINKED; CLEAN; TWO_PAGES; lock exclusive; UNMAP0; ENTER", &[
        ("tlbi ripas2e1is 0x0 0x2000 ttl=2; STAGE1; LEAVE; CLEAN; unlock",
            &[Rule::WrongTtl, Rule::ReductionNotComplete, Rule::ReturnedUnclean]),
        ("tlbi ripas2e1is 0x0 0x2000 ttl=3; STAGE1; LEAVE; CLEAN; unlock", &[]),
        ("tlbi ripas2e1is 0x0 0x2000; STAGE1; LEAVE; CLEAN; unlock", &[]),
    ]),
    // The hint is the level of the leaves below the table, whose entry is of a lower number.
    ("a range invalidation with the TTL of the leaves covers the tables above them",
        "LINKED; CLEAN; TWO_PAGES; lock exclusive; UNLINK_T3; ENTER", &[
        ("tlbi ripas2e1is 0x0 0x200000 ttl=3; STAGE1; LEAVE; CLEAN; unlock", &[]),
        ("tlbi ripas2le1is 0x0 0x200000 ttl=3; STAGE1; LEAVE; CLEAN; unlock", &[Rule::TableRemovalSpan]),
        ("tlbi ripas2e1is 0x0 0x200000 ttl=2; STAGE1; LEAVE; CLEAN; unlock",
            &[Rule::WrongTtl, Rule::TableRemovalSpan, Rule::ReturnedUnclean]),
        ("0..2 * tlbi ipas2e1is IPA# ttl=3; STAGE1; LEAVE; CLEAN; unlock", &[Rule::TableRemovalSpan]),
    ]),
    // Two CPUs replace one page each; a CPU's DSB completes only its own invalidations.
    ("each CPU completes its own invalidations",
        "LINKED; CLEAN; TWO_PAGES; lock shared; 1 lock shared; store ENTRY0 PAGE0 LOCKED swap; \
         1 store ENTRY1 PAGE1 LOCKED swap; ENTER; tlbi ipas2e1is 0x0 ttl=3; 1 ENTER; 1 tlbi ipas2e1is 0x1000 ttl=3", &[
        ("dsb ish; 1 tlbi vmalle1is; tlbi vmalle1is; dsb ish; MAKE_BOTH",
            &[Rule::MakeBeforeInvalidated, Rule::ReductionNotComplete]),
        ("dsb ish; 1 tlbi vmalls12e1is; tlbi vmalle1is; dsb ish; MAKE_BOTH", &[Rule::CombinedNotInvalidated]),
        ("tlbi vmalls12e1is; 1 dsb ish; 1 tlbi vmalle1is; dsb ish; MAKE_BOTH", &[]),
        // CPUs may create combined entries again while they hold the stage-2 entry.
        ("1 tlbi vmalle1is; dsb ish; 1 dsb ish; MAKE_BOTH", &[Rule::CombinedNotInvalidated]),
    ]),
    ("an invalidation before all CPUs observe the store does not count",
        "LINKED; CLEAN; TWO_PAGES; lock shared; store ENTRY0 PAGE0 LOCKED swap", &[
        ("1 FLUSH; store ENTRY0 LOCKED RPAGE0 release; unlock",
            &[Rule::MakeBeforeInvalidated, Rule::ReductionNotComplete]),
    ]),
    ("a DSB publishes a store that another CPU has overwritten",
        "LINKED; CLEAN; TWO_PAGES; lock shared; 1 lock shared; store ENTRY0 PAGE0 0 swap; 1 store ENTRY0 0 LOCKED swap", &[
        ("FLUSH; 1 store ENTRY0 LOCKED RPAGE0 release; unlock; 1 unlock", &[]),
    ]),
    ("a change to a contiguous page needs a break of the whole run", CONTIGUOUS_RUN, &[
        ("BREAK_RUN; FLUSH; 0..16 * store ENTRY# 0 RPAGE# release; unlock", &[]),
        // HINTED0 without write permission.
        ("store ENTRY0 HINTED0 0x005000010000077f plain; FLUSH; unlock", &[Rule::ContiguousRun]),
        ("BREAK_RUN; 0..16 * store ENTRY# 0 RPAGE# release; unlock",
            &[Rule::MakeBeforeInvalidated, Rule::ReductionNotComplete]),
        ("store ENTRY0 HINTED0 0 plain; ref T3 -1; FLUSH; unlock",
            &[Rule::ContiguousRun, Rule::ReductionNotComplete, Rule::ReturnedUnclean]),
        // While the rest of the run remains, a CPU may fetch the first page again.
        ("store ENTRY0 HINTED0 0 plain; FLUSH; store ENTRY0 0 RPAGE0 release; 1..16 * store ENTRY# HINTED# 0 plain; \
          FLUSH; 1..16 * store ENTRY# 0 PAGE# release; unlock", &[Rule::MakeBeforeInvalidated]),
    ]),
    // PAGE0 with PBHA and DBM, with FnXS, and as non-shareable memory.
    ("only the changes that the manual lists need a break", TWO_PAGES, &[
        ("lock exclusive; store ENTRY0 PAGE0 0x78480001000007ff plain; store ENTRY0 0x78480001000007ff 0x0040000100000fff plain; unlock", &[]),
        ("lock exclusive; store ENTRY0 PAGE0 0x00400001000004ff plain; FLUSH; unlock", &[Rule::BreakBeforeMake]),
    ]),
    // A TLB need not cache a run as one entry.
    ("each page of a contiguous run needs its own invalidation", CONTIGUOUS_RUN, &[
        ("BREAK_RUN; ref T3 -16; ENTER; 0..16 * tlbi ipas2e1is IPA# ttl=3; STAGE1; LEAVE; CLEAN; unlock", &[]),
        ("BREAK_RUN; ref T3 -16; ENTER; 0..15 * tlbi ipas2e1is IPA# ttl=3; STAGE1; LEAVE; CLEAN; unlock",
            &[Rule::ReductionNotComplete, Rule::ReturnedUnclean]),
    ]),
];

#[test]
fn a_contiguous_run_saves_tlb_entries() {
    let most = |script: &str| {
        let most = replay("", script).most_leaves();
        (most.leaves, most.saved)
    };

    assert_eq!(most(CONTIGUOUS_RUN), (16, 15));
    assert_eq!(most(TWO_PAGES), (2, 0));
}

#[test]
fn known_defects_violate_the_expected_rules() {
    for (name, before, cases) in DEFECTS {
        for (script, rules) in *cases {
            let expected = rules.iter().copied().collect();
            assert_eq!(
                violated_rules(&format!("{before}; {script}")),
                expected,
                "{name}: {script}"
            );
        }
    }
}

#[test]
fn an_event_of_a_cpu_that_does_not_exist_is_a_violation() {
    let trace: Trace = first_line("").parse().unwrap();
    for (cpus, cpu) in [(0, 0), (1, 1), (64, 64), (65, 64), (u8::MAX, u8::MAX)] {
        let mut checker = Checker::new(Setup { cpus, ..trace.setup });

        checker.check(&Event { cpu, action: Action::Isb });

        assert_eq!(*checker.violated_rules(), [Rule::LockDiscipline].into(), "{cpus} CPUs");
    }
}

#[test]
fn an_invalid_trace_is_refused_with_its_line() {
    let first = first_line("");
    for (text, line) in [
        (String::new(), 1),
        ("granule-trace 2 granule=4096".to_owned(), 1),
        (format!("{first}0 dsb ish\n0 dsb osh"), 3),
        (format!("{first}0 store 1 2 3"), 2),
        (format!("{first}0 isb now"), 2),
        (format!("{first}300 isb"), 2),
        (format!("{first}0 write 0xfffffffffffff000 0x2000"), 2),
        (format!("{first}0 add-memory 0 0 0x1000 devices"), 2),
    ] {
        let error = text.parse::<Trace>().unwrap_err();
        assert_eq!(error.line, line, "{error}");
    }
}
