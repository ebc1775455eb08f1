// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's memory: the state of each page. `host_faults` changes it.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, HashMap},
};

use granule_stage2::{Ipa, PhysAddr, fault::Page};

use crate::software_machine::{PAGE, SoftwareMachineError, page_size};
use granule_types::backing::Backing;

/// Size of a transparent huge page.
pub(super) const HUGE: u64 = 2 << 20;
/// Host address of zero pages, a multiple of 2M.
const ZERO: u64 = 1 << 43;
/// Host address of all other pages, a multiple of 1G.
const PRIVATE: u64 = 1 << 44;

/// Allocation of pages by the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PageAllocation {
    /// Base pages.
    Base,
    /// Transparent huge pages.
    Transparent,
    /// Pages of this size, which the first fault zeroes while others wait: hugetlb, shared memory.
    Fixed(u64),
}

impl PageAllocation {
    /// Returns the allocation of a backing's pages.
    pub(super) fn of(backing: Backing) -> Result<Self, SoftwareMachineError> {
        match backing {
            Backing::Anonymous => Ok(Self::Base),
            Backing::AnonymousThp => Ok(Self::Transparent),
            Backing::Shmem | Backing::AnonymousHugetlb(_) | Backing::SharedHugetlb => {
                page_size(backing).map(Self::Fixed)
            }
        }
    }
}

/// State of a page in the host's page table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PageState {
    /// Not mapped.
    Absent,
    /// The zero page.
    Zero,
    /// A page of the process's own.
    Private,
    /// As `Private`, but protected by NUMA balancing: the next access faults.
    NumaProtected,
    /// A huge page that is split into base pages.
    Split,
}

fn is_private(state: PageState) -> bool {
    matches!(state, PageState::Private | PageState::NumaProtected)
}

/// The memory under test.
#[derive(Debug)]
pub(super) struct HostMemory {
    pub(super) allocation: PageAllocation,
    start: u64,
    size: u64,
    /// States of base pages; empty for [`PageAllocation::Fixed`].
    pub(super) small: Vec<Cell<PageState>>,
    /// States of the backing's pages; empty for [`PageAllocation::Base`].
    pub(super) large: Vec<Cell<PageState>>,
    /// Pages of the backing that are being zeroed, with the processes that wait for them.
    pub(super) zeroing: RefCell<HashMap<usize, Vec<usize>>>,
    /// Number of invalidations, as `mmu_invalidate_seq`.
    pub(super) sequence: Cell<u64>,
    /// Number of invalidations in progress, as `mmu_invalidate_in_progress`.
    pub(super) invalidating: Cell<u64>,
}

/// Returns the state of the page at an offset.
pub(super) fn at(states: &[Cell<PageState>], offset: u64, page: u64) -> &Cell<PageState> {
    &states[usize::try_from(offset / page).unwrap_or(usize::MAX)]
}

impl HostMemory {
    /// Returns untouched memory.
    pub(super) fn new(allocation: PageAllocation, start: u64, size: u64) -> Self {
        let untouched = |page| {
            let count = usize::try_from(size / page).unwrap_or(usize::MAX);
            vec![Cell::new(PageState::Absent); count]
        };
        Self {
            allocation,
            start,
            size,
            small: match allocation {
                PageAllocation::Fixed(_) => Vec::new(),
                _ => untouched(PAGE),
            },
            large: match allocation {
                PageAllocation::Base => Vec::new(),
                PageAllocation::Transparent => untouched(HUGE),
                PageAllocation::Fixed(page) => untouched(page),
            },
            zeroing: RefCell::default(),
            sequence: Cell::new(0),
            invalidating: Cell::new(0),
        }
    }

    pub(super) const fn start(&self) -> u64 {
        self.start
    }

    pub(super) const fn size(&self) -> u64 {
        self.size
    }

    /// Returns the size of the backing's pages.
    pub(super) const fn page(&self) -> u64 {
        match self.allocation {
            PageAllocation::Base => PAGE,
            PageAllocation::Transparent => HUGE,
            PageAllocation::Fixed(page) => page,
        }
    }

    /// Discards all pages.
    pub(super) fn forget(&self) {
        let pages = self.small.iter().chain(&self.large);
        pages.for_each(|page| page.set(PageState::Absent));
        self.sequence.set(self.sequence.get() + 1);
    }

    /// Populates every page.
    pub(super) fn populate(&self) {
        let pages = match self.allocation {
            PageAllocation::Base => &self.small,
            _ => &self.large,
        };
        pages.iter().for_each(|page| page.set(PageState::Private));
    }

    /// Returns the resident bytes by page size; zero pages do not count.
    pub(super) fn resident(&self) -> BTreeMap<u64, u64> {
        let mut resident = BTreeMap::new();
        let mut add = |states: &[Cell<PageState>], page: u64| {
            let count = states.iter().filter(|s| is_private(s.get())).count() as u64;
            if count > 0 {
                resident.insert(page, count * page);
            }
        };
        add(&self.small, PAGE);
        add(&self.large, self.page());
        resident
    }

    /// Returns state and size of the page at an offset.
    pub(super) fn mapped(&self, offset: u64) -> (PageState, u64) {
        match self.allocation {
            PageAllocation::Base => (at(&self.small, offset, PAGE).get(), PAGE),
            PageAllocation::Transparent => match at(&self.large, offset, HUGE).get() {
                PageState::Split => (at(&self.small, offset, PAGE).get(), PAGE),
                state => (state, HUGE),
            },
            PageAllocation::Fixed(page) => (at(&self.large, offset, page).get(), page),
        }
    }

    /// Returns the page at an offset if it is mapped with sufficient permissions.
    pub(super) fn page_at(&self, offset: u64, writes: bool) -> Option<Page> {
        let (state, size) = self.mapped(offset);
        let base = offset & !(size - 1);
        let page =
            |phys, writable| Some(Page { ipa: Ipa(self.start + base), phys, size, writable });
        match state {
            PageState::Private => page(PhysAddr(PRIVATE + base), true),
            PageState::Zero if !writes => page(PhysAddr(ZERO), false),
            _ => None,
        }
    }

    /// Returns the host address of an offset, if a page is mapped.
    pub(super) fn phys(&self, offset: u64) -> Option<u64> {
        match self.mapped(offset) {
            (PageState::Private | PageState::NumaProtected, _) => Some(PRIVATE + offset),
            (PageState::Zero, size) => Some(ZERO + (offset & (size - 1))),
            _ => None,
        }
    }

    /// Protects the private pages of a range for NUMA balancing, after stage 2 is unmapped. Zero pages
    /// and hugetlb stay, as in `change_prot_numa()`.
    pub(super) fn numa_protect(&self, offset: u64, size: u64) {
        let protect = |states: &[Cell<PageState>], page: u64| {
            let range = offset / page..(offset + size).div_ceil(page);
            let count = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
            let first = usize::try_from(range.start).unwrap_or(usize::MAX);
            let pages = states.iter().skip(first).take(count);
            pages
                .filter(|state| state.get() == PageState::Private)
                .for_each(|state| state.set(PageState::NumaProtected));
        };
        match self.allocation {
            PageAllocation::Base => protect(&self.small, PAGE),
            PageAllocation::Transparent => {
                protect(&self.small, PAGE);
                protect(&self.large, HUGE);
            }
            PageAllocation::Fixed(_) => {}
        }
    }
}
