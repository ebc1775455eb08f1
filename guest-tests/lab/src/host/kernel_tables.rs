// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Page tables of a running kernel: the memory that they leave, and the kernel's own dump of the
//! linear map. PID 1 of the host or of a guest reports them.

use std::{fs, io};

use granule_types::units::Bytes;
use serde::{Deserialize, Serialize};

use crate::shell::sha256;

const DUMP_PATH: &str = "/sys/kernel/debug/kernel_page_tables";
/// Line of the dump behind the linear map, with which the kernel's addresses begin.
const LINEAR_END: &str = "---[ Linear Mapping end ]---";

/// Memory of a kernel, and its dump of the linear map.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct KernelTables {
    /// `MemTotal` of `/proc/meminfo`.
    pub mem_total: Bytes,
    /// `MemFree`.
    pub mem_free: Bytes,
    /// `PageTables`, which does not include the tables of the linear map.
    pub page_tables: Bytes,
    /// Tables of the linear map below the root; `None` without a dump of known form.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linear_tables: Option<Bytes>,
    /// SHA-256 of `dump`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dump_sha256: Option<String>,
    /// Lines of the linear map; `None` if the kernel has no dump.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dump: Option<String>,
}

impl KernelTables {
    /// Reads the tables of the running kernel.
    ///
    /// # Errors
    /// A file cannot be read, or has another form.
    pub fn read() -> io::Result<Self> {
        let meminfo = fs::read_to_string("/proc/meminfo")?;
        let dump = match fs::read_to_string(DUMP_PATH) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            dump => Some(dump?),
        };
        let page = Bytes(rustix::param::page_size() as u64);
        Self::parse(&meminfo, dump.as_deref(), page)
            .ok_or_else(|| io::Error::other("/proc/meminfo or the dump of the tables is malformed"))
    }

    fn parse(meminfo: &str, dump: Option<&str>, page: Bytes) -> Option<Self> {
        let bytes = |name: &str| {
            let mut lines = meminfo.lines();
            let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            let kibibytes: u64 = value.trim().strip_suffix(" kB")?.parse().ok()?;
            Some(Bytes(kibibytes << 10))
        };
        let dump = match dump {
            Some(dump) => Some(linear_map(dump)?),
            None => None,
        };
        let tables = dump.as_deref().and_then(|dump| count_tables(dump, page));
        let linear_tables = tables.map(|tables| Bytes(tables * page.0));
        Some(Self {
            linear_tables,
            mem_total: bytes("MemTotal")?,
            mem_free: bytes("MemFree")?,
            page_tables: bytes("PageTables")?,
            dump_sha256: dump.as_ref().map(|dump| sha256(dump.as_bytes())),
            dump,
        })
    }
}

/// Returns the lines of the linear map in a dump: ranges of addresses above those of processes.
fn linear_map(dump: &str) -> Option<String> {
    let (linear, _) = dump.split_once(LINEAR_END)?;
    let lines = linear.lines().filter(|line| line.starts_with("0xf"));
    Some(lines.map(|line| format!("{line}\n")).collect())
}

/// Level of the entries of the root table in a dump.
const ROOT: u32 = u32::MAX;

/// Addresses with entries of the same level; that of pages is 0.
struct Range {
    start: u64,
    last: u64,
    level: u32,
}

/// Returns the number of tables of the linear map below the root; `None` for an unknown dump.
///
/// Each line names the level of the entries of a range, which exist in a table for each entry of
/// the level above, up to the root, whose level is `PGD` (`arch/arm64/mm/ptdump.c`).
fn count_tables(dump: &str, page: Bytes) -> Option<u64> {
    let ranges = dump.lines().map(parse_range).collect::<Option<Vec<_>>>()?;
    let address_bits = 64 - ranges.first()?.start.leading_ones();
    let offset_bits = page.0.ilog2();
    let index_bits = offset_bits - 3;
    let levels = address_bits.checked_sub(offset_bits)?.div_ceil(index_bits);
    let mut tables = 0;
    for level in 0..levels.saturating_sub(1) {
        let span_bits = offset_bits + (level + 1) * index_bits;
        let mut counted = None;
        for range in ranges.iter().filter(|range| range.level <= level) {
            let (first, last) = (range.start >> span_bits, range.last >> span_bits);
            tables += last - first + u64::from(counted != Some(first));
            counted = Some(last);
        }
    }
    Some(tables)
}

fn parse_range(line: &str) -> Option<Range> {
    let mut words = line.split_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let address = |text: &str| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok();
    let level = match words.nth(1)? {
        "PTE" => 0,
        "PMD" => 1,
        "PUD" => 2,
        "P4D" => 3,
        "PGD" => ROOT,
        _ => return None,
    };
    let (start, last) = (address(start)?, address(end)?.checked_sub(1)?);
    (start <= last).then_some(Range { start, last, level })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:        4012345 kB\nMemFree:         3999999 kB\n\
                           Buffers:               0 kB\nPageTables:           16 kB\n";
    const PAGE: Bytes = Bytes::kib(4);
    const LINE: &str = "0xffff000000000000-0xffff000000200000           2M PTE       RW NX\n";

    #[test]
    fn only_the_linear_part_of_the_dump_is_reported() {
        // Linux 5.10 has the first line, newer versions the second one.
        let dump = format!(
            "0x0000000000000000-0xffff000000000000    16776960T PGD\n\
             ---[ Linear Mapping start ]---\n{LINE}{LINEAR_END}\n---[ BPF start ]---\n{LINE}{LINE}"
        );

        let tables = KernelTables::parse(MEMINFO, Some(&dump), PAGE).unwrap();

        assert_eq!(tables.mem_total, Bytes::kib(4_012_345));
        assert_eq!(tables.page_tables, Bytes::kib(16));
        assert_eq!(tables.dump.as_deref(), Some(LINE));
        assert_eq!(tables.dump_sha256, Some(sha256(LINE.as_bytes())));
    }

    #[test]
    fn tables_are_counted_once_for_each_entry_of_the_level_above() {
        // Four levels of 4K: 3M by pages, 1021M by blocks, nothing up to 512G and behind it.
        let dump = "0xffff000000000000-0xffff000000200000   2M PTE RW NX\n\
                    0xffff000000200000-0xffff000000300000   1M PTE ro NX\n\
                    0xffff000000300000-0xffff000000400000   1M PTE\n\
                    0xffff000000400000-0xffff000040000000   1020M PMD RW NX BLK\n\
                    0xffff000040000000-0xffff008000000000   511G PUD\n\
                    0xffff008000000000-0xffff800000000000   127T PGD\n";
        // Two levels of 64K.
        let two_levels = "0xfffffc0000000000-0xfffffc0040000000   1G PTE RW NX\n\
                          0xfffffc0040000000-0xfffffe0000000000   2047G PGD\n";
        // Three levels of 16K, of which Linux 7.3 names the root PUD.
        let three_levels = "0xffff800000000000-0xffff800002000000   32M PTE RW NX\n\
                            0xffff800002000000-0xffff801000000000   65504M PMD RW NX BLK\n\
                            0xffff801000000000-0xffffc00000000000   63T PUD\n";
        // Five levels of 4K.
        let five_levels = "0xfff0000000000000-0xfff0000000001000   4K PTE RW NX\n\
                           0xfff0000000001000-0xfff1000000000000   256T P4D\n";

        assert_eq!(count_tables(dump, PAGE), Some(2 + 1 + 1));
        assert_eq!(count_tables(three_levels, Bytes::kib(16)), Some(1 + 1));
        assert_eq!(count_tables(five_levels, PAGE), Some(1 + 1 + 1 + 1));
        assert_eq!(count_tables(two_levels, Bytes::kib(64)), Some(2));
        assert_eq!(count_tables("0xffff000000000000-0x1 2M PTE\n", PAGE), None);
    }

    #[test]
    fn a_malformed_file_is_no_report() {
        let without = KernelTables::parse(MEMINFO, None, PAGE).unwrap();
        assert_eq!((without.dump, without.dump_sha256), (None, None));

        assert_eq!(KernelTables::parse("MemTotal: 1 kB\n", None, PAGE), None);
        assert_eq!(KernelTables::parse(MEMINFO, Some(LINE), PAGE), None);
    }
}
