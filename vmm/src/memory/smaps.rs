// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the kernel says is mapped in a range: `/proc/self/smaps` (proc(5)).
//!
//! The file lists each mapping as a head line `start-end perms offset device inode path` and then
//! one line a field, `Name: number kB`. `Rss` counts small and transparent huge pages and leaves
//! hugetlb out; `AnonHugePages`, `ShmemPmdMapped` and `FilePmdMapped` count the part of it mapped
//! by one entry a huge page. The huge zero page counts nowhere.

use std::{fs, ops::Range, path::PathBuf};

use granule_types::units::Bytes;

use super::MemoryError;

/// What is resident in a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Residency {
    /// The page size of the mapping itself: the base page, or hugetlb's.
    pub kernel_page: Bytes,
    /// Mapped by base pages.
    pub small: Bytes,
    /// Mapped by transparent huge pages.
    pub huge: Bytes,
    /// Mapped by hugetlb pages.
    pub hugetlb: Bytes,
}

impl Residency {
    /// Everything resident.
    pub const fn resident(&self) -> Bytes {
        Bytes(self.small.0 + self.huge.0 + self.hugetlb.0)
    }

    /// Reads what is resident in this process at `range`, which holds whole mappings.
    ///
    /// # Errors
    /// The file cannot be read, or does not list the whole range.
    pub fn of_range(range: Range<u64>) -> Result<Self, MemoryError> {
        let path = PathBuf::from("/proc/self/smaps");
        match fs::read_to_string(&path) {
            Ok(text) => Self::parse(&text, range),
            Err(source) => Err(MemoryError::Read { path, source }),
        }
    }

    /// Bytes of this process that are resident and lie in none of `ranges`, hugetlb aside; `None`
    /// where the kernel does not tell.
    pub fn outside(ranges: &[Range<u64>]) -> Option<Bytes> {
        let text = fs::read_to_string("/proc/self/smaps").ok()?;
        Some(Self::parse_outside(&text, ranges))
    }

    fn parse_outside(text: &str, ranges: &[Range<u64>]) -> Bytes {
        let mut outside = false;
        let mut bytes = 0;
        for line in text.lines() {
            if let Some(mapping) = head(line) {
                let within =
                    |range: &Range<u64>| range.start <= mapping.start && mapping.end <= range.end;
                outside = !ranges.iter().any(within);
            } else if let (true, Some(("Rss", resident))) = (outside, field(line)) {
                bytes += resident;
            }
        }
        Bytes(bytes)
    }

    /// Sums up the mappings of an smaps text that lie in `range`.
    ///
    /// # Errors
    /// [`MemoryError::NotListed`]: the text does not list the whole range.
    pub fn parse(text: &str, range: Range<u64>) -> Result<Self, MemoryError> {
        let mut inside = false;
        let mut listed = 0;
        let (mut rss, mut huge, mut hugetlb, mut kernel_page) = (0, 0, 0, 0);
        for line in text.lines() {
            if let Some(mapping) = head(line) {
                inside = range.start <= mapping.start && mapping.end <= range.end;
                if inside {
                    listed += mapping.end - mapping.start;
                }
                continue;
            }
            if !inside {
                continue;
            }
            let Some((name, bytes)) = field(line) else {
                continue;
            };
            match name {
                "KernelPageSize" => kernel_page = bytes,
                "Rss" => rss += bytes,
                "AnonHugePages" | "ShmemPmdMapped" | "FilePmdMapped" => huge += bytes,
                "Shared_Hugetlb" | "Private_Hugetlb" => hugetlb += bytes,
                _ => {}
            }
        }
        let size = range.end - range.start;
        if listed != size {
            return Err(MemoryError::NotListed {
                address: range.start,
                size: Bytes(size),
                listed: Bytes(listed),
            });
        }
        Ok(Self {
            kernel_page: Bytes(kernel_page),
            small: Bytes(rss.saturating_sub(huge)),
            huge: Bytes(huge),
            hugetlb: Bytes(hugetlb),
        })
    }
}

/// The range in a mapping's head line.
fn head(line: &str) -> Option<Range<u64>> {
    let (range, _) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some(number(start)?..number(end)?)
}

/// The name and the bytes in a field's line.
fn field(line: &str) -> Option<(&str, u64)> {
    let (name, value) = line.split_once(':')?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some((name, kib << 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
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

    #[test]
    fn mappings_in_the_range_are_summed_up_and_others_left_out() {
        let usage = Residency::parse(TEXT, 0xffff_8000_0000..0xffff_8040_0000).unwrap();

        assert_eq!(usage.kernel_page, Bytes::kib(4));
        assert_eq!(usage.huge, Bytes::mib(2));
        assert_eq!(usage.small, Bytes::kib(8));
    }

    #[test]
    fn hugetlb_is_counted_apart() {
        let usage = Residency::parse(TEXT, 0xffff_9000_0000..0xffff_9400_0000).unwrap();

        assert_eq!(usage.kernel_page, Bytes::mib(2));
        assert_eq!(usage.resident(), Bytes::mib(8));
        assert_eq!(usage.small, Bytes(0));
    }

    #[test]
    fn what_lies_outside_guest_memory_is_counted() {
        let guest = 0xffff_8000_0000..0xffff_8020_0000;

        assert_eq!(Residency::parse_outside(TEXT, &[guest]), Bytes::kib(20));
        assert_eq!(Residency::parse_outside(TEXT, &[]), Bytes::kib(2068));
    }

    #[test]
    fn a_range_not_listed_whole_is_an_error() {
        let error = Residency::parse(TEXT, 0xffff_8000_0000..0xffff_8060_0000).unwrap_err();

        assert!(error.to_string().contains("lists 4M of 6M"), "{error}");
    }
}
