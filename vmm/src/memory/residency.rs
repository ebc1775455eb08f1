// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Resident pages of an address range.
//!
//! `/proc/self/smaps` (proc(5)) reports how the kernel maps a range. It lists each mapping as a
//! head line `start-end perms offset device inode path` and one line per field, `Name: number kB`.
//! `Rss` counts small and transparent huge pages without hugetlb; `AnonHugePages`, `ShmemPmdMapped`
//! and `FilePmdMapped` count the part of `Rss` that is mapped as huge pages. No field counts the
//! huge zero page, and none transparent huge pages smaller than a block, which [`pagemap`](super::pagemap)
//! finds.

use std::{fs, ops::Range, path::PathBuf};

use granule_types::units::{Bytes, HostVirtAddr};

use super::MemoryError;

/// Resident pages of an address range, by type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Residency {
    /// Page size of the mapping: the base page size or a hugetlb page size.
    pub kernel_page_size: Bytes,
    /// Bytes in base pages.
    pub base_pages: Bytes,
    /// Bytes in transparent huge pages smaller than a block, which are otherwise base pages; `None` if they
    /// were not looked for, or the kernel hides them.
    pub small_thp: Option<Bytes>,
    /// Bytes in transparent huge pages of a block.
    pub thp: Bytes,
    /// Bytes in hugetlb pages.
    pub hugetlb: Bytes,
}

/// Mappings of this process with their resident pages. To read them, the kernel visits all page tables.
#[derive(Debug)]
pub struct Smaps(String);

impl Smaps {
    /// Reads the mappings.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read() -> Result<Self, MemoryError> {
        let path = PathBuf::from("/proc/self/smaps");
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Self(text)),
            Err(source) => Err(MemoryError::Read { path, source }),
        }
    }

    /// Returns the resident pages of `range`, which consists of whole mappings.
    ///
    /// # Errors
    /// The mappings are not those of the range.
    pub fn residency(&self, range: Range<HostVirtAddr>) -> Result<Residency, MemoryError> {
        Residency::parse(&self.0, range)
    }

    /// Returns the resident bytes outside of `ranges`, without hugetlb.
    pub fn outside_of(&self, ranges: &[Range<HostVirtAddr>]) -> Bytes {
        Residency::parse_outside(&self.0, ranges)
    }
}

impl Residency {
    /// Returns the bytes in resident pages of all types.
    pub fn total(&self) -> Bytes {
        let small_thp = self.small_thp.unwrap_or_default();
        Bytes(self.base_pages.0 + small_thp.0 + self.thp.0 + self.hugetlb.0)
    }

    /// Distinguishes base pages from transparent huge pages of a size, of which these are bytes.
    pub fn with_small_thp(self, small_thp: Bytes) -> Self {
        let base_pages = Bytes(self.base_pages.0.saturating_sub(small_thp.0));
        Self { base_pages, small_thp: Some(small_thp), ..self }
    }

    fn parse_outside(text: &str, ranges: &[Range<HostVirtAddr>]) -> Bytes {
        let outside = |mapping: &_| !ranges.iter().any(|range| contains(range, mapping));
        let fields = smaps_fields(text, outside).filter(|(_, name, _)| *name == "Rss");
        Bytes(fields.map(|(_, _, bytes)| bytes).sum())
    }

    /// Sums up the mappings of an smaps text within `range`.
    fn parse(text: &str, range: Range<HostVirtAddr>) -> Result<Self, MemoryError> {
        let mut listed = 0;
        let (mut rss, mut huge, mut hugetlb, mut kernel_page_size) = (0, 0, 0, 0);
        for (mapping, name, bytes) in smaps_fields(text, |mapping| contains(&range, mapping)) {
            match name {
                "KernelPageSize" => {
                    listed += mapping.end.0 - mapping.start.0;
                    kernel_page_size = bytes;
                }
                "Rss" => rss += bytes,
                "AnonHugePages" | "ShmemPmdMapped" | "FilePmdMapped" => huge += bytes,
                "Shared_Hugetlb" | "Private_Hugetlb" => hugetlb += bytes,
                _ => {}
            }
        }
        let size = range.end.0 - range.start.0;
        if listed != size {
            return Err(MemoryError::Unexpected(format!(
                "/proc/self/smaps lists {} of {} at {:#x}",
                Bytes(listed),
                Bytes(size),
                range.start.0
            )));
        }
        Ok(Self {
            kernel_page_size: Bytes(kernel_page_size),
            base_pages: Bytes(rss.saturating_sub(huge)),
            small_thp: None,
            thp: Bytes(huge),
            hugetlb: Bytes(hugetlb),
        })
    }
}

fn contains(range: &Range<HostVirtAddr>, mapping: &Range<HostVirtAddr>) -> bool {
    range.start <= mapping.start && mapping.end <= range.end
}

/// Returns mapping, name and bytes of each field of the mappings in an smaps text that `selects` is true
/// for. The fields of other mappings, which are most of the text, are not parsed.
fn smaps_fields(
    text: &str,
    selects: impl Fn(&Range<HostVirtAddr>) -> bool,
) -> impl Iterator<Item = (Range<HostVirtAddr>, &str, u64)> {
    let mut mapping = None;
    text.lines().filter_map(move |line| {
        // Names of fields start with a capital letter, and addresses have small ones.
        if !line.starts_with(|first: char| first.is_ascii_uppercase()) {
            mapping = parse_head_line(line).filter(&selects);
            return None;
        }
        let mapping = mapping.clone()?;
        let (name, value) = line.split_once(':')?;
        Some((mapping, name, parse_kib(value)?))
    })
}

/// Parses the range in the head line of a mapping.
fn parse_head_line(line: &str) -> Option<Range<HostVirtAddr>> {
    let (range, _) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok().map(HostVirtAddr);
    Some(number(start)?..number(end)?)
}

/// Returns the field `name` of a text with lines `NAME: NUMBER kB`.
pub fn kib_field(text: &str, name: &str) -> Option<Bytes> {
    let value = |line: &str| parse_kib(line.strip_prefix(name)?.strip_prefix(':')?);
    text.lines().find_map(value).map(Bytes)
}

/// Parses the value of a field. Returns it in bytes.
fn parse_kib(value: &str) -> Option<u64> {
    let kib: u64 = value.strip_suffix(" kB")?.trim_start().parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
aaaab0000000-aaaab0400000 rw-p 00000000 00:00 0                          [heap]
Size:               4096 kB
KernelPageSize:        4 kB
Rss:                  12 kB
AnonHugePages:         0 kB
VmFlags: rd wr mr mw me ac
ffff80000000-ffff80200000 rw-p 00000000 00:00 0 
KernelPageSize:        4 kB
MMUPageSize:           4 kB
Rss:                2048 kB
AnonHugePages:      2048 kB
ffff80200000-ffff80400000 rw-p 00000000 00:00 0 
KernelPageSize:        4 kB
Rss:                   8 kB
AnonHugePages:         0 kB
THPeligible:    1
ffff90000000-ffff94000000 rw-p 00000000 00:0d 1026         /anon_hugepage (deleted)
KernelPageSize:     2048 kB
Rss:                   0 kB
Shared_Hugetlb:        0 kB
Private_Hugetlb:    8192 kB
";

    fn range(start: u64, end: u64) -> Range<HostVirtAddr> {
        HostVirtAddr(start)..HostVirtAddr(end)
    }

    #[test]
    fn mappings_in_the_range_are_summed_up_by_page_type() {
        for (range, [kernel_page_size, base_pages, thp, hugetlb]) in [
            (range(0xffff_8000_0000, 0xffff_8040_0000), [4 << 10, 8 << 10, 2 << 20, 0]),
            (range(0xffff_9000_0000, 0xffff_9400_0000), [2 << 20, 0, 0, 8 << 20]),
        ] {
            let residency = Residency::parse(SMAPS, range).unwrap();

            let expected = [kernel_page_size, base_pages, thp, hugetlb].map(Bytes);
            let Residency { kernel_page_size, base_pages, thp, hugetlb, .. } = residency;
            assert_eq!([kernel_page_size, base_pages, thp, hugetlb], expected);
        }
        assert_eq!(kib_field(SMAPS, "Private_Hugetlb"), Some(Bytes::mib(8)));
        assert_eq!(kib_field(SMAPS, "SecPageTables"), None);
    }

    #[test]
    fn pages_outside_of_guest_memory_are_counted() {
        let guest = range(0xffff_8000_0000, 0xffff_8020_0000);

        assert_eq!(Residency::parse_outside(SMAPS, &[guest]), Bytes::kib(20));
        assert_eq!(Residency::parse_outside(SMAPS, &[]), Bytes::kib(2068));
    }

    #[test]
    fn a_partially_listed_range_is_an_error() {
        let error = Residency::parse(SMAPS, range(0xffff_8000_0000, 0xffff_8060_0000)).unwrap_err();

        assert!(error.to_string().contains("lists 4M of 6M"), "{error}");
    }
}
