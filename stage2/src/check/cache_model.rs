// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The model of the caches: it finds stale bytes that uncached guest accesses read, and stale bytes
//! that the host reads after the memory is unmapped.
//!
//! A byte is *dirty* if the host wrote it and no clean to the PoC has completed since; *stale* if
//! an I-cache may hold an older instruction; *touched* if a guest could access it, so that a line
//! in the host's caches may hide the guest's data. A CMO takes effect when a later DSB of the same
//! CPU completes it, except for bytes that the host writes in between.

use alloc::{vec, vec::Vec};
use core::ops::{Add, Range, Sub};

use rangemap::RangeSet;

use crate::address::PhysAddr;

/// A set of addresses of one address space, stored as ranges.
#[derive(Debug)]
pub(super) struct Ranges<A: Clone + Ord>(RangeSet<A>);

impl<A: Clone + Ord> Default for Ranges<A> {
    fn default() -> Self {
        Self(RangeSet::new())
    }
}

impl<A: Copy + Ord + Add<u64, Output = A> + Sub<Output = u64>> Ranges<A> {
    pub(super) fn add(&mut self, start: A, size: u64) {
        // The set panics on an empty range.
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
        found.map(|range| with_size(range.start.max(start)..range.end.min(end))).collect()
    }

    /// Returns the parts of a range that are missing from the set, as address and size.
    pub(super) fn gaps(&self, start: A, size: u64) -> Vec<(A, u64)> {
        let range = start..start + size;
        self.0.gaps(&range).map(with_size).collect()
    }

    /// Returns the first address in a range that is in the set.
    pub(super) fn first_in(&self, start: A, size: u64) -> Option<A> {
        let mut found = self.0.overlapping(start..start + size);
        found.next().map(|range| range.start.max(start))
    }

    /// Returns all ranges of the set, as address and size.
    pub(super) fn iter(&self) -> impl Iterator<Item = (A, u64)> + '_ {
        self.0.iter().cloned().map(with_size)
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

fn with_size<A: Copy + Sub<Output = u64>>(range: Range<A>) -> (A, u64) {
    (range.start, range.end - range.start)
}

/// Set that a pending operation clears.
#[derive(Debug, Clone, Copy)]
enum ClearedSet {
    Dirty,
    /// Memory that a guest could access until it was unmapped.
    Touched,
    Stale,
}

#[derive(Debug, Default)]
pub(super) struct CacheModel {
    dirty: Ranges<PhysAddr>,
    stale: Ranges<PhysAddr>,
    touched: Ranges<PhysAddr>,
    /// Mapped bytes that the host wrote: coherent until they are unmapped.
    written_while_mapped: Ranges<PhysAddr>,
    mapped: Ranges<PhysAddr>,
    /// Mapped and executable bytes: the guest invalidates the I-cache for them.
    executable: Ranges<PhysAddr>,
    /// Effects of CMOs that a CPU has issued and no DSB has completed.
    pending: Vec<Vec<(ClearedSet, PhysAddr, u64)>>,
    /// For each CPU, true if it has issued a CMO, even without effect, that no DSB has completed.
    issued: Vec<bool>,
}

/// Returns the parts of a range before and after a hole.
fn around_hole(
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
        Self { pending: vec![Vec::new(); cpus], issued: vec![false; cpus], ..Self::default() }
    }

    pub(super) fn host_write(&mut self, phys: PhysAddr, size: u64) {
        for pending in &mut self.pending {
            *pending = pending
                .drain(..)
                .flat_map(|(clears, at, len)| {
                    around_hole(at, len, phys, size).map(move |(at, len)| (clears, at, len))
                })
                .collect();
        }
        self.stale.add(phys, size);
        self.dirty.add(phys, size);
        for (at, len) in self.mapped.overlaps(phys, size) {
            self.dirty.remove(at, len);
            self.written_while_mapped.add(at, len);
        }
        for (at, len) in self.executable.overlaps(phys, size) {
            self.stale.remove(at, len);
        }
    }

    /// Adds memory, which the host has just written, to the guest.
    pub(super) fn add_memory(&mut self, phys: PhysAddr, size: u64) {
        self.unmap(phys, size);
        self.touched.remove(phys, size);
        self.host_write(phys, size);
    }

    /// Issues a clean and invalidate to the PoC; returns whether it has an effect. It makes memory
    /// reusable by the host only if no CPU can access the memory through the table any more.
    pub(super) fn clean(
        &mut self,
        cpu: usize,
        phys: PhysAddr,
        size: u64,
        is_reachable: impl Fn(PhysAddr, u64) -> bool,
    ) -> bool {
        self.issued[cpu] = true;
        self.pending[cpu].push((ClearedSet::Dirty, phys, size));
        let mut effect = self.dirty(phys, size).is_some();
        for (at, len) in self.touched.overlaps(phys, size) {
            let unmapped = self.mapped.gaps(at, len).into_iter();
            for (at, len) in unmapped.filter(|(at, len)| !is_reachable(*at, *len)) {
                self.pending[cpu].push((ClearedSet::Touched, at, len));
                effect = true;
            }
        }
        effect
    }

    /// Issues an I-cache invalidation over a range, or of all of it; returns whether it has an
    /// effect. Dirty bytes remain stale: later fetches do not read the host's data.
    pub(super) fn invalidate_instructions(
        &mut self,
        cpu: usize,
        range: Option<(PhysAddr, u64)>,
        is_coherent: bool,
    ) -> bool {
        let (phys, size) = range.unwrap_or((PhysAddr(0), 1 << 52));
        let mut effect = false;
        for (at, len) in self.stale.overlaps(phys, size) {
            let clean = if is_coherent { vec![(at, len)] } else { self.dirty.gaps(at, len) };
            effect |= !clean.is_empty();
            let pending = clean.into_iter().map(|(at, len)| (ClearedSet::Stale, at, len));
            self.pending[cpu].extend(pending);
        }
        self.issued[cpu] |= effect;
        effect
    }

    /// Completes the CMOs of a CPU at its DSB; returns whether they had an effect.
    pub(super) fn complete(&mut self, cpu: usize) -> bool {
        let mut effect = false;
        self.issued[cpu] = false;
        for (clears, at, size) in core::mem::take(&mut self.pending[cpu]) {
            let set = match clears {
                ClearedSet::Dirty => &mut self.dirty,
                ClearedSet::Touched => &mut self.touched,
                ClearedSet::Stale => &mut self.stale,
            };
            effect |= set.first_in(at, size).is_some();
            set.remove(at, size);
        }
        effect
    }

    pub(super) fn map(&mut self, phys: PhysAddr, size: u64, execute: bool, is_memory: bool) {
        if execute {
            self.executable.add(phys, size);
        }
        self.mapped.add(phys, size);
        // The host's caches hold no lines of device memory.
        if is_memory {
            self.touched.add(phys, size);
        }
    }

    pub(super) fn unmap(&mut self, phys: PhysAddr, size: u64) {
        self.executable.remove(phys, size);
        self.mapped.remove(phys, size);
    }

    /// Ends an operation: bytes no longer mapped become incoherent. Returns the unmapped ranges
    /// that a guest could access and that no completed CMO has covered since.
    pub(super) fn end_operation(&mut self) -> Vec<(PhysAddr, u64)> {
        let written: Vec<_> = self.written_while_mapped.iter().collect();
        for (at, len) in written {
            for (at, len) in self.mapped.gaps(at, len) {
                self.dirty.add(at, len);
                self.stale.add(at, len);
                self.written_while_mapped.remove(at, len);
            }
        }
        let touched = self.touched.iter();
        let unmapped: Vec<_> = touched.flat_map(|(at, len)| self.mapped.gaps(at, len)).collect();
        for (at, len) in &unmapped {
            self.touched.remove(*at, *len);
        }
        unmapped
    }

    /// Returns whether a CPU has issued a CMO that no DSB has completed.
    pub(super) fn is_pending(&self, cpu: usize) -> bool {
        self.issued[cpu]
    }

    /// Returns the first dirty address in a range.
    pub(super) fn dirty(&self, phys: PhysAddr, size: u64) -> Option<PhysAddr> {
        self.dirty.first_in(phys, size)
    }

    /// Returns the first address in a range that has stale instructions.
    pub(super) fn stale(&self, phys: PhysAddr, size: u64) -> Option<PhysAddr> {
        self.stale.first_in(phys, size)
    }

    /// Returns the first address in a range that a guest could access.
    pub(super) fn touched(&self, phys: PhysAddr, size: u64) -> Option<PhysAddr> {
        self.touched.first_in(phys, size)
    }

    pub(super) fn is_mapped(&self, phys: PhysAddr, size: u64) -> bool {
        self.mapped.first_in(phys, size).is_some()
    }
}
