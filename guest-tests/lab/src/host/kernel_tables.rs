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
        Self::parse(&meminfo, dump.as_deref())
            .ok_or_else(|| io::Error::other("/proc/meminfo or the dump of the tables is malformed"))
    }

    fn parse(meminfo: &str, dump: Option<&str>) -> Option<Self> {
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
        Some(Self {
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

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:        4012345 kB\nMemFree:         3999999 kB\n\
                           Buffers:               0 kB\nPageTables:           16 kB\n";
    const LINE: &str = "0xffff000000000000-0xffff000000200000           2M PTE       RW NX\n";

    #[test]
    fn only_the_linear_part_of_the_dump_is_reported() {
        // Linux 5.10 has the first line, newer versions the second one.
        let dump = format!(
            "0x0000000000000000-0xffff000000000000    16776960T PGD\n\
             ---[ Linear Mapping start ]---\n{LINE}{LINEAR_END}\n---[ BPF start ]---\n{LINE}{LINE}"
        );

        let tables = KernelTables::parse(MEMINFO, Some(&dump)).unwrap();

        assert_eq!(tables.mem_total, Bytes::kib(4_012_345));
        assert_eq!(tables.page_tables, Bytes::kib(16));
        assert_eq!(tables.dump.as_deref(), Some(LINE));
        assert_eq!(tables.dump_sha256, Some(sha256(LINE.as_bytes())));
    }

    #[test]
    fn a_malformed_file_is_no_report() {
        let without = KernelTables::parse(MEMINFO, None).unwrap();
        assert_eq!((without.dump, without.dump_sha256), (None, None));

        assert_eq!(KernelTables::parse("MemTotal: 1 kB\n", None), None);
        assert_eq!(KernelTables::parse(MEMINFO, Some(LINE)), None);
    }
}
