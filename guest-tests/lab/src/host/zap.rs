// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Removal of anonymous memory from the page tables of a process, between marks. PID 1 of the
//! emulated host executes it.

use std::{
    ffi::c_void,
    fmt,
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::Path,
    ptr::{NonNull, null_mut},
};

use clap::ValueEnum;
use granule_types::{mark, phase::Phase, units::Bytes};
use rustix::{
    mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap},
    param::page_size,
};
use serde::{Deserialize, Serialize};

/// Directory with the settings of transparent huge pages.
const THP: &str = "/sys/kernel/mm/transparent_hugepage";
/// Bits of `/proc/kpageflags`.
const COMPOUND_HEAD: u64 = 1 << 15;
const COMPOUND_TAIL: u64 = 1 << 16;
/// Bits of `/proc/self/pagemap`: present, and the mask of the page frame number.
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// System call that removes the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ZapCall {
    /// One `madvise(MADV_DONTNEED)` of all memory
    Dontneed,
    /// `madvise(MADV_DONTNEED)` of each page, in ascending order
    DontneedPage,
    /// One `munmap()` of all memory
    Munmap,
}

impl fmt::Display for ZapCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dontneed => "dontneed",
            Self::DontneedPage => "dontneed-page",
            Self::Munmap => "munmap",
        })
    }
}

/// Memory and the call that removes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Zap {
    pub size: Bytes,
    /// Order of the folios. The process maps them by pages.
    pub order: u32,
    pub call: ZapCall,
}

impl Zap {
    /// Maps the memory, writes each page, and removes it between two marks.
    ///
    /// # Errors
    /// A call fails, or the memory does not consist of folios of this order that are mapped by pages.
    pub fn run(&self) -> io::Result<()> {
        let huge = huge_page()?;
        let size = usize::try_from(self.size.0).map_err(io::Error::other)?;
        let memory = Mapping::new(size.next_multiple_of(huge), huge)?;
        self.populate(&memory, huge)?;
        check_folios(&memory, self.order)?;
        self.remove(&memory)
    }

    fn populate(&self, memory: &Mapping, huge: usize) -> io::Result<()> {
        let folio = page_size() << self.order;
        match folio {
            _ if self.order == 0 => memory.advise(Advice::LinuxNoHugepage)?,
            _ if folio == huge => memory.advise(Advice::LinuxHugepage)?,
            _ => {
                let (own, other) = (size_setting(folio), size_setting(huge));
                fs::write(&other, "never").map_err(|error| no_size(self.order, &error))?;
                fs::write(&own, "always").map_err(|error| no_size(self.order, &error))?;
            }
        }
        memory.write_each_page();
        if folio == huge {
            // khugepaged would map the folios by blocks again.
            memory.advise(Advice::LinuxNoHugepage)?;
            // Another protection of one page splits the block; then the table remains.
            for at in (0..memory.size).step_by(huge) {
                memory.protect_page(at, MprotectFlags::READ)?;
                memory.protect_page(at, MprotectFlags::READ | MprotectFlags::WRITE)?;
            }
        }
        Ok(())
    }

    fn remove(&self, memory: &Mapping) -> io::Result<()> {
        mark::begin_phase(Phase::Step);
        let removed = match self.call {
            ZapCall::Dontneed => memory.advise(Advice::LinuxDontNeed),
            ZapCall::DontneedPage => (0..memory.size)
                .step_by(page_size())
                .try_for_each(|at| memory.advise_page(at, Advice::LinuxDontNeed)),
            // SAFETY: no reference to this memory exists, and `Mapping` does not use it again.
            ZapCall::Munmap => unsafe { munmap(memory.start.as_ptr(), memory.size) },
        };
        mark::end_phase();
        Ok(removed?)
    }
}

fn size_setting(folio: usize) -> String {
    format!("{THP}/hugepages-{}kB/enabled", folio >> 10)
}

fn no_size(order: u32, error: &io::Error) -> io::Error {
    io::Error::other(format!("the kernel has no folios of order {order}: {error}"))
}

fn huge_page() -> io::Result<usize> {
    let path = Path::new(THP).join("hpage_pmd_size");
    let text = fs::read_to_string(&path)
        .map_err(|error| io::Error::other(format!("cannot read {}: {error}", path.display())))?;
    text.trim().parse().map_err(io::Error::other)
}

/// Private anonymous memory, aligned to a huge page.
#[derive(Debug)]
struct Mapping {
    start: NonNull<c_void>,
    size: usize,
}

impl Mapping {
    fn new(size: usize, alignment: usize) -> io::Result<Self> {
        let (length, access) = (size + alignment, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: the kernel chooses unused addresses.
        let start = unsafe { mmap_anonymous(null_mut(), length, access, MapFlags::PRIVATE) }?;
        let offset = start.align_offset(alignment);
        // SAFETY: `offset` is less than `alignment`, so the result is in the mapping.
        let start = unsafe { start.byte_add(offset) };
        let start = NonNull::new(start).ok_or_else(|| io::Error::other("mmap returned 0"))?;
        Ok(Self { start, size })
    }

    /// Returns the address of the byte at this offset.
    fn at(&self, offset: usize) -> *mut c_void {
        debug_assert!(offset < self.size);
        // SAFETY: the offset is in the mapping.
        unsafe { self.start.as_ptr().byte_add(offset) }
    }

    fn write_each_page(&self) {
        for offset in (0..self.size).step_by(page_size()) {
            // SAFETY: the byte is mapped writable, and no reference to it exists.
            unsafe { self.at(offset).cast::<u8>().write_volatile(1) };
        }
    }

    fn advise(&self, advice: Advice) -> rustix::io::Result<()> {
        // SAFETY: the range is this mapping, and no reference to its contents exists.
        unsafe { madvise(self.start.as_ptr(), self.size, advice) }
    }

    fn advise_page(&self, offset: usize, advice: Advice) -> rustix::io::Result<()> {
        // SAFETY: the page is in this mapping, and no reference to its contents exists.
        unsafe { madvise(self.at(offset), page_size(), advice) }
    }

    fn protect_page(&self, offset: usize, protection: MprotectFlags) -> rustix::io::Result<()> {
        // SAFETY: the page is in this mapping, and no reference to its contents exists.
        unsafe { mprotect(self.at(offset), page_size(), protection) }
    }
}

/// Checks that the memory consists of whole folios of an order, which are mapped by pages.
fn check_folios(memory: &Mapping, order: u32) -> io::Result<()> {
    let smaps = fs::read_to_string("/proc/self/smaps")?;
    match blocks_at(&smaps, memory.start.as_ptr() as usize) {
        Some(0) => {}
        Some(blocks) => {
            return Err(io::Error::other(format!("{blocks} kB are mapped by blocks")));
        }
        None => {
            return Err(io::Error::other("/proc/self/smaps has no AnonHugePages of the memory"));
        }
    }
    let pages = memory.size / page_size();
    let mut entries = vec![0; pages * 8];
    let start = memory.start.as_ptr() as usize / page_size();
    File::open("/proc/self/pagemap")?.read_exact_at(&mut entries, start as u64 * 8)?;
    let entries: Vec<u64> = words(&entries).collect();
    let flags = File::open("/proc/kpageflags")?;
    let folio = 1 << order;
    for (index, entries) in entries.chunks(folio).enumerate() {
        let first = entries[0] & FRAME;
        let mut bytes = vec![0; entries.len() * 8];
        flags.read_exact_at(&mut bytes, first * 8)?;
        if !is_folio(entries, &words(&bytes).collect::<Vec<_>>()) {
            return Err(io::Error::other(format!(
                "page {} is not the first one of a folio of order {order}",
                index * folio
            )));
        }
    }
    Ok(())
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word))
}

/// Reports whether entries of `pagemap` map consecutive pages that are one folio, by the flags of
/// these pages.
fn is_folio(entries: &[u64], flags: &[u64]) -> bool {
    let compound = COMPOUND_HEAD | COMPOUND_TAIL;
    let expected = |index| match (entries.len(), index) {
        (1, _) => 0,
        (_, 0) => COMPOUND_HEAD,
        _ => COMPOUND_TAIL,
    };
    let is_mapped = (entries[0] & FRAME..)
        .zip(entries)
        .all(|(frame, entry)| entry & PRESENT != 0 && entry & FRAME == frame);
    is_mapped && flags.iter().enumerate().all(|(index, flags)| flags & compound == expected(index))
}

/// Returns `AnonHugePages` in kB of the area that contains an address.
fn blocks_at(smaps: &str, address: usize) -> Option<u64> {
    let mut is_area = false;
    for line in smaps.lines() {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        if let Some((start, end)) = range
            && let (Ok(start), Ok(end)) =
                (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16))
        {
            is_area = (start..end).contains(&address);
        } else if is_area && let Some(value) = line.strip_prefix("AnonHugePages:") {
            return value.trim().strip_suffix(" kB")?.parse().ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folio_is_consecutive_and_has_a_head_and_tails() {
        let entries = [PRESENT | 8, PRESENT | 9, PRESENT | 10, PRESENT | 11];
        let flags = [COMPOUND_HEAD | 1, COMPOUND_TAIL, COMPOUND_TAIL, COMPOUND_TAIL];

        assert!(is_folio(&entries, &flags));
        assert!(is_folio(&entries[..1], &[1]));
        assert!(!is_folio(&entries[..1], &flags[..1]));
        assert!(!is_folio(&entries, &[flags[0], flags[0], flags[1], flags[1]]));
        assert!(!is_folio(&[PRESENT | 8, PRESENT | 10], &flags[..2]));
        assert!(!is_folio(&[PRESENT | 8, 9], &flags[..2]));
    }

    #[test]
    fn blocks_are_those_of_the_area() {
        let smaps = "1000-3000 rw-p 00000000 00:00 0\nRss: 8 kB\nAnonHugePages:      0 kB\n\
                     200000-400000 rw-p 00000000 00:00 0 [heap]\nAnonHugePages:   2048 kB\n";

        assert_eq!(blocks_at(smaps, 0x2fff), Some(0));
        assert_eq!(blocks_at(smaps, 0x20_0000), Some(2048));
        assert_eq!(blocks_at(smaps, 0x3000), None);
    }
}
