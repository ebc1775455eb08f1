// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Size and contents of stage-2 page tables, as the host kernel reports them.
//!
//! The size is `SecPageTables` in `/proc/meminfo` (since Linux 6.1; the kernel's
//! `Documentation/filesystems/proc.rst`). It covers all guests of the host, so it is meaningful
//! only with a single guest, as in the lab, or as a difference on an otherwise idle host.
//!
//! The contents are in debugfs (`CONFIG_PTDUMP_STAGE2_DEBUGFS`, since Linux 6.12), one line for
//! each run of equal entries. In `0x0000000080000000-0x0000000084000000 64M 2 R W`, 2 is the level.

use std::{collections::BTreeMap, fs, ops::Range, os::fd::AsRawFd, path::Path};

use granule_types::units::{Bytes, GuestAddress};

use crate::memory::kib_field;

/// Returns the total size of this host's stage-2 tables in bytes, if the kernel counts them.
#[must_use]
pub fn stage2_table_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    kib_field(&text, "SecPageTables").map(|size| size.0)
}

/// Debugfs folder of KVM, with a folder `PID-FD` for each VM.
const KVM_DEBUGFS: &str = "/sys/kernel/debug/kvm";

/// The valid leaves of a VM's stage-2 tables: ranges of guest addresses, each with its level.
#[derive(Debug)]
pub struct Stage2Leaves(Vec<(Range<GuestAddress>, u8)>);

impl Stage2Leaves {
    /// Reads the leaves of a VM, if the host exports the tables to this process. The kernel holds
    /// the VM's `mmu_lock` meanwhile, so faults of the guest wait.
    #[must_use]
    pub fn read(vm: &impl AsRawFd) -> Option<Self> {
        let folder = format!("{}-{}", std::process::id(), vm.as_raw_fd());
        let dump = Path::new(KVM_DEBUGFS).join(folder).join("stage2_page_tables");
        fs::read_to_string(dump).ok().map(|text| Self::parse(&text))
    }

    fn parse(dump: &str) -> Self {
        Self(dump.lines().filter_map(parse_leaf).collect())
    }

    /// Returns the bytes that leaves of each level map in a range.
    #[must_use]
    pub fn bytes_by_level(&self, range: &Range<GuestAddress>) -> BTreeMap<u8, u64> {
        let mut mapped = BTreeMap::new();
        for (leaf, level) in &self.0 {
            let (start, end) = (leaf.start.0.max(range.start.0), leaf.end.0.min(range.end.0));
            if start < end {
                *mapped.entry(*level).or_default() += end - start;
            }
        }
        mapped
    }
}

/// Returns the size that a leaf of a level maps, with base pages of `base`. Level 3 has pages.
#[must_use]
pub const fn leaf_size(base: Bytes, level: u8) -> Bytes {
    let mut size = base.0;
    let mut above = level;
    while above < 3 {
        // A table is a page of 8-byte entries.
        size = size.saturating_mul(base.0 / 8);
        above += 1;
    }
    Bytes(size)
}

/// Returns the bytes that a VM's stage-2 tables map at each level. The result is empty if the host
/// does not export the tables.
#[must_use]
pub fn mapped_by_level(vm: &impl AsRawFd) -> BTreeMap<u8, u64> {
    let all = GuestAddress(0)..GuestAddress(u64::MAX);
    Stage2Leaves::read(vm).map(|leaves| leaves.bytes_by_level(&all)).unwrap_or_default()
}

/// Parses the range and level of a line. Invalid entries have no attributes, or `F` for fault.
fn parse_leaf(line: &str) -> Option<(Range<GuestAddress>, u8)> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let address = |text: &str| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok();
    let range = GuestAddress(address(start)?)..GuestAddress(address(end)?);
    let level = words.nth(1)?.parse().ok()?;
    let mut attributes = words.peekable();
    let maps = attributes.peek().is_some() && attributes.all(|word| word != "F");
    maps.then_some((range, level))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_range_are_summed_by_level() {
        let dump = "---[ Guest IPA ]---\n\
            0x0000000000000000-0x0000000000003000          12K 3   R W px ux AF\n\
            0x0000000000003000-0x0000000000200000        2036K 3 F\n\
            0x0000000000200000-0x0000000080000000        2046M 2\n\
            0x0000000080000000-0x0000000084000000          64M 2   R W px ux AF BLK\n\
            0x0000000084000000-0x0000000084200000           2M 2   R   PXNUXN AF BLK\n";

        let leaves = Stage2Leaves::parse(dump);
        let all = leaves.bytes_by_level(&(GuestAddress(0)..GuestAddress(u64::MAX)));
        let zone = GuestAddress(0x8100_0000)..GuestAddress(0x8410_0000);
        let zone = leaves.bytes_by_level(&zone);

        assert_eq!(all, BTreeMap::from([(2, 66 << 20), (3, 12 << 10)]));
        assert_eq!(zone, BTreeMap::from([(2, 49 << 20)]));
        let sizes = [1, 2, 3].map(|level| leaf_size(Bytes::kib(4), level));
        assert_eq!(sizes, [Bytes::gib(1), Bytes::mib(2), Bytes::kib(4)]);
        assert_eq!(leaf_size(Bytes::kib(64), 2), Bytes::mib(512));
    }
}
