// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Page faults of the host, which decide how often base pages and transparent huge pages fault in
//! the guest.
//!
//! Modelled behaviour, as in Linux 5.8 to 6.12:
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

use std::{cell::Cell, sync::atomic::Ordering};

use granule_stage2::{Ipa, MapError, Stage2, fault::Page};

use super::{
    state::{HUGE, PageAllocation, PageState, VirtualTime, at},
    virtual_time,
};
use crate::software_machine::{PAGE, START, operations::CpuOperations};

/// Operations of a CPU in virtual time.
type Operations = CpuOperations<VirtualTime>;

/// Unmaps a range from stage 2, then changes the host's pages.
fn invalidate(ops: &Operations, offset: u64, size: u64, change: impl FnOnce()) {
    let state = &*ops.state;
    let invalidations = &state.platform.invalidations;
    invalidations.set(invalidations.get() + 1);
    state.mmu.exclusive(ops, |table| {
        state.invalidating.fetch_add(1, Ordering::AcqRel);
        // Unmapping pages within the region cannot fail.
        let _ = table.unmap(ops, Ipa(START + offset), size);
    });
    change();
    state.mmu.exclusive(ops, |_| {
        state.sequence.fetch_add(1, Ordering::AcqRel);
        state.invalidating.fetch_sub(1, Ordering::AcqRel);
    });
}

/// Runs automatic NUMA balancing while vCPUs execute tasks: periodically unmaps the next part of
/// the memory (`task_numa_work()`).
pub(super) fn balance(ops: &Operations) {
    let platform = &ops.state.platform;
    let (host, next) = (&platform.host, &platform.scanned);
    let (period, bytes) = (platform.prices.numa_scan_period, platform.prices.scanned_bytes());
    if period == 0 || bytes == 0 || matches!(host.allocation, PageAllocation::Fixed(_)) {
        return;
    }
    while platform.working.get() > 0 {
        virtual_time::spend(period);
        if platform.working.get() == 0 {
            return;
        }
        let offset = next.get();
        let size = bytes.min(host.size - offset);
        next.set((offset + size) % host.size);
        invalidate(ops, offset, size, || host.numa_protect(offset, size));
    }
}

/// Handles a page fault of the host.
fn fault(ops: &Operations, offset: u64, writes: bool) {
    let platform = &ops.state.platform;
    let host = &platform.host;
    let (found, size) = host.mapped(offset);
    virtual_time::spend(platform.prices.host_fault);
    if let PageAllocation::Fixed(page) = host.allocation {
        return fault_fixed(platform, offset, page);
    }
    let page = match size {
        PAGE => at(&host.small, offset, PAGE),
        _ => at(&host.large, offset, HUGE),
    };
    match (found, writes) {
        (PageState::Absent, false) if page.get() == PageState::Absent => page.set(PageState::Zero),
        (PageState::NumaProtected, _) => page.set(PageState::Private),
        (PageState::Absent, true) => {
            platform.zero(size);
            if host.mapped(offset) == (PageState::Absent, size) {
                page.set(PageState::Private);
            }
        }
        (PageState::Zero, true) if size == HUGE => {
            let block = offset & !(HUGE - 1);
            invalidate(ops, block, HUGE, || {
                if page.get() == PageState::Zero {
                    page.set(PageState::Split);
                    for page in 0..HUGE / PAGE {
                        at(&host.small, block + page * PAGE, PAGE).set(PageState::Zero);
                    }
                }
            });
        }
        (PageState::Zero, true) => {
            platform.zero(PAGE);
            invalidate(ops, offset & !(PAGE - 1), PAGE, || {
                if page.get() == PageState::Zero {
                    page.set(PageState::Private);
                }
            });
        }
        _ => {}
    }
}

/// Handles a fault of a page that the first fault zeroes while the others wait.
fn fault_fixed(platform: &VirtualTime, offset: u64, page: u64) {
    let host = &platform.host;
    let state = at(&host.large, offset, page);
    if state.get() != PageState::Absent {
        return;
    }
    if let Some(waiting) = host.zeroing.borrow_mut().get_mut(&(offset / page)) {
        waiting.push(virtual_time::running());
    } else {
        host.zeroing.borrow_mut().insert(offset / page, Vec::new());
        platform.zero(page);
        state.set(PageState::Private);
        let waiting = host.zeroing.borrow_mut().remove(&(offset / page));
        for process in waiting.into_iter().flatten() {
            virtual_time::wake(process, virtual_time::now());
        }
        return;
    }
    virtual_time::sleep();
}

/// Returns the page of the host at an offset, after handling its faults.
pub(super) fn page(ops: &Operations, offset: u64, writes: bool) -> Page {
    let platform = &ops.state.platform;
    // Each lookup of a VMA or of a page in a fault takes and releases the mmap lock.
    let look_up = || {
        virtual_time::charge(platform.prices.page_lookup);
        platform.shared_line();
    };
    loop {
        look_up();
        if let Some(page) = platform.host.page_at(offset, writes) {
            if !page.writable {
                // The fast lookup fails for read-only pages, so a second one follows.
                look_up();
            }
            return page;
        }
        fault(ops, offset, writes);
    }
}

/// Coalesces blocks where the host's memory is contiguous, when dirty logging stops.
pub(super) fn recover_blocks(ops: &Operations, table: &mut Stage2) -> Result<(), MapError> {
    let host = &ops.state.platform.host;
    let split = |page: &Cell<PageState>| page.get() == PageState::Split;
    if !host.large.iter().any(split) {
        return table.recover_blocks(ops, Ipa(START), host.size, host.page());
    }
    for (block, page) in (0..).zip(&host.large) {
        if page.get() == PageState::Private {
            table.recover_blocks(ops, Ipa(START + block * HUGE), HUGE, HUGE)?;
        }
    }
    Ok(())
}
