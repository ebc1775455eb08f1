// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The model of the caches. It finds stale bytes that the guest may read uncached, and stale bytes
//! that the host may read after the memory is unmapped.
//!
//! A byte is *dirty* if the host wrote it and no clean to the PoC has completed since; *stale* if
//! an I-cache may hold an older instruction; *exposed* if a guest could access it, so that a line
//! in the host's caches may hide the guest's data. A CMO takes effect when a later DSB of the same
//! CPU completes it, except for bytes that the host writes in between.

use alloc::{vec, vec::Vec};
use core::ops::{Add, Range, Sub};

use rangemap::RangeSet;

use super::event::Cause;
use crate::address::PhysAddr;

/// A set of addresses of one address space, stored as ranges.
#[derive(Debug)]
pub(super) struct AddressSet<A: Clone + Ord>(RangeSet<A>);

impl<A: Clone + Ord> Default for AddressSet<A> {
    fn default() -> Self {
        Self(RangeSet::new())
    }
}

impl<A: Copy + Ord + Add<u64, Output = A> + Sub<Output = u64>> AddressSet<A> {
    pub(super) fn add(&mut self, start: A, size: u64) {
        // `RangeSet` panics on an empty range.
        if size > 0 {
            self.0.insert(start..start + size);
        }
    }

    pub(super) fn remove(&mut self, start: A, size: u64) {
        if size > 0 {
            self.0.remove(start..start + size);
        }
    }

    /// Returns the parts of a range that are in the set, as address and size.
    pub(super) fn overlaps(&self, start: A, size: u64) -> Vec<(A, u64)> {
        let end = start + size;
        let found = self.0.overlapping(start..end);
        found.map(|range| start_and_size(range.start.max(start)..range.end.min(end))).collect()
    }

    /// Returns the parts of a range that are missing from the set, as address and size.
    pub(super) fn gaps(&self, start: A, size: u64) -> Vec<(A, u64)> {
        let range = start..start + size;
        self.0.gaps(&range).map(start_and_size).collect()
    }

    /// Returns the first address in a range that is in the set.
    pub(super) fn first_in(&self, start: A, size: u64) -> Option<A> {
        let mut found = self.0.overlapping(start..start + size);
        found.next().map(|range| range.start.max(start))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (A, u64)> + '_ {
        self.0.iter().cloned().map(start_and_size)
    }
}

fn start_and_size<A: Copy + Sub<Output = u64>>(range: Range<A>) -> (A, u64) {
    (range.start, range.end - range.start)
}

/// Address set from which a pending CMO removes bytes.
#[derive(Debug, Clone, Copy)]
enum ClearedSet {
    Dirty,
    ExposedToGuest,
    Stale,
}

#[derive(Debug, Default)]
pub(super) struct CacheModel {
    dirty_ranges: AddressSet<PhysAddr>,
    stale_ranges: AddressSet<PhysAddr>,
    exposed_ranges: AddressSet<PhysAddr>,
    /// Mapped bytes that the host wrote: coherent until they are unmapped.
    host_written_ranges: AddressSet<PhysAddr>,
    mapped_ranges: AddressSet<PhysAddr>,
    /// Bytes that were unmapped since the last end of an operation.
    unmapped_ranges: AddressSet<PhysAddr>,
    /// Mapped and executable bytes: the guest invalidates the I-cache for them.
    executable_ranges: AddressSet<PhysAddr>,
    /// Effects of the CMOs that each CPU has issued and no DSB has completed.
    pending_clears: Vec<Vec<(ClearedSet, PhysAddr, u64)>>,
    /// The last CMO of each CPU, even one without effect, that no DSB has completed.
    pending_cmos: Vec<Option<Cause>>,
}

fn ranges_outside_hole(
    at: PhysAddr,
    len: u64,
    hole: PhysAddr,
    size: u64,
) -> impl Iterator<Item = (PhysAddr, u64)> {
    let end = at + len;
    let before = hole.clamp(at, end);
    let after = (hole + size).clamp(at, end);
    [(at, before - at), (after, end - after)].into_iter().filter(|(_, size)| *size > 0)
}

impl CacheModel {
    pub(super) fn new(cpus: usize) -> Self {
        Self {
            pending_clears: vec![Vec::new(); cpus],
            pending_cmos: vec![None; cpus],
            ..Self::default()
        }
    }

    pub(super) fn host_write(&mut self, phys: PhysAddr, size: u64) {
        for pending in &mut self.pending_clears {
            *pending = pending
                .drain(..)
                .flat_map(|(clears, at, len)| {
                    ranges_outside_hole(at, len, phys, size).map(move |(at, len)| (clears, at, len))
                })
                .collect();
        }
        self.stale_ranges.add(phys, size);
        self.dirty_ranges.add(phys, size);
        for (at, len) in self.mapped_ranges.overlaps(phys, size) {
            self.dirty_ranges.remove(at, len);
            self.host_written_ranges.add(at, len);
        }
        for (at, len) in self.executable_ranges.overlaps(phys, size) {
            self.stale_ranges.remove(at, len);
        }
    }

    /// Adds memory, which the host has just written, to the guest.
    pub(super) fn add_memory(&mut self, phys: PhysAddr, size: u64) {
        self.unmap(phys, size);
        self.exposed_ranges.remove(phys, size);
        self.host_write(phys, size);
    }

    /// Issues a clean to the PoC, which leaves lines in the caches.
    pub(super) fn clean(&mut self, cause: Cause, phys: PhysAddr, size: u64) {
        let cpu = usize::from(cause.cpu);
        self.pending_cmos[cpu] = Some(cause);
        self.pending_clears[cpu].push((ClearedSet::Dirty, phys, size));
    }

    /// Issues a clean and invalidate to the PoC; returns whether it has an effect. It makes memory
    /// reusable by the host only if no CPU can access the memory through the table any more.
    pub(super) fn clean_invalidate(
        &mut self,
        cause: Cause,
        phys: PhysAddr,
        size: u64,
        is_reachable: impl Fn(PhysAddr, u64) -> bool,
    ) -> bool {
        self.clean(cause, phys, size);
        let cpu = usize::from(cause.cpu);
        let mut effect = self.first_dirty_address(phys, size).is_some();
        for (at, len) in self.exposed_ranges.overlaps(phys, size) {
            let unmapped = self.mapped_ranges.gaps(at, len).into_iter();
            for (at, len) in unmapped.filter(|(at, len)| !is_reachable(*at, *len)) {
                self.pending_clears[cpu].push((ClearedSet::ExposedToGuest, at, len));
                effect = true;
            }
        }
        effect
    }

    /// Issues an I-cache invalidation over a range, or of all of it; returns whether it has an
    /// effect. Dirty bytes remain stale: later fetches do not read the host's data.
    pub(super) fn invalidate_icache(
        &mut self,
        cause: Cause,
        range: Option<(PhysAddr, u64)>,
        is_coherent: bool,
    ) -> bool {
        let cpu = usize::from(cause.cpu);
        let (phys, size) = range.unwrap_or((PhysAddr(0), 1 << 52));
        let mut effect = false;
        for (at, len) in self.stale_ranges.overlaps(phys, size) {
            let clean = if is_coherent { vec![(at, len)] } else { self.dirty_ranges.gaps(at, len) };
            effect |= !clean.is_empty();
            let pending = clean.into_iter().map(|(at, len)| (ClearedSet::Stale, at, len));
            self.pending_clears[cpu].extend(pending);
        }
        if effect {
            self.pending_cmos[cpu] = Some(cause);
        }
        effect
    }

    /// Completes the CMOs of a CPU at its DSB; returns whether they had an effect.
    pub(super) fn complete(&mut self, cpu: usize) -> bool {
        let mut effect = false;
        self.pending_cmos[cpu] = None;
        for (clears, at, size) in core::mem::take(&mut self.pending_clears[cpu]) {
            let set = match clears {
                ClearedSet::Dirty => &mut self.dirty_ranges,
                ClearedSet::ExposedToGuest => &mut self.exposed_ranges,
                ClearedSet::Stale => &mut self.stale_ranges,
            };
            effect |= set.first_in(at, size).is_some();
            set.remove(at, size);
        }
        effect
    }

    pub(super) fn map(&mut self, phys: PhysAddr, size: u64, execute: bool, is_memory: bool) {
        if execute {
            self.executable_ranges.add(phys, size);
        }
        self.mapped_ranges.add(phys, size);
        // The host's caches hold no lines of device memory.
        if is_memory {
            self.exposed_ranges.add(phys, size);
        }
    }

    /// Makes mapped memory not executable: the guest no longer invalidates the I-cache for it.
    pub(super) fn restrict_execution(&mut self, phys: PhysAddr, size: u64) {
        self.executable_ranges.remove(phys, size);
    }

    pub(super) fn unmap(&mut self, phys: PhysAddr, size: u64) {
        self.restrict_execution(phys, size);
        self.mapped_ranges.remove(phys, size);
        self.unmapped_ranges.add(phys, size);
    }

    /// Ends an operation: unmapped bytes become incoherent. Returns the unmapped ranges that a
    /// guest could access and that no completed CMO has covered since.
    pub(super) fn end_operation(&mut self) -> Vec<(PhysAddr, u64)> {
        let unmapped = core::mem::take(&mut self.unmapped_ranges);
        let unmapped: Vec<_> =
            unmapped.iter().flat_map(|(at, len)| self.mapped_ranges.gaps(at, len)).collect();
        let mut exposed = Vec::new();
        for (at, len) in unmapped {
            for (at, len) in self.host_written_ranges.overlaps(at, len) {
                self.dirty_ranges.add(at, len);
                self.stale_ranges.add(at, len);
                self.host_written_ranges.remove(at, len);
            }
            exposed.extend(self.exposed_ranges.overlaps(at, len));
        }
        for (at, len) in &exposed {
            self.exposed_ranges.remove(*at, *len);
        }
        exposed
    }

    pub(super) fn pending_cmo(&self, cpu: usize) -> Option<Cause> {
        self.pending_cmos[cpu]
    }

    pub(super) fn first_dirty_address(&self, phys: PhysAddr, size: u64) -> Option<PhysAddr> {
        self.dirty_ranges.first_in(phys, size)
    }

    pub(super) fn first_stale_address(&self, phys: PhysAddr, size: u64) -> Option<PhysAddr> {
        self.stale_ranges.first_in(phys, size)
    }

    pub(super) fn first_exposed_address(&self, phys: PhysAddr, size: u64) -> Option<PhysAddr> {
        self.exposed_ranges.first_in(phys, size)
    }

    pub(super) fn is_mapped(&self, phys: PhysAddr, size: u64) -> bool {
        self.mapped_ranges.first_in(phys, size).is_some()
    }
}
