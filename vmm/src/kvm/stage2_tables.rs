// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Size and contents of stage-2 page tables, as the host kernel reports them.
//!
//! The size is `SecPageTables` in `/proc/meminfo` (since Linux 6.1; the kernel's
//! `Documentation/filesystems/proc.rst`). It covers all guests of the host, so it is meaningful
//! only with a single guest, as in the lab, or as a difference on an otherwise idle host.
//!
//! The contents are in debugfs (`CONFIG_PTDUMP_STAGE2_DEBUGFS`, since Linux 6.12), one line for
//! each run of equal entries. In `0x0000000080000000-0x0000000084000000 64M 2 R W`, 2 is the level.

use std::{collections::BTreeMap, fs, os::fd::AsRawFd, path::Path};

use crate::memory::kib_field;

/// Returns the total size of this host's stage-2 tables in bytes, if the kernel counts them.
#[must_use]
pub fn stage2_table_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    kib_field(&text, "SecPageTables").map(|size| size.0)
}

/// Debugfs folder of KVM, with a folder `PID-FD` for each VM.
const KVM_DEBUGFS: &str = "/sys/kernel/debug/kvm";

/// Returns the bytes that a VM's stage-2 tables map at each level. The result is empty if the host
/// does not export the tables.
#[must_use]
pub fn mapped_by_level(vm: &impl AsRawFd) -> BTreeMap<u8, u64> {
    let folder = format!("{}-{}", std::process::id(), vm.as_raw_fd());
    let dump = Path::new(KVM_DEBUGFS).join(folder).join("stage2_page_tables");
    fs::read_to_string(dump).map_or_else(|_| BTreeMap::new(), |text| sum_by_level(&text))
}

fn sum_by_level(dump: &str) -> BTreeMap<u8, u64> {
    let mut mapped = BTreeMap::new();
    for (level, bytes) in dump.lines().filter_map(parse_leaf) {
        *mapped.entry(level).or_default() += bytes;
    }
    mapped
}

/// Parses the level and size of a line. Invalid entries have no attributes, or `F` for fault.
fn parse_leaf(line: &str) -> Option<(u8, u64)> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let address = |text: &str| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok();
    let bytes = address(end)?.checked_sub(address(start)?)?;
    let level = words.nth(1)?.parse().ok()?;
    let mut attributes = words.peekable();
    let maps = attributes.peek().is_some() && attributes.all(|word| word != "F");
    maps.then_some((level, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sum_by_level_adds_the_bytes_of_each_level() {
        let dump = "---[ Guest IPA ]---\n\
            0x0000000000000000-0x0000000000003000          12K 3   R W px ux AF\n\
            0x0000000000003000-0x0000000000200000        2036K 3 F\n\
            0x0000000000200000-0x0000000080000000        2046M 2\n\
            0x0000000080000000-0x0000000084000000          64M 2   R W px ux AF BLK\n\
            0x0000000084000000-0x0000000084200000           2M 2   R   PXNUXN AF BLK\n";

        assert_eq!(sum_by_level(dump), BTreeMap::from([(2, 66 << 20), (3, 12 << 10)]));
    }
}
