// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The observer of machines: blocks that are split into pages without a break, by the level of FEAT_BBM.

mod support;

use granule_stage2::{BbmLevel, check::Rule};
use support::machine::rules_with_bbm;

/// A guest with an empty root, of which CPU 0 takes the lock.
const START: &str = "\
0 vtcr 80023558
0 hcr 488000000
0 table 41180000 1 -
0 vttbr 1000041180000
0 hcr 80000001
0 hcr 488000000
0 isb
0 word 50000000 0 1
";

/// An invalidation of a block at address 0, with its barriers and the switch to the guest's VMID.
const INVALIDATION: &str = "\
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
";

/// Returns entries of a table, each `size` bytes behind the one before it.
fn entries(indices: impl Iterator<Item = u64>, first: u64, size: u64) -> String {
    indices.map(|index| format!(" {index:x}={:x}", first + index * size)).collect()
}

#[test]
fn a_block_is_split_in_place_at_level_3_of_feat_bbm_alone() {
    let pages = entries(0..512, 0x40_0000_41a0_07ff, 1 << 12);
    let split = format!(
        "{START}0 write 41a00000
0 dc civac 41a00000 200000 @1
0 dsb sy
0 table 41184000 2 0 0=40000041a007fd
0 store 41180000 0 41184003 release @1
0 table 41185000 3 0{pages}
0 store 41184000 40000041a007fd 41185003 release @1
{INVALIDATION}0 word 50000000 1 0
"
    );

    let violated =
        [BbmLevel::L0, BbmLevel::L2, BbmLevel::L3].map(|level| rules_with_bbm(level, &split));

    assert_eq!(violated, [vec![Rule::BreakBeforeMake], vec![Rule::BlockSizeChange], vec![]]);
}

#[test]
fn a_block_of_1g_may_be_split_into_blocks_and_pages_at_once() {
    let split = |page: u64| {
        format!(
            "{START}0 dc civac 80000000 40000000 @1
0 dsb sy
0 store 41180000 0 400000800007fd release @1
0 table 41185000 3 0{}
0 table 41184000 2 0{} 5=41185003
0 store 41180000 400000800007fd 41184003 release @1
{INVALIDATION}0 word 50000000 1 0
",
            entries(0..512, page, 1 << 12),
            entries((0..5).chain(6..512), 0x40_0000_8000_07fd, 1 << 21),
        )
    };

    let equal = rules_with_bbm(BbmLevel::L3, &split(0x40_0000_80a0_07ff));
    let other = rules_with_bbm(BbmLevel::L3, &split(0x40_0000_80c0_07ff));

    assert_eq!(equal, []);
    assert_eq!(other[0], Rule::BreakBeforeMake);
}
