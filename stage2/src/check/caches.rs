// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which bytes a guest that goes around the caches would see wrong, and the host after it.
//!
//! *Dirty*: the host wrote it and no clean to the point of coherency has completed since. *Stale*:
//! an I-cache may hold older instructions. *Touched*: a guest could reach it, so that the host's
//! caches may hide what the guest wrote. Maintenance counts once a DSB behind it has completed, and
//! not for bytes that are written in between.

use alloc::{vec, vec::Vec};

use super::ranges::Ranges;

#[derive(Debug, Clone, Copy)]
enum Kind {
    /// What the host wrote.
    Data,
    /// What a guest could reach, and can no longer.
    Returned,
    Instructions,
}

#[derive(Debug)]
pub(super) struct Caches {
    dirty: Ranges,
    stale: Ranges,
    touched: Ranges,
    /// Guest-reachable bytes that the host wrote: coherent until they are unmapped.
    written_while_mapped: Ranges,
    mapped: Ranges,
    /// Mapped and executable: what is written there is the guest's to invalidate.
    executable: Ranges,
    /// Maintenance that each CPU has issued and not completed.
    pending: Vec<Vec<(Kind, u64, u64)>>,
}

impl Caches {
    pub(super) fn new(cpus: usize) -> Self {
        Self {
            dirty: Ranges::default(),
            stale: Ranges::default(),
            touched: Ranges::default(),
            written_while_mapped: Ranges::default(),
            mapped: Ranges::default(),
            executable: Ranges::default(),
            pending: vec![Vec::new(); cpus],
        }
    }

    pub(super) fn host_write(&mut self, phys: u64, size: u64) {
        self.stale.add(phys, size);
        for pending in &mut self.pending {
            pending.retain(|(_, at, len)| at + len <= phys || phys + size <= *at);
        }
        self.dirty.add(phys, size);
        for (from, to) in self.mapped.overlaps(phys, size) {
            self.dirty.remove(from, to - from);
            self.written_while_mapped.add(from, to - from);
        }
        for (from, to) in self.executable.overlaps(phys, size) {
            self.stale.remove(from, to - from);
        }
    }

    pub(super) fn given(&mut self, phys: u64, size: u64) {
        self.unmap(phys, size);
        self.touched.remove(phys, size);
        self.host_write(phys, size);
    }

    /// Cleaning counts for the memory's return only where no CPU can reach it any more. Gives whether
    /// there is something to do.
    pub(super) fn clean(
        &mut self,
        cpu: usize,
        phys: u64,
        size: u64,
        reachable: impl Fn(u64, u64) -> bool,
    ) -> bool {
        self.pending[cpu].push((Kind::Data, phys, size));
        let mut any = self.dirty(phys, size).is_some();
        for (from, to) in self.touched.overlaps(phys, size) {
            let mut gone = Ranges::default();
            gone.add(from, to - from);
            for (start, end) in self.mapped.overlaps(from, to - from) {
                gone.remove(start, end - start);
            }
            for (from, to) in gone
                .iter()
                .filter(|(from, to)| !reachable(*from, to - from))
            {
                self.pending[cpu].push((Kind::Returned, from, to - from));
                any = true;
            }
        }
        any
    }

    /// Bytes that are not clean yet stay stale: the fetch would miss what the host wrote.
    pub(super) fn invalidate_instructions(
        &mut self,
        cpu: usize,
        range: Option<(u64, u64)>,
        coherent: bool,
    ) -> bool {
        let mut any = false;
        let (at, size) = range.unwrap_or((0, 1 << 52));
        for (from, to) in self.stale.overlaps(at, size) {
            let mut fresh = Ranges::default();
            fresh.add(from, to - from);
            if !coherent {
                for (dirty, end) in self.dirty.overlaps(from, to - from) {
                    fresh.remove(dirty, end - dirty);
                }
            }
            let fresh: Vec<_> = fresh.iter().collect();
            any |= !fresh.is_empty();
            for (from, to) in fresh {
                self.pending[cpu].push((Kind::Instructions, from, to - from));
            }
        }
        any
    }

    /// A DSB of this CPU completes what it issued. Gives whether there was something.
    pub(super) fn complete(&mut self, cpu: usize) -> bool {
        let mut any = false;
        for (kind, at, size) in core::mem::take(&mut self.pending[cpu]) {
            let done = match kind {
                Kind::Data => &mut self.dirty,
                Kind::Returned => &mut self.touched,
                Kind::Instructions => &mut self.stale,
            };
            any |= done.touches(at, size).is_some();
            done.remove(at, size);
        }
        any
    }

    pub(super) fn map(&mut self, phys: u64, size: u64, execute: bool) {
        if execute {
            self.executable.add(phys, size);
        }
        self.mapped.add(phys, size);
        self.touched.add(phys, size);
    }

    pub(super) fn unmap(&mut self, phys: u64, size: u64) {
        self.executable.remove(phys, size);
        self.mapped.remove(phys, size);
    }

    /// An operation is over: what is not mapped any more is not coherent any more. Gives what a
    /// guest could reach and nobody has maintained since.
    pub(super) fn settle(&mut self) -> Vec<(u64, u64)> {
        let written: Vec<_> = self.written_while_mapped.iter().collect();
        for (from, to) in written {
            let mut gone = Ranges::default();
            gone.add(from, to - from);
            for (start, end) in self.mapped.overlaps(from, to - from) {
                gone.remove(start, end - start);
            }
            for (start, end) in gone.iter() {
                self.dirty.add(start, end - start);
                self.stale.add(start, end - start);
                self.written_while_mapped.remove(start, end - start);
            }
        }
        let mut left = Ranges::default();
        for (from, to) in self.touched.iter() {
            left.add(from, to - from);
        }
        for (from, to) in self.mapped.iter() {
            left.remove(from, to - from);
        }
        let left: Vec<_> = left.iter().collect();
        for (from, to) in &left {
            self.touched.remove(*from, to - from);
        }
        left
    }

    /// Whether a CPU has issued maintenance and no DSB behind it.
    pub(super) fn is_pending(&self, cpu: usize) -> bool {
        !self.pending[cpu].is_empty()
    }

    pub(super) fn dirty(&self, phys: u64, size: u64) -> Option<u64> {
        self.dirty.touches(phys, size)
    }

    pub(super) fn stale(&self, phys: u64, size: u64) -> Option<u64> {
        self.stale.touches(phys, size)
    }

    pub(super) fn touched(&self, phys: u64, size: u64) -> Option<u64> {
        self.touched.touches(phys, size)
    }

    pub(super) fn is_mapped(&self, phys: u64, size: u64) -> bool {
        self.mapped.touches(phys, size).is_some()
    }
}
