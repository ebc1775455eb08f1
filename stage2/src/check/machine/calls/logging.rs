// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory whose dirty pages are logged, from the calls that change the memory of a guest.
//!
//! A change has a start and an end. Between both, a fault may observe the memory before or after it,
//! so an address counts as logged from the end of the change that starts to log it until the start of
//! the one that stops.

use alloc::collections::BTreeMap;

use crate::{
    address::{Ipa, PhysAddr},
    check::cache_model::AddressSet,
    geometry::Granule,
};

/// Flag of memory whose dirty pages are logged (Linux: `KVM_MEM_LOG_DIRTY_PAGES`).
const LOGS_DIRTY_PAGES: u64 = 1;

/// The logged addresses of each guest, by the address of the guest's lock.
#[derive(Debug, Default)]
pub(super) struct LoggedMemory(BTreeMap<PhysAddr, AddressSet<Ipa>>);

impl LoggedMemory {
    /// Processes the start of a change of a guest's memory: its lock, number of the first page, number
    /// of pages, and flags.
    pub(super) fn begin_change(&mut self, arguments: [u64; 4], granule: Granule) {
        if arguments[3] & LOGS_DIRTY_PAGES == 0 {
            self.change(arguments, granule);
        }
    }

    /// Processes the end of a change, with the same arguments.
    pub(super) fn end_change(&mut self, arguments: [u64; 4], granule: Granule) {
        self.change(arguments, granule);
    }

    fn change(&mut self, [lock, frame, pages, flags]: [u64; 4], granule: Granule) {
        // The registers of a call may contain any number.
        let start = frame.saturating_mul(granule.size());
        let size = pages.saturating_mul(granule.size()).min(u64::MAX - start);
        let logged = self.0.entry(PhysAddr(lock)).or_default();
        match flags & LOGS_DIRTY_PAGES {
            0 => logged.remove(Ipa(start), size),
            _ => logged.add(Ipa(start), size),
        }
    }

    /// Returns the logged addresses of the guest of a lock; none if the trace has no change of its memory,
    /// so that all of it may be logged.
    pub(super) fn of_guest(&self, lock: PhysAddr) -> Option<&AddressSet<Ipa>> {
        self.0.get(&lock)
    }

    /// Forgets the memory of guests with this lock.
    pub(super) fn forget(&mut self, lock: PhysAddr) {
        self.0.remove(&lock);
    }
}
