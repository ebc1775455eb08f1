// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's memory: which pages are there, and what it takes to get one.
//!
//! As Linux does it (5.8 to 6.12), because on small and transparent huge pages this decides how often
//! a page faults:
//!
//! - **Anonymous**: a read of an untouched page maps the zero page; a write maps a page of one's own,
//!   zeroed *before* it is known whether another CPU was faster. A write to the zero page copies:
//!   zero a page, tell the hypervisor to unmap the old one, then look whether it is still to be done.
//! - **Transparent huge pages**: the same with 2M, but a write to the huge zero page splits it into
//!   512 small zero pages (`do_huge_pmd_wp_page()`), so that only 4K of the block become one's own.
//! - **hugetlb, shared memory**: the first to fault zeroes the page, the others wait for it.
//!
//! While the hypervisor is being told (between `invalidate_range_start` and `_end`), no fault maps
//! anything.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, HashMap},
};

use granule_stage2::{
    Access, Ipa, MapError, PhysAddr, Stage2,
    fault::{Host, Page},
};

use super::{clock, operations::CpuOperations, world::World};

pub(super) const SMALL: u64 = 4096;
const HUGE: u64 = 2 << 20;
const HUGE_STEP: usize = 2 << 20;
/// Where zero pages lie: a multiple of 2M.
const ZERO: u64 = 1 << 43;
/// Where all others do: a multiple of 1G.
const OWN: u64 = 1 << 44;

/// How the host gives memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Small anonymous pages.
    Anonymous,
    /// Transparent huge pages.
    Transparent,
    /// Pages of this size that the first to fault zeroes for all.
    Whole(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Absent,
    Zero,
    Own,
    /// One's own, but the next access faults in the host, to tell where it comes from.
    Watched,
    /// A huge page's place that holds small ones.
    Split,
}

fn is_own(state: State) -> bool {
    matches!(state, State::Own | State::Watched)
}

/// The memory under test as the host has it.
#[derive(Debug)]
pub(super) struct HostMemory {
    kind: Kind,
    start: u64,
    size: u64,
    /// By 4K; not for [`Kind::Whole`].
    small: Vec<Cell<State>>,
    /// By the backing's page; not for [`Kind::Anonymous`].
    large: Vec<Cell<State>>,
    /// Pages being zeroed, and who waits for them.
    busy: RefCell<HashMap<usize, Vec<usize>>>,
    sequence: Cell<u64>,
    invalidating: Cell<u64>,
}

fn at(states: &[Cell<State>], offset: u64, page: u64) -> &Cell<State> {
    &states[usize::try_from(offset / page).unwrap_or(usize::MAX)]
}

impl HostMemory {
    /// Untouched memory.
    pub(super) fn new(kind: Kind, start: u64, size: u64) -> Self {
        let untouched = |page| {
            let count = usize::try_from(size / page).unwrap_or(usize::MAX);
            vec![Cell::new(State::Absent); count]
        };
        Self {
            kind,
            start,
            size,
            small: match kind {
                Kind::Whole(_) => Vec::new(),
                _ => untouched(SMALL),
            },
            large: match kind {
                Kind::Anonymous => Vec::new(),
                Kind::Transparent => untouched(HUGE),
                Kind::Whole(page) => untouched(page),
            },
            busy: RefCell::default(),
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

    /// The largest page that there may be.
    pub(super) const fn page(&self) -> u64 {
        match self.kind {
            Kind::Anonymous => SMALL,
            Kind::Transparent => HUGE,
            Kind::Whole(page) => page,
        }
    }

    pub(super) fn forget(&self) {
        self.small.iter().for_each(|page| page.set(State::Absent));
        self.large.iter().for_each(|page| page.set(State::Absent));
        self.sequence.set(self.sequence.get() + 1);
    }

    /// Has every page be there.
    pub(super) fn populate(&self) {
        match self.kind {
            Kind::Anonymous => self.small.iter().for_each(|page| page.set(State::Own)),
            _ => self.large.iter().for_each(|page| page.set(State::Own)),
        }
    }

    /// Bytes by the size of the pages they are in; zero pages are none.
    pub(super) fn resident(&self) -> BTreeMap<u64, u64> {
        let mut resident = BTreeMap::new();
        let mut add = |states: &[Cell<State>], page: u64| {
            let count = states.iter().filter(|s| is_own(s.get())).count() as u64;
            if count > 0 {
                resident.insert(page, count * page);
            }
        };
        add(&self.small, SMALL);
        add(&self.large, self.page());
        resident
    }

    /// What is mapped there, and whether the pages are one's own.
    fn mapped(&self, offset: u64) -> (State, u64) {
        match self.kind {
            Kind::Anonymous => (at(&self.small, offset, SMALL).get(), SMALL),
            Kind::Transparent => match at(&self.large, offset, HUGE).get() {
                State::Split => (at(&self.small, offset, SMALL).get(), SMALL),
                state => (state, HUGE),
            },
            Kind::Whole(page) => (at(&self.large, offset, page).get(), page),
        }
    }

    /// The page at an offset, if it will do for the access.
    fn found(&self, offset: u64, writes: bool) -> Option<Page> {
        let (state, size) = self.mapped(offset);
        let base = offset & !(size - 1);
        let page = |phys, writable| {
            Some(Page {
                ipa: Ipa(self.start + base),
                phys,
                size,
                writable,
            })
        };
        match state {
            State::Own => page(PhysAddr(OWN + base), true),
            State::Zero if !writes => page(PhysAddr(ZERO), false),
            _ => None,
        }
    }

    /// Has the hypervisor put blocks together again where the host's memory is in one piece.
    pub(super) fn recover(&self, table: &mut Stage2, ops: &CpuOperations) -> Result<(), MapError> {
        let split = self.large.iter().any(|page| page.get() == State::Split);
        if !split {
            return table.recover_blocks(ops, Ipa(self.start), self.size, self.page());
        }
        for (block, ipa) in self.large.iter().zip((self.start..).step_by(HUGE_STEP)) {
            if block.get() == State::Own {
                table.recover_blocks(ops, Ipa(ipa), HUGE, HUGE)?;
            }
        }
        Ok(())
    }

    /// The host address behind an offset, where something is.
    pub(super) fn phys(&self, offset: u64) -> Option<u64> {
        match self.mapped(offset) {
            (State::Own | State::Watched, _) => Some(OWN + offset),
            (State::Zero, size) => Some(ZERO + (offset & (size - 1))),
            _ => None,
        }
    }

    /// Watches pages of one's own from an offset on, which wraps; zero pages and hugetlb are left
    /// alone, as `change_prot_numa()` leaves them. The hypervisor has let go of the range.
    fn watch(&self, offset: u64, size: u64) {
        let watch = |states: &[Cell<State>], page: u64| {
            let range = offset / page..(offset + size).div_ceil(page);
            let count = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
            let first = usize::try_from(range.start).unwrap_or(usize::MAX);
            let own = states.iter().skip(first).take(count);
            own.filter(|state| state.get() == State::Own)
                .for_each(|state| state.set(State::Watched));
        };
        match self.kind {
            Kind::Anonymous => watch(&self.small, SMALL),
            Kind::Transparent => {
                watch(&self.small, SMALL);
                watch(&self.large, HUGE);
            }
            Kind::Whole(_) => {}
        }
    }
}

/// The host's side of one fault.
pub(super) struct FaultHost<'a> {
    world: &'a World,
    /// What the host's memory management does on this CPU.
    ops: &'a CpuOperations,
    asked: Cell<bool>,
}

impl<'a> FaultHost<'a> {
    pub(super) const fn new(world: &'a World, ops: &'a CpuOperations) -> Self {
        Self {
            world,
            ops,
            asked: Cell::new(false),
        }
    }

    /// Changes what is mapped, once the hypervisor has let go of it.
    fn invalidate(&self, offset: u64, size: u64, change: impl FnOnce()) {
        let (world, host) = (self.world, &self.world.host);
        world.invalidations.set(world.invalidations.get() + 1);
        world.mmu.exclusive(self.ops, |table| {
            host.invalidating.set(host.invalidating.get() + 1);
            // A range of pages inside the region.
            let _ = table.unmap(self.ops, Ipa(host.start + offset), size);
        });
        change();
        world.mmu.exclusive(self.ops, |_| {
            host.sequence.set(host.sequence.get() + 1);
            host.invalidating.set(host.invalidating.get() - 1);
        });
    }

    /// Automatic NUMA balancing, as long as vCPUs work: every so often it has the next part of the
    /// memory unmapped (`task_numa_work()`).
    pub(super) fn balance(&self, from: &Cell<u64>) {
        let (world, host) = (self.world, &self.world.host);
        let (period, bytes) = (world.prices.numa_scan_period, world.prices.numa_scan_bytes);
        if period == 0 || bytes == 0 || matches!(host.kind, Kind::Whole(_)) {
            return;
        }
        while world.working.get() > 0 {
            clock::spend(period);
            if world.working.get() == 0 {
                return;
            }
            let offset = from.get();
            let size = bytes.min(host.size - offset);
            from.set((offset + size) % host.size);
            self.invalidate(offset, size, || host.watch(offset, size));
        }
    }

    /// Takes a fault in the host.
    fn fault(&self, offset: u64, writes: bool) {
        let (world, host) = (self.world, &self.world.host);
        let (state, size) = host.mapped(offset);
        clock::spend(world.prices.host_fault);
        if let Kind::Whole(page) = host.kind {
            return self.fault_whole(offset, page);
        }
        let place = || match size {
            SMALL => at(&host.small, offset, SMALL),
            _ => at(&host.large, offset, HUGE),
        };
        match (state, writes) {
            (State::Absent, false) if place().get() == State::Absent => place().set(State::Zero),
            (State::Watched, _) => place().set(State::Own),
            (State::Absent, true) => {
                world.zero(size);
                if host.mapped(offset) == (State::Absent, size) {
                    place().set(State::Own);
                }
            }
            (State::Zero, true) if size == HUGE => {
                let block = offset & !(HUGE - 1);
                self.invalidate(block, HUGE, || {
                    if place().get() == State::Zero {
                        place().set(State::Split);
                        for page in (block..block + HUGE).step_by(4096) {
                            at(&host.small, page, SMALL).set(State::Zero);
                        }
                    }
                });
            }
            (State::Zero, true) => {
                world.zero(SMALL);
                self.invalidate(offset & !(SMALL - 1), SMALL, || {
                    if place().get() == State::Zero {
                        place().set(State::Own);
                    }
                });
            }
            _ => {}
        }
    }

    fn fault_whole(&self, offset: u64, page: u64) {
        let host = &self.world.host;
        let state = at(&host.large, offset, page);
        let number = usize::try_from(offset / page).unwrap_or(usize::MAX);
        if state.get() != State::Absent {
            return;
        }
        if let Some(waiting) = host.busy.borrow_mut().get_mut(&number) {
            waiting.push(clock::running());
        } else {
            host.busy.borrow_mut().insert(number, Vec::new());
            self.world.zero(page);
            state.set(State::Own);
            let waiting = host.busy.borrow_mut().remove(&number);
            for process in waiting.into_iter().flatten() {
                clock::wake(process, clock::now());
            }
            return;
        }
        clock::sleep();
    }
}

impl Host for FaultHost<'_> {
    fn page(&self, ipa: Ipa, access: Access) -> Option<Page> {
        let (world, host) = (self.world, &self.world.host);
        let offset = ipa.0.checked_sub(host.start).filter(|at| *at < host.size)?;
        let writes = access == Access::Write;
        loop {
            // Finding the VMA, and then the page in a fault, takes the mmap lock and gives it back.
            clock::charge(world.prices.page_lookup);
            world.shared_line();
            if let Some(page) = host.found(offset, writes) {
                if !page.writable {
                    // Only the slow way finds a page that may not be written.
                    clock::charge(world.prices.page_lookup);
                    world.shared_line();
                }
                return Some(page);
            }
            self.fault(offset, writes);
        }
    }

    fn logging(&self, _: Ipa) -> bool {
        self.world.logging.get()
    }

    /// Under the lock, where it is asked for the second time, a number that never fits while
    /// somebody invalidates.
    fn sequence(&self) -> u64 {
        let host = &self.world.host;
        if self.asked.replace(true) && host.invalidating.get() > 0 {
            return u64::MAX;
        }
        host.sequence.get()
    }

    fn mark_dirty(&self, ipa: Ipa, size: u64) {
        let world = self.world;
        if !world.logging.get() {
            return;
        }
        let first = (ipa - Ipa(world.host.start)) / SMALL;
        let mut dirty = world.dirty.borrow_mut();
        for page in first..first + size / SMALL {
            let word = usize::try_from(page / 64)
                .ok()
                .and_then(|at| dirty.get_mut(at));
            if let Some(word) = word {
                *word |= 1 << (page % 64);
            }
        }
    }
}
