// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Size and contents of stage-2 page tables, as the host kernel reports them.
//!
//! The size is `SecPageTables` in `/proc/meminfo` (since Linux 6.1; the kernel's
//! `Documentation/filesystems/proc.rst`). It covers all guests of the host, so it is meaningful
//! only with a single guest, as in the lab, or as a difference on an otherwise idle host.
//!
//! The contents are in debugfs (`CONFIG_PTDUMP_STAGE2_DEBUGFS`, since Linux 6.12), one line for
//! each run of equal entries. In `0x0000000080000000-0x0000000084000000 64M 2 R W`, 2 is the level.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{BufRead, BufReader},
    ops::Range,
    os::fd::AsRawFd,
    path::Path,
};

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

/// Returns the bytes that leaves of each level of a VM's stage-2 tables map, for each range, if the host
/// exports the tables to this process. The kernel holds the VM's `mmu_lock` meanwhile, so faults of the
/// guest wait.
#[must_use]
pub fn mapped_bytes(
    vm: &impl AsRawFd,
    ranges: &[Range<GuestAddress>],
) -> Option<Vec<BTreeMap<u8, u64>>> {
    let folder = format!("{}-{}", std::process::id(), vm.as_raw_fd());
    let dump = Path::new(KVM_DEBUGFS).join(folder).join("stage2_page_tables");
    sum_dump(BufReader::new(File::open(dump).ok()?), ranges)
}

/// Sums a dump line by line: the guest decides how many there are.
fn sum_dump(dump: impl BufRead, ranges: &[Range<GuestAddress>]) -> Option<Vec<BTreeMap<u8, u64>>> {
    let mut mapped = vec![BTreeMap::new(); ranges.len()];
    for line in dump.lines() {
        let Some((leaf, level)) = parse_leaf(&line.ok()?) else { continue };
        for (range, mapped) in ranges.iter().zip(&mut mapped) {
            let (start, end) = (leaf.start.0.max(range.start.0), leaf.end.0.min(range.end.0));
            if start < end {
                *mapped.entry(level).or_default() += end - start;
            }
        }
    }
    Some(mapped)
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

        let all = GuestAddress(0)..GuestAddress(u64::MAX);
        let zone = GuestAddress(0x8100_0000)..GuestAddress(0x8410_0000);
        let mapped = sum_dump(dump.as_bytes(), &[all, zone]).unwrap();

        let of_all = BTreeMap::from([(2, 66 << 20), (3, 12 << 10)]);
        assert_eq!(mapped, [of_all, BTreeMap::from([(2, 49 << 20)])]);
        let sizes = [1, 2, 3].map(|level| leaf_size(Bytes::kib(4), level));
        assert_eq!(sizes, [Bytes::gib(1), Bytes::mib(2), Bytes::kib(4)]);
        assert_eq!(leaf_size(Bytes::kib(64), 2), Bytes::mib(512));
    }
}
