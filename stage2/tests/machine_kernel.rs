// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Traces of a kernel's own tables: for each rule, one that violates it and corrected twins.

use std::collections::{BTreeMap, BTreeSet};

use granule_stage2::{
    BbmLevel, PhysAddr, TableAddress, VirtAddr,
    check::{
        Rule,
        machine::{
            CheckedTables, Finding, Hypervisor, LockType, Machine, MachineEvent, Observer, Role,
            TranslatedAddress,
        },
    },
    geometry::Granule,
};

/// The function that changes the kernel's tables, and the one that frees pages.
const CHANGE: u16 = 1;
const FREE: u16 = 2;

/// Tables of a kernel with 4K pages and 48 bits on two CPUs: a root, whose entry 0 leads by the tables
/// of levels 1 and 2 to a table of pages.
///
/// | address | level | first addresses |
/// |---|---|---|
/// | 41000000 | 0 | ffff000000000000 |
/// | 41001000 | 1 | ffff000000000000 |
/// | 41002000 | 2 | entry 0: table 41003000; entry 1: block 48200000 |
/// | 41003000 | 3 | entry 0: page 48000000 |
const TABLES: &str = "
0 kmair 44f0ff
0 ktcr b5103510
1 ktcr b5103510
0 ktable 41003000 3 - 0=68000048000703 8=68000048008703
0 ktable 41002000 2 - 0=41003003 1=68000048200701
0 ktable 41001000 1 - 0=41002003
0 ktable 41000000 0 - 0=41001003
0 kroot 2 41000000
1 kroot 2 41000000
";

fn observe(trace: &str, bbm: BbmLevel) -> Observer {
    let functions = [(CHANGE, Role::ChangeKernel), (FREE, Role::FreePage)];
    let lock = LockType::Spinlock;
    let functions = BTreeMap::from(functions);
    let hypervisor = Hypervisor { lock, locked_entry: None, granule: Granule::K4, functions };
    let mut observer = Observer::new(Machine {
        cpus: 2,
        memory: (PhysAddr(0x4000_0000), 1 << 30),
        hypervisor,
        disabled_rules: BTreeSet::new(),
        bbm: Some(bbm),
    });
    for line in trace.lines().filter(|line| !line.is_empty()) {
        observer.observe(&line.parse::<MachineEvent>().unwrap_or_else(|e| panic!("{line}: {e}")));
    }
    let totals = observer.totals();
    assert_eq!((totals.unknown_tables, totals.unsupported_kernel_roots), (0, 0));
    observer
}

/// Returns the rules that a trace violates on CPUs with a level of FEAT_BBM.
fn violated_with(bbm: BbmLevel, trace: &str) -> Vec<Rule> {
    observe(&[TABLES, trace].concat(), bbm).findings().iter().map(|finding| finding.rule).collect()
}

fn violated(trace: &str) -> Vec<Rule> {
    violated_with(BbmLevel::L0, trace)
}

/// Removes the page by a store of CPU 0.
const BREAK: &str = "0 store 41003000 68000048000703 0 plain\n";
/// Maps another page at its address.
const MAKE: &str = "0 store 41003000 0 68000048005703 plain\n";

#[test]
fn another_page_is_mapped_only_after_a_complete_invalidation_on_all_cpus() {
    for (steps, is_correct) in [
        ("0 dsb ishst\n0 ktlbi vaale1is ff000000000\n0 dsb ish\n", true),
        ("0 dsb ishst\n0 ktlbi vaae1is ff000000000\n0 dsb ish\n", true),
        ("0 dsb ishst\n0 ktlbi vmalle1is 0\n0 dsb ish\n", true),
        ("0 dsb ishst\n0 ktlbi rvaale1is 401000000000\n0 dsb ish\n", true),
        // The range, and the hint, of another granule.
        ("0 dsb ishst\n0 ktlbi rvaale1is 801000000000\n0 dsb ish\n", false),
        ("0 dsb ishst\n0 ktlbi rvaale1is 1000000000\n0 dsb ish\n", false),
        ("0 dsb ishst\n0 ktlbi vaale1is bff000000000\n0 dsb ish\n", false),
        ("", false),
        ("0 ktlbi vaale1is ff000000000\n0 dsb ish\n", false),
        ("0 dsb ishst\n0 ktlbi vaale1is ff000000000\n", false),
        ("0 dsb ishst\n0 ktlbi vaale1is ff000000000\n1 dsb ish\n", false),
        ("0 dsb ishst\n0 ktlbi vaale1is ff000000001\n0 dsb ish\n", false),
        ("0 dsb ishst\n0 ktlbi vaale1 ff000000000\n0 dsb nsh\n", false),
        ("0 dsb ishst\n0 ktlbi vaale1is ff000000000\n0 dsb ishst\n", false),
        ("0 dsb ishst\n0 ktlbi aside1is 1000000000000\n0 dsb ish\n", false),
    ] {
        let expected = if is_correct { vec![] } else { vec![Rule::MakeBeforeInvalidated] };

        assert_eq!(violated(&[BREAK, steps, MAKE].concat()), expected, "{steps}");
    }
}

#[test]
fn the_same_page_is_mapped_again_without_an_invalidation() {
    let again = "0 store 41003000 0 68000048000703 plain\n";
    let read_only = "0 store 41003000 0 60000048000783 plain\n";

    assert_eq!(violated(&[BREAK, again].concat()), []);
    assert_eq!(violated(&[BREAK, read_only].concat()), [], "permissions change without a break");
}

#[test]
fn the_contiguous_bit_changes_by_an_invalid_entry_without_an_invalidation_from_level_2_on() {
    let contiguous = [BREAK, "0 store 41003000 0 78000048000703 plain\n"].concat();

    assert_eq!(violated_with(BbmLevel::L0, &contiguous), [Rule::MakeBeforeInvalidated]);
    assert_eq!(violated_with(BbmLevel::L2, &contiguous), []);
    assert_eq!(violated_with(BbmLevel::L2, &[BREAK, MAKE].concat()), [Rule::MakeBeforeInvalidated]);
}

#[test]
fn a_local_invalidation_is_enough_for_the_only_cpu() {
    let local = "0 dsb nshst\n0 ktlbi vaale1 ff000000000\n0 dsb nsh\n";
    let alone: String =
        TABLES.lines().filter(|line| !line.starts_with('1')).collect::<Vec<_>>().join("\n");
    let run = |start: &str| {
        observe(&[start, "\n", BREAK, local, MAKE].concat(), BbmLevel::L0).findings().len()
    };

    assert_eq!(run(&alone), 0);
    assert_eq!(run(TABLES), 1);
}

#[test]
fn a_valid_page_changes_its_permissions_in_place_and_nothing_else() {
    let change = |new: &str| format!("0 store 41003000 68000048000703 {new} plain\n");
    for (new, rules) in [
        ("60000048000783", vec![]),
        ("48000048000703", vec![]),
        ("68000048000f03", vec![]),
        ("68000048000707", vec![]),
        ("68000048005703", vec![Rule::BreakBeforeMake]),
        ("6800004800070b", vec![Rule::BreakBeforeMake]),
        ("68000048000403", vec![Rule::BreakBeforeMake]),
        ("78000048000703", vec![Rule::BreakBeforeMake]),
    ] {
        assert_eq!(violated(&change(new)), rules, "{new}");
    }
    let contiguous = change("78000048000703");
    assert_eq!(violated_with(BbmLevel::L2, &contiguous), [Rule::BlockSizeChange]);
    assert_eq!(violated_with(BbmLevel::L3, &contiguous), []);
}

#[test]
fn a_block_is_split_in_place_only_with_level_2_and_equal_parts() {
    let parts = |first: u64| -> String {
        (0..512_u64).map(|n| format!(" {n:x}={:x}", first + n * 0x1000)).collect()
    };
    let split = |first| {
        format!(
            "0 ktable 41004000 3 -{}\n0 store 41002008 68000048200701 41004003 plain\n",
            parts(first)
        )
    };
    let equal = split(0x0068_0000_4820_0703);

    assert_eq!(violated_with(BbmLevel::L0, &equal), [Rule::BreakBeforeMake]);
    assert_eq!(violated_with(BbmLevel::L2, &equal), [Rule::BlockSizeChange]);
    assert_eq!(violated_with(BbmLevel::L3, &equal), []);
    assert_eq!(violated_with(BbmLevel::L3, &split(0x0068_0000_4840_0703)), [Rule::BreakBeforeMake]);
    assert_eq!(violated_with(BbmLevel::L3, &split(0x0068_0000_4820_070b)), [Rule::BreakBeforeMake]);

    // With nT, after the invalidation of the block without it.
    let (set, flush) = (
        "0 store 41002008 68000048200701 68000048210701 plain\n",
        "0 dsb ishst\n0 ktlbi vaale1is ff000000200\n0 dsb ish\n",
    );
    let with_nt = equal.replace("68000048200701 41004003", "68000048210701 41004003");
    assert_eq!(violated_with(BbmLevel::L1, &[set, flush, &with_nt].concat()), []);
    assert_eq!(violated_with(BbmLevel::L1, &[set, &with_nt].concat()), [Rule::BlockSizeChange]);

    // The table is replaced by the block again; it is in walk caches until an invalidation.
    let collapse = equal + "0 store 41002008 41004003 68000048200701 plain\n";
    let free = "0 enter 2 41004000 0 0 0\n";
    let all = "0 dsb ishst\n0 ktlbi vaae1is ff000000200\n0 dsb ish\n";
    let leaves = "0 dsb ishst\n0 ktlbi vaale1is ff000000200\n0 dsb ish\n";
    assert_eq!(violated_with(BbmLevel::L3, &[&collapse, all, free].concat()), []);
    assert_eq!(
        violated_with(BbmLevel::L3, &[&collapse, leaves, free].concat()),
        [Rule::FreedWhileWalked]
    );
    assert_eq!(violated_with(BbmLevel::L3, &[&collapse, free].concat()), [Rule::FreedWhileWalked]);
}

#[test]
fn parts_in_nested_tables_are_compared_with_the_block_too() {
    let blocks: String = (1..512_u64)
        .map(|n| format!(" {n:x}={:x}", 0x0068_0000_4000_0701 + n * 0x20_0000))
        .collect();
    let split = |first: u64| {
        let pages: String =
            (0..512_u64).map(|n| format!(" {n:x}={:x}", first + n * 0x1000)).collect();
        format!(
            "0 store 41001008 0 68000040000701 plain\n0 ktable 41005000 3 -{pages}\n\
             0 ktable 41004000 2 - 0=41005003{blocks}\n\
             0 store 41001008 68000040000701 41004003 plain\n"
        )
    };

    assert_eq!(violated_with(BbmLevel::L3, &split(0x0068_0000_4000_0703)), []);
    assert_eq!(violated_with(BbmLevel::L3, &split(0x0068_0000_4800_0703)), [Rule::BreakBeforeMake]);
}

#[test]
fn a_table_is_linked_after_a_barrier_or_by_a_release() {
    let link = |writer: &str, before: &str, kind: &str| {
        format!(
            "{before}0 ktable 41005000 3 {writer} 0=68000048005703\n0 store 41002010 0 41005003 {kind}\n"
        )
    };

    assert_eq!(violated(&link("0", "", "plain")), [Rule::TableNotPublished]);
    assert_eq!(violated(&link("-", "", "plain")), []);
    assert_eq!(violated(&link("0", "", "release")), []);
    assert_eq!(violated(&link("0", "", "relaxed-swap")), [Rule::TableNotPublished]);
    // The table of the middle level is written while it is linked; the lower one is complete.
    let two = "0 ktable 41006000 3 0\n0 ktable 41005000 2 - 0=41006003\n\
               0 store 41001008 0 41005003 plain\n";
    assert_eq!(violated(two), [Rule::TableNotPublished]);
}

#[test]
fn a_call_that_restricts_or_removes_ends_after_the_invalidation() {
    let call = |thread: &str, change: &str, steps: &str| {
        format!("0 thread {thread}\n0 enter 1 0 0 0 0\n{change}{steps}0 leave 1 0\n")
    };
    let read_only = "0 store 41003000 68000048000703 60000048000783 plain\n";
    let writable = "0 store 41003000 68000048000703 48000048000703 plain\n";
    let flush = "0 dsb ishst\n0 ktlbi vaale1is ff000000000\n0 dsb ish\n";
    let short = "0 dsb ishst\n0 ktlbi vaale1is ff000000000\n";

    for change in [read_only, BREAK] {
        assert_eq!(violated(&call("ffff1", change, flush)), []);
        assert_eq!(violated(&call("ffff1", change, short)), [Rule::ReductionNotComplete]);
        assert_eq!(violated(&call("ffff1", change, "")), [Rule::ReductionNotComplete]);
        assert_eq!(violated(change), [], "outside of a call, Linux may flush later");
    }
    assert_eq!(violated(&call("ffff1", writable, "")), [], "it becomes executable");
    // Another thread of this CPU unmaps lazily while the call sleeps.
    let other = format!("0 thread ffff2\n{BREAK}0 thread ffff1\n");
    assert_eq!(violated(&call("ffff1", &other, "")), []);
}

#[test]
fn a_removed_table_is_invalidated_with_its_walk_cache_entries_before_the_call_ends() {
    let remove = "0 enter 1 0 0 0 0\n0 store 41002000 41003003 0 plain\n0 dsb ishst\n";
    let leaves = "0 ktlbi vaale1is ff000000000\n0 ktlbi vaale1is ff000000008\n";
    let ends = "0 dsb ish\n0 leave 1 0\n";
    let tables = "0 ktlbi vaae1is ff000000000\n";
    let run = |steps: &[&str]| violated(&[&[remove], steps, &[ends]].concat().concat());

    assert_eq!(run(&[leaves, tables]), []);
    assert_eq!(run(&[leaves]), [Rule::TableRemovalSpan]);
    assert_eq!(run(&["0 ktlbi vmalle1is 0\n"]), []);
    assert_eq!(run(&["0 ktlbi vmalle1 0\n"]), [Rule::TableRemovalSpan]);
}

#[test]
fn a_page_of_an_unlinked_table_is_written_or_freed_after_the_invalidation() {
    let remove = "0 store 41002000 41003003 0 plain\n0 dsb ishst\n";
    let flush = "0 ktlbi vmalle1is 0\n0 dsb ish\n";
    for reuse in ["1 write 41003000\n", "0 enter 2 41003000 0 0 0\n"] {
        assert_eq!(violated(&[remove, reuse].concat()), [Rule::FreedWhileWalked], "{reuse}");
        assert_eq!(violated(&[remove, flush, reuse].concat()), [], "{reuse}");
    }
    assert_eq!(violated("0 enter 2 41003000 0 0 0\n"), [Rule::FreedWhileWalked], "it is linked");
}

#[test]
fn another_table_is_linked_only_after_the_invalidation_of_the_first_one() {
    let swap = "0 store 41002000 41003003 0 plain\n0 dsb ishst\n{}\
                0 ktable 41005000 3 - 0=68000048000703\n0 store 41002000 0 41005003 plain\n";

    let without = swap.replace("{}", "");
    let with = swap.replace("{}", "0 ktlbi vmalle1is 0\n0 dsb ish\n");

    assert_eq!(violated(&without), [Rule::MakeBeforeInvalidated]);
    assert_eq!(violated(&with), []);
}

#[test]
fn a_root_that_no_cpu_uses_is_ordinary_memory() {
    let switch = "0 ktable 41008000 0 - 0=41001003\n0 kroot 2 41008000\n1 kroot 2 41008000\n\
                  0 write 41000000\n0 store 41000000 41001003 123 plain\n";

    assert_eq!(violated(switch), []);
    let unpublished = "0 ktable 41008000 0 0 0=41001003\n0 kroot 2 41008000\n";
    assert_eq!(violated(unpublished), [Rule::TableNotPublished]);
}

#[test]
fn a_finding_names_the_address_of_the_kernel() {
    let observer = observe(&[TABLES, BREAK, MAKE].concat(), BbmLevel::L0);

    let findings = observer.findings();
    let [Finding { tables, change, detail, .. }] = findings[..] else { panic!("{findings:?}") };
    assert_eq!(*tables, CheckedTables::Kernel(TableAddress(0x4100_0000)));
    let address = TranslatedAddress::Kernel(VirtAddr(0xff_0000_0000_0000));
    assert_eq!(
        change.map(|change| (change.address, change.new)),
        Some((address, 0x0068_0000_4800_5703))
    );
    assert!(detail.starts_with("kernel address 0xffff000000000000: "), "{detail}");
}
