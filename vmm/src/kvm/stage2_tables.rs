// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest's page tables: what they take of the host, and what they map.
//!
//! Their size is `SecPageTables` in `/proc/meminfo` (since Linux 6.1; the kernel's
//! `Documentation/filesystems/proc.rst`). The host counts the tables of all its guests together, so
//! the number means something where there is one guest, as in the lab, or as a difference on a host
//! that is otherwise quiet.
//!
//! What they map is in debugfs where the host was built to show it
//! (`CONFIG_PTDUMP_STAGE2_DEBUGFS`, since Linux 6.12), a line for each run of entries alike:
//! `0x0000000080000000-0x0000000084000000          64M 2 R W …`, where 2 is the level.

use std::{collections::BTreeMap, fs, os::fd::AsRawFd, path::Path};

/// Bytes of the tables of all guests of this host, where it counts them.
#[must_use]
pub fn stage2_table_bytes() -> Option<u64> {
    kib_in(&fs::read_to_string("/proc/meminfo").ok()?, "SecPageTables:")
}

/// Where KVM shows each VM: a folder named by the process and the VM's file descriptor.
const DEBUGFS: &str = "/sys/kernel/debug/kvm";

/// Bytes that leaves of each level of a VM's tables map; none where the host does not show them.
#[must_use]
pub fn mapped_by_level(vm: &impl AsRawFd) -> BTreeMap<u8, u64> {
    let folder = format!("{}-{}", std::process::id(), vm.as_raw_fd());
    let dump = Path::new(DEBUGFS).join(folder).join("stage2_page_tables");
    fs::read_to_string(dump).map_or_else(|_| BTreeMap::new(), |text| leaves(&text))
}

fn leaves(dump: &str) -> BTreeMap<u8, u64> {
    let mut mapped = BTreeMap::new();
    for (level, bytes) in dump.lines().filter_map(leaf) {
        *mapped.entry(level).or_default() += bytes;
    }
    mapped
}

/// The level and the bytes of a line. Entries that map nothing have no attributes, or `F` for fault.
fn leaf(line: &str) -> Option<(u8, u64)> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let address = |text: &str| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok();
    let bytes = address(end)?.checked_sub(address(start)?)?;
    let level = words.nth(1)?.parse().ok()?;
    let mut attributes = words.peekable();
    let maps = attributes.peek().is_some() && attributes.all(|word| word != "F");
    maps.then_some((level, bytes))
}

/// The bytes in a line `Name: number kB`.
#[must_use]
pub fn kib_in(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = value.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_not_there_has_no_number() {
        assert_eq!(kib_in("MemTotal: 5 kB\n", "SecPageTables:"), None);
        assert_eq!(
            kib_in("SecPageTables:     12 kB\n", "SecPageTables:"),
            Some(12288)
        );
    }
    #[test]
    fn runs_of_entries_add_up_by_level() {
        let dump = "---[ Guest IPA ]---\n\
            0x0000000000000000-0x0000000000003000          12K 3   R W px ux AF\n\
            0x0000000000003000-0x0000000000200000        2036K 3 F\n\
            0x0000000000200000-0x0000000080000000        2046M 2\n\
            0x0000000080000000-0x0000000084000000          64M 2   R W px ux AF BLK\n\
            0x0000000084000000-0x0000000084200000           2M 2   R   PXNUXN AF BLK\n";

        assert_eq!(leaves(dump), BTreeMap::from([(2, 66 << 20), (3, 12 << 10)]));
    }
}
