// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What guests' page tables take of the host: `SecPageTables` in `/proc/meminfo` (since Linux 6.1;
//! the kernel's `Documentation/filesystems/proc.rst`).
//!
//! The host counts the tables of all its guests together, so the number means something where there
//! is one guest, as in the lab, or as a difference on a host that is otherwise quiet.

use std::fs;

/// Bytes of the tables of all guests of this host, where it counts them.
#[must_use]
pub fn tables_of_guests() -> Option<u64> {
    kib_in(&fs::read_to_string("/proc/meminfo").ok()?, "SecPageTables:")
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
}
