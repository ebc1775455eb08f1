// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest memory, backed by any kind of host memory.
//!
//! A [`BackingPlan`] holds the flags, advice, alignment and checks for a [`Backing`] on a host with
//! certain page sizes ([`HostPages`]). [`GuestRam`] executes it in four steps. Their order is
//! fixed, because no later step can repair an earlier one:
//!
//! 1. **map**: checks the hugetlb pool, reserves address space, and maps the memory (and reserves
//!    hugetlb pages) at an address congruent to the guest address, so that KVM can map blocks;
//! 2. **advise**: requests or forbids transparent huge pages before the first touch, because
//!    populated small pages are not replaced;
//! 3. **populate**, if requested;
//! 4. **verify**: reads the types of the resident pages. Small pages in place of huge ones are an
//!    error.
//!
//! To add a backing, add a variant to `Backing` and resolve the compiler errors: its names in
//! `granule_types::backing`, its page type in [`BackingPlan::new`].

pub mod changes;
mod copy;
mod guest_ram;
mod host_pages;
pub mod image;
pub mod layers;
mod mapped_reader;
mod mapping;
pub mod on_demand;
mod page_set;
mod pagemap;
mod parts;
mod plan;
mod residency;
mod threads;
pub mod user_faults;

pub use guest_ram::{GuestMap, GuestMemory, GuestRam, RamOptions, has_node};
pub use host_pages::{HostPages, HugetlbPool};
pub use mapped_reader::MappedReader;
pub use page_set::PageSet;
pub use pagemap::PageMap;
pub use plan::BackingPlan;
pub use residency::{Residency, Smaps, kib_field};

pub(crate) use host_pages::base_page_size;
use host_pages::block_size;
use std::{io, path::PathBuf};

use granule_types::{backing::Backing, units::Bytes};
use thiserror::Error;

use plan::PageType;

/// Error returned when guest memory is not available as requested.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// Error returned when the host lacks the pages or the NUMA node, or has too few of the pages.
    #[error("{0}")]
    Unavailable(String),
    /// Error returned when the size, the addresses or the backing are not valid for the request.
    #[error("{0}")]
    Invalid(String),
    /// Error returned when the kernel maps pages of another type or too few, or reports bad values.
    #[error("{0}")]
    Unexpected(String),
    /// Error returned when the kernel cannot collapse pages.
    #[error("this host's kernel lacks MADV_COLLAPSE: boot Linux 6.1 or later")]
    CollapseUnsupported,
    /// Error returned when a file of the host cannot be read.
    #[error("cannot read {path}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// Error returned when the file with the contents of guest memory cannot be used.
    #[error("the image of guest memory cannot be {operation}")]
    Image {
        /// Purpose of the access: `read`, `written`.
        operation: &'static str,
        /// The error.
        source: io::Error,
    },
    /// Error of a system call.
    #[error("{operation} failed for {size} of {backing}")]
    Call {
        /// Purpose of the call.
        operation: &'static str,
        /// Size of the memory.
        size: Bytes,
        /// Backing of the memory.
        backing: Backing,
        /// Error of the kernel.
        source: io::Error,
    },
}

#[cfg(test)]
mod tests {
    //! Tests of each backing. Backings that the host lacks are skipped.

    use std::{collections::BTreeMap, sync::Arc};

    use granule_types::{
        testing::skip,
        units::{Bytes, GuestAddress},
    };
    use rustix::mm::{Advice, madvise};
    use vm_memory::{Bytes as _, GuestMemoryBackend as _};

    use super::*;

    const GUEST_START: GuestAddress = GuestAddress(0xffff_c000_0000);

    /// Returns a region of `pages` pages, or skips the backing if the host lacks it.
    fn ram(name: &str, pages: u64, prefault: bool) -> Option<Arc<GuestRam>> {
        let host = HostPages::of_this_host().unwrap();
        let ram = BackingPlan::new(name.parse().unwrap(), &host).and_then(|plan| {
            let size = Bytes(plan.page_size().0 * pages);
            let options = RamOptions { prefault, ..RamOptions::default() };
            GuestRam::new(plan, &host, GUEST_START, size, options)
        });
        match ram {
            Ok(ram) => Some(ram),
            Err(error @ MemoryError::Unavailable(_)) => {
                skip(format_args!("{name}: {error}"));
                None
            }
            Err(error) => panic!("{name}: {error}: {:?}", std::error::Error::source(&error)),
        }
    }

    fn check_touch_drop_and_restore(name: &str, pages: u64) {
        for prefault in [false, true] {
            let Some(ram) = ram(name, pages, prefault) else {
                return;
            };
            let memory = GuestMemory::new(vec![Arc::clone(&ram)]).unwrap();
            let (page, size) = (ram.plan().page_size().0, ram.size().0);
            let resident = |populated: bool| {
                let expected = BTreeMap::from_iter(populated.then_some((page, size)));
                assert_eq!(ram.checked_resident_pages().unwrap().resident_bytes, expected);
            };
            assert_eq!(ram.host_address().0 % page, GUEST_START.0 % page, "congruent");
            resident(prefault);

            for offset in (0..size).step_by(usize::try_from(page).unwrap()) {
                let address = GuestAddress(GUEST_START.0 + offset);
                memory.map().write_obj(offset | 1, address).unwrap();
            }
            resident(true);
            ram.drop_backing().unwrap();
            resident(false);

            ram.restore_backing().unwrap();
            resident(prefault);
            let value: u64 = memory.map().read_obj(GuestAddress(GUEST_START.0 + page)).unwrap();
            assert_eq!(value, 0, "contents are dropped");
        }
    }

    fn check_clear(name: &str, pages: u64) {
        for prefault in [false, true] {
            let Some(ram) = ram(name, pages, prefault) else {
                return;
            };
            let memory = GuestMemory::new(vec![Arc::clone(&ram)]).unwrap();
            let (page, size) = (ram.plan().page_size().0, ram.size().0);
            let second = GuestAddress(GUEST_START.0 + page);
            memory.map().write_obj(u64::MAX, second).unwrap();
            let last = GuestAddress(GUEST_START.0 + 2 * page - 8);
            memory.map().write_obj(u64::MAX, last).unwrap();

            memory.clear().unwrap();

            let kept = if ram.plan().is_hugetlb() { page } else { 0 };
            let expected = if prefault { size } else { kept };
            let resident = ram.checked_resident_pages().unwrap().resident_bytes;
            assert_eq!(resident.values().sum::<u64>(), expected, "{name}");
            for address in [second, last] {
                assert_eq!(memory.map().read_obj::<u64>(address).unwrap(), 0, "{name}");
            }
        }
    }

    #[test]
    fn base_and_transparent_backings_are_cleared() {
        for (name, pages) in [("anonymous", 1024), ("shmem", 1024), ("anonymous_thp", 4)] {
            check_clear(name, pages);
        }
    }

    #[test]
    fn a_huge_page_that_was_split_is_whole_after_a_reset() {
        let Some(ram) = ram("anonymous_thp", 2, true) else {
            return;
        };
        let memory = GuestMemory::new(vec![Arc::clone(&ram)]).unwrap();
        // khugepaged could collapse the split page before it is read.
        advise(&memory, ram.size(), Advice::LinuxNoHugepage);
        assert_eq!(memory.discard(GUEST_START, Bytes::kib(4)), Bytes::kib(4));
        assert!(ram.checked_resident_pages().is_err(), "split");
        advise(&memory, ram.size(), Advice::LinuxHugepage);

        memory.clear().unwrap();

        let resident = ram.checked_resident_pages().unwrap().resident_bytes;
        assert_eq!(resident, [(ram.plan().page_size().0, ram.size().0)].into());
    }

    #[test]
    fn base_and_transparent_backings_are_touched_dropped_and_restored() {
        for (name, pages) in [("anonymous", 1024), ("shmem", 1024), ("anonymous_thp", 4)] {
            check_touch_drop_and_restore(name, pages);
        }
    }

    /// Tests all hugetlb backings in one thread, because they share the pool.
    #[test]
    fn hugetlb_backings_are_touched_dropped_and_restored_and_cleared() {
        for name in ["anonymous_hugetlb", "anonymous_hugetlb_1gb", "shared_hugetlb"] {
            check_touch_drop_and_restore(name, 2);
            check_clear(name, 2);
        }
    }

    fn advise(memory: &GuestMemory, size: Bytes, advice: Advice) {
        let address = memory.map().get_host_address(GUEST_START).unwrap();
        // SAFETY: `memory` owns the range, and the advice does not change its contents.
        unsafe { madvise(address.cast(), usize::try_from(size.0).unwrap(), advice) }.unwrap();
    }

    #[test]
    fn a_split_huge_page_is_an_error_and_can_be_collapsed() {
        let Some(ram) = ram("anonymous_thp", 2, true) else {
            return;
        };
        let memory = GuestMemory::new(vec![Arc::clone(&ram)]).unwrap();
        let (huge, base) = (ram.plan().page_size(), ram.plan().base_page_size());
        // khugepaged could collapse the split page before it is read.
        advise(&memory, ram.size(), Advice::LinuxNoHugepage);

        assert_eq!(memory.discard(GUEST_START, base), base);

        let error = ram.checked_resident_pages().unwrap_err();
        assert!(error.to_string().contains("are in small pages"), "{error}");
        let split = ram.resident_pages().unwrap().resident_bytes;
        assert_eq!(split, [(base.0, huge.0 - base.0), (huge.0, huge.0)].into());
        // MADV_COLLAPSE refuses memory without huge pages.
        advise(&memory, ram.size(), Advice::LinuxHugepage);
        let whole = BTreeMap::from([(huge.0, 2 * huge.0)]);
        match ram.collapse(&|| true) {
            Err(error @ MemoryError::CollapseUnsupported) => skip(error),
            collapsed => assert_eq!(collapsed.unwrap().resident_bytes, whole),
        }
    }

    #[test]
    fn memory_in_use_is_populated_and_keeps_its_contents() {
        let Some(ram) = ram("anonymous", 64, false) else {
            return;
        };
        let memory = GuestMemory::new(vec![Arc::clone(&ram)]).unwrap();
        let page = ram.plan().page_size();
        memory.map().write_obj(7_u64, GUEST_START).unwrap();

        match ram.populate_in_use(GUEST_START, Bytes(32 * page.0)) {
            Err(MemoryError::Call { source, .. })
                if source.raw_os_error() == Some(libc::EINVAL) =>
            {
                skip("the kernel lacks MADV_POPULATE_WRITE");
            }
            populated => {
                populated.unwrap();
                let resident = ram.checked_resident_pages().unwrap().resident_bytes;
                assert_eq!(resident, [(page.0, 32 * page.0)].into());
            }
        }
        let value: u64 = memory.map().read_obj(GUEST_START).unwrap();
        assert_eq!(value, 7);
        let beyond = ram.populate_in_use(GUEST_START, Bytes(65 * page.0));
        assert!(matches!(beyond, Err(MemoryError::Invalid(_))), "{beyond:?}");
    }

    #[test]
    fn other_backings_cannot_be_collapsed() {
        let ram = ram("anonymous", 4, true).unwrap();

        let error = ram.collapse(&|| true).unwrap_err();

        assert!(error.to_string().contains("anonymous_thp"), "{error}");
    }

    #[test]
    fn overlapping_regions_are_refused() {
        let rams = [0, 1].map(|_| ram("anonymous", 2, false).unwrap());

        let error = GuestMemory::new(rams.into()).unwrap_err();

        assert!(error.to_string().contains("intersect"), "{error}");
    }

    #[test]
    fn a_size_that_is_not_a_multiple_of_the_page_is_refused() {
        let host = HostPages::of_this_host().unwrap();
        let plan = BackingPlan::new("anonymous".parse().unwrap(), &host).unwrap();

        let error =
            GuestRam::new(plan, &host, GUEST_START, Bytes(1), RamOptions::default()).unwrap_err();

        assert!(error.to_string().contains("is not a multiple of 4K"), "{error}");
    }
}
