// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Page faults of the host, which decide how often base pages and transparent huge pages fault in
//! the guest.
//!
//! The model is Linux 5.8 to 6.12:
//!
//! - **Base pages**: a read of an untouched page maps the zero page. A write maps a private page,
//!   zeroed *before* the fault checks whether another CPU was faster. A write to the zero page
//!   copies: zero a page, invalidate the old one in stage 2, then check whether the copy is still
//!   needed.
//! - **Transparent huge pages**: the same with 2M, but a write to the huge zero page splits it into
//!   512 zero pages (`do_huge_pmd_wp_page()`), so that only 4K become private.
//! - **hugetlb, shared memory**: the first fault zeroes the page; the others wait.
//!
//! Between `invalidate_range_start` and `invalidate_range_end` of the mmu_notifier no stage-2 fault
//! maps anything.

use std::cell::Cell;

use granule_stage2::{
    Access, Ipa, MapError, Stage2,
    fault::{Host, Page},
};

use super::{
    host_memory::{HUGE, PageAllocation, PageState, at},
    operations::CpuOperations,
    state::SimState,
    virtual_time,
};
use crate::software_machine::PAGE;

/// [`PAGE`] as a step.
const BASE_PAGE: usize = 4096;

/// The host's memory management in one stage-2 fault.
pub(super) struct HostFaults<'a> {
    state: &'a SimState,
    ops: &'a CpuOperations,
    /// `true` once the fault path has read the invalidation sequence.
    sampled: Cell<bool>,
}

impl<'a> HostFaults<'a> {
    pub(super) const fn new(state: &'a SimState, ops: &'a CpuOperations) -> Self {
        Self { state, ops, sampled: Cell::new(false) }
    }

    /// Unmaps a range from stage 2, then changes the host's pages.
    fn invalidate(&self, offset: u64, size: u64, change: impl FnOnce()) {
        let (state, host) = (self.state, &self.state.host);
        state.invalidations.set(state.invalidations.get() + 1);
        state.mmu.exclusive(self.ops, |table| {
            host.invalidating.set(host.invalidating.get() + 1);
            // Unmapping pages within the region cannot fail.
            let _ = table.unmap(self.ops, Ipa(host.start() + offset), size);
        });
        change();
        state.mmu.exclusive(self.ops, |_| {
            host.sequence.set(host.sequence.get() + 1);
            host.invalidating.set(host.invalidating.get() - 1);
        });
    }

    /// Runs automatic NUMA balancing while vCPUs execute tasks: periodically unmaps the next part of
    /// the memory (`task_numa_work()`).
    pub(super) fn balance(&self, from: &Cell<u64>) {
        let (state, host) = (self.state, &self.state.host);
        let (period, bytes) = (state.prices.numa_scan_period, state.prices.numa_scan_bytes);
        if period == 0 || bytes == 0 || matches!(host.allocation, PageAllocation::Fixed(_)) {
            return;
        }
        while state.working.get() > 0 {
            virtual_time::spend(period);
            if state.working.get() == 0 {
                return;
            }
            let offset = from.get();
            let size = bytes.min(host.size() - offset);
            from.set((offset + size) % host.size());
            self.invalidate(offset, size, || host.numa_protect(offset, size));
        }
    }

    /// Handles a page fault of the host.
    fn fault(&self, offset: u64, writes: bool) {
        let (state, host) = (self.state, &self.state.host);
        let (found, size) = host.mapped(offset);
        virtual_time::spend(state.prices.host_fault);
        if let PageAllocation::Fixed(page) = host.allocation {
            return self.fault_fixed(offset, page);
        }
        let page = || match size {
            PAGE => at(&host.small, offset, PAGE),
            _ => at(&host.large, offset, HUGE),
        };
        match (found, writes) {
            (PageState::Absent, false) if page().get() == PageState::Absent => {
                page().set(PageState::Zero)
            }
            (PageState::NumaProtected, _) => page().set(PageState::Private),
            (PageState::Absent, true) => {
                state.zero(size);
                if host.mapped(offset) == (PageState::Absent, size) {
                    page().set(PageState::Private);
                }
            }
            (PageState::Zero, true) if size == HUGE => {
                let block = offset & !(HUGE - 1);
                self.invalidate(block, HUGE, || {
                    if page().get() == PageState::Zero {
                        page().set(PageState::Split);
                        for base in (block..block + HUGE).step_by(BASE_PAGE) {
                            at(&host.small, base, PAGE).set(PageState::Zero);
                        }
                    }
                });
            }
            (PageState::Zero, true) => {
                state.zero(PAGE);
                self.invalidate(offset & !(PAGE - 1), PAGE, || {
                    if page().get() == PageState::Zero {
                        page().set(PageState::Private);
                    }
                });
            }
            _ => {}
        }
    }

    /// Handles a fault of a page that the first fault zeroes while the others wait.
    fn fault_fixed(&self, offset: u64, page: u64) {
        let host = &self.state.host;
        let state = at(&host.large, offset, page);
        let number = usize::try_from(offset / page).unwrap_or(usize::MAX);
        if state.get() != PageState::Absent {
            return;
        }
        if let Some(waiting) = host.zeroing.borrow_mut().get_mut(&number) {
            waiting.push(virtual_time::running());
        } else {
            host.zeroing.borrow_mut().insert(number, Vec::new());
            self.state.zero(page);
            state.set(PageState::Private);
            let waiting = host.zeroing.borrow_mut().remove(&number);
            for process in waiting.into_iter().flatten() {
                virtual_time::wake(process, virtual_time::now());
            }
            return;
        }
        virtual_time::sleep();
    }
}

impl Host for HostFaults<'_> {
    fn page(&self, ipa: Ipa, access: Access) -> Option<Page> {
        let (state, host) = (self.state, &self.state.host);
        let offset = ipa.0.checked_sub(host.start()).filter(|at| *at < host.size())?;
        let writes = access == Access::Write;
        loop {
            // Each lookup of a VMA or of a page in a fault takes and releases the mmap lock.
            virtual_time::charge(state.prices.page_lookup);
            state.shared_line();
            if let Some(page) = host.page_at(offset, writes) {
                if !page.writable {
                    // The fast lookup fails for read-only pages, so a second one follows.
                    virtual_time::charge(state.prices.page_lookup);
                    state.shared_line();
                }
                return Some(page);
            }
            self.fault(offset, writes);
        }
    }

    fn logging(&self, _: Ipa) -> bool {
        self.state.logging.get()
    }

    /// Returns the invalidation sequence. The second read, under the lock, returns a number that
    /// never matches while an invalidation is in progress.
    fn sequence(&self) -> u64 {
        let host = &self.state.host;
        if self.sampled.replace(true) && host.invalidating.get() > 0 {
            return u64::MAX;
        }
        host.sequence.get()
    }

    fn mark_dirty(&self, ipa: Ipa, size: u64) {
        let state = self.state;
        if !state.logging.get() {
            return;
        }
        let first = (ipa - Ipa(state.host.start())) / PAGE;
        let mut dirty = state.dirty.borrow_mut();
        for page in first..first + size / PAGE {
            let word = usize::try_from(page / 64).ok().and_then(|at| dirty.get_mut(at));
            if let Some(word) = word {
                *word |= 1 << (page % 64);
            }
        }
    }
}

/// Coalesces blocks where the host's memory is contiguous, when dirty logging stops.
pub(super) fn recover_blocks(
    state: &SimState,
    table: &mut Stage2,
    ops: &CpuOperations,
) -> Result<(), MapError> {
    let host = &state.host;
    let split = |page: &Cell<PageState>| page.get() == PageState::Split;
    if !host.large.iter().any(split) {
        return table.recover_blocks(ops, Ipa(host.start()), host.size(), host.page());
    }
    for (block, page) in (0..).zip(&host.large) {
        if page.get() == PageState::Private {
            table.recover_blocks(ops, Ipa(host.start() + block * HUGE), HUGE, HUGE)?;
        }
    }
    Ok(())
}
