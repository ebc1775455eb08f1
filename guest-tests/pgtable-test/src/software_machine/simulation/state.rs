// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! State of a simulated machine: memory system, and the host's pages, which `host_faults` changes.
//!
//! A resource that one CPU at a time can use has a time until which it is busy: the path to memory
//! ([`VirtualTime::transfer`]), which carries a number of bytes per nanosecond for all CPUs
//! together, and the cache line of the host's mmap lock ([`VirtualTime::shared_line`]), which one
//! CPU at a time can write.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, HashMap},
};

use granule_stage2::{Ipa, PhysAddr, fault::Page};

use super::{
    cost::{Prices, picoseconds},
    virtual_time::{self, Picoseconds},
};
use crate::software_machine::{PAGE, START, SoftwareMachineError, machine::index, page_size};
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
    /// A private page of the process.
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
    pub(super) size: u64,
    /// States of base pages; empty for [`PageAllocation::Fixed`].
    pub(super) small: Vec<Cell<PageState>>,
    /// States of the backing's pages; empty for [`PageAllocation::Base`].
    pub(super) large: Vec<Cell<PageState>>,
    /// Pages of the backing that are being zeroed, with the processes that wait for them.
    pub(super) zeroing: RefCell<HashMap<u64, Vec<usize>>>,
}

/// Returns the state of the page at an offset.
pub(super) fn at(states: &[Cell<PageState>], offset: u64, page: u64) -> &Cell<PageState> {
    &states[index(offset / page)]
}

impl HostMemory {
    /// Returns untouched memory.
    pub(super) fn new(allocation: PageAllocation, size: u64) -> Self {
        let untouched = |page| vec![Cell::new(PageState::Absent); index(size / page)];
        Self {
            allocation,
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
        }
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
        let page = |phys, writable| Some(Page { ipa: Ipa(START + base), phys, size, writable });
        match state {
            PageState::Private => page(PhysAddr(PRIVATE + base), true),
            PageState::Zero if !writes => page(PhysAddr(ZERO), false),
            _ => None,
        }
    }

    /// Returns the host address of an offset, if a page is mapped.
    pub(super) fn phys(&self, offset: u64) -> Option<PhysAddr> {
        match self.mapped(offset) {
            (state, _) if is_private(state) => Some(PhysAddr(PRIVATE + offset)),
            (PageState::Zero, size) => Some(PhysAddr(ZERO + (offset & (size - 1)))),
            _ => None,
        }
    }

    /// Protects the private pages of a range for NUMA balancing, after stage 2 is unmapped. Zero
    /// pages and hugetlb stay, as in `change_prot_numa()`.
    pub(super) fn numa_protect(&self, offset: u64, size: u64) {
        if matches!(self.allocation, PageAllocation::Fixed(_)) {
            return;
        }
        for (states, page) in [(&self.small, PAGE), (&self.large, HUGE)] {
            let pages = (0..).step_by(index(page)).zip(states);
            let inside = pages.filter(|(at, _)| at + page > offset && *at < offset + size);
            let private = inside.filter(|(_, state)| state.get() == PageState::Private);
            private.for_each(|(_, state)| state.set(PageState::NumaProtected));
        }
    }
}

/// Size of the pieces of a long transfer, so that CPUs share the path to memory.
const PIECE: u64 = 256 << 10;

/// Time and memory of a simulated machine.
#[derive(Debug)]
pub struct VirtualTime {
    pub(super) prices: Prices,
    pub(super) host: HostMemory,
    /// `true` if the host populates the memory before each iteration.
    pub(super) prefault: bool,
    /// Written words by host address; all others read as zero.
    pub(super) contents: RefCell<HashMap<u64, u64>>,
    /// Number of invalidations by the host.
    pub(super) invalidations: Cell<u64>,
    /// Number of vCPUs that execute a task.
    pub(super) working: Cell<usize>,
    /// Time at which the next tasks start.
    pub(super) time: Cell<Picoseconds>,
    /// Number of executions of tasks.
    pub(super) runs: Cell<u64>,
    /// Offset of the next scan of NUMA balancing.
    pub(super) scanned: Cell<u64>,
    memory_free: Cell<Picoseconds>,
    line_free: Cell<Picoseconds>,
}

impl VirtualTime {
    pub(super) fn new(prices: Prices, host: HostMemory, prefault: bool) -> Self {
        Self {
            prices,
            host,
            prefault,
            contents: RefCell::default(),
            invalidations: Cell::new(0),
            working: Cell::new(0),
            time: Cell::new(0),
            runs: Cell::new(0),
            scanned: Cell::new(0),
            memory_free: Cell::new(0),
            line_free: Cell::new(0),
        }
    }

    /// Zeroes memory.
    #[expect(clippy::cast_precision_loss, reason = "the number of bytes is below 2^53")]
    pub(super) fn zero(&self, bytes: u64) {
        let alone = picoseconds(bytes as f64 / self.prices.zero_rate);
        self.transfer(bytes, alone);
    }

    /// Moves bytes to memory, which takes one CPU `alone`, or longer where other CPUs use the path.
    #[expect(clippy::cast_precision_loss, reason = "the number of bytes is below 2^53")]
    pub(super) fn transfer(&self, bytes: u64, alone: Picoseconds) {
        let pieces = bytes.div_ceil(PIECE).max(1);
        for piece in 0..pieces {
            // The last piece takes the remainder of the division.
            let part = |whole: u64| match piece + 1 == pieces {
                true => whole - whole / pieces * (pieces - 1),
                false => whole / pieces,
            };
            let carried = picoseconds(part(bytes) as f64 / self.prices.memory_rate);
            let start = virtual_time::now().max(self.memory_free.get());
            self.memory_free.set(start + carried);
            virtual_time::spend_until((virtual_time::now() + part(alone)).max(start + carried));
        }
    }

    /// Writes the cache line of the host's mmap lock.
    pub(super) fn shared_line(&self) {
        let start = virtual_time::now().max(self.line_free.get());
        let end = start + self.prices.shared_line;
        self.line_free.set(end);
        virtual_time::spend_until(end);
    }
}
