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
    /// What maintenance that each CPU has issued and not completed is good for.
    pending: Vec<Vec<(Kind, u64, u64)>>,
    /// CPUs that have issued any, even if it is good for nothing by now.
    issued: Vec<bool>,
}

/// What is left of a range around a hole.
fn without(at: u64, len: u64, hole: u64, size: u64) -> impl Iterator<Item = (u64, u64)> {
    let end = at + len;
    let before = hole.clamp(at, end);
    let behind = (hole + size).clamp(at, end);
    [(at, before - at), (behind, end - behind)]
        .into_iter()
        .filter(|(_, size)| *size > 0)
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
            issued: vec![false; cpus],
        }
    }

    pub(super) fn host_write(&mut self, phys: u64, size: u64) {
        self.stale.add(phys, size);
        for pending in &mut self.pending {
            *pending = pending
                .drain(..)
                .flat_map(|(kind, at, len)| {
                    without(at, len, phys, size).map(move |(at, len)| (kind, at, len))
                })
                .collect();
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
        self.issued[cpu] = true;
        self.pending[cpu].push((Kind::Data, phys, size));
        let mut any = self.dirty(phys, size).is_some();
        for (from, to) in self.touched.overlaps(phys, size) {
            let unmapped = self.mapped.gaps(from, to).into_iter();
            for (from, to) in unmapped.filter(|(from, to)| !reachable(*from, to - from)) {
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
            let fresh = if coherent {
                vec![(from, to)]
            } else {
                self.dirty.gaps(from, to)
            };
            any |= !fresh.is_empty();
            self.issued[cpu] |= any;
            for (from, to) in fresh {
                self.pending[cpu].push((Kind::Instructions, from, to - from));
            }
        }
        any
    }

    /// A DSB of this CPU completes what it issued. Gives whether there was something.
    pub(super) fn complete(&mut self, cpu: usize) -> bool {
        let mut any = false;
        self.issued[cpu] = false;
        for (kind, at, size) in core::mem::take(&mut self.pending[cpu]) {
            let done = match kind {
                Kind::Data => &mut self.dirty,
                Kind::Returned => &mut self.touched,
                Kind::Instructions => &mut self.stale,
            };
            any |= done.first_in(at, size).is_some();
            done.remove(at, size);
        }
        any
    }

    pub(super) fn map(&mut self, phys: u64, size: u64, execute: bool, cached: bool) {
        if execute {
            self.executable.add(phys, size);
        }
        self.mapped.add(phys, size);
        // Of what is no memory the host's caches hold nothing.
        if cached {
            self.touched.add(phys, size);
        }
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
            for (start, end) in self.mapped.gaps(from, to) {
                self.dirty.add(start, end - start);
                self.stale.add(start, end - start);
                self.written_while_mapped.remove(start, end - start);
            }
        }
        let touched = self.touched.iter();
        let left: Vec<_> = touched
            .flat_map(|(from, to)| self.mapped.gaps(from, to))
            .collect();
        for (from, to) in &left {
            self.touched.remove(*from, to - from);
        }
        left
    }

    /// Whether a CPU has issued maintenance and no DSB behind it.
    pub(super) fn is_pending(&self, cpu: usize) -> bool {
        self.issued[cpu]
    }

    pub(super) fn dirty(&self, phys: u64, size: u64) -> Option<u64> {
        self.dirty.first_in(phys, size)
    }

    pub(super) fn stale(&self, phys: u64, size: u64) -> Option<u64> {
        self.stale.first_in(phys, size)
    }

    pub(super) fn touched(&self, phys: u64, size: u64) -> Option<u64> {
        self.touched.first_in(phys, size)
    }

    pub(super) fn is_mapped(&self, phys: u64, size: u64) -> bool {
        self.mapped.first_in(phys, size).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = 2 << 20;

    #[test]
    fn memory_given_to_another_leaves_maintenance_that_is_under_way_for_the_rest() {
        let mut caches = Caches::new(2);
        caches.given(0, BLOCK);
        caches.given(BLOCK, BLOCK);
        caches.clean(0, 0, 2 * BLOCK, |_, _| false);
        caches.complete(0);
        caches.invalidate_instructions(0, None, false);

        caches.given(BLOCK, BLOCK);
        caches.complete(0);

        assert_eq!(caches.stale(0, BLOCK), None);
        assert_eq!(caches.stale(BLOCK, BLOCK), Some(BLOCK));
    }

    #[test]
    fn what_is_written_while_it_is_cleaned_is_dirty_and_the_rest_clean() {
        let mut caches = Caches::new(1);
        caches.given(0, BLOCK);
        caches.clean(0, 0, BLOCK, |_, _| false);

        caches.host_write(0x1000, 64);
        caches.complete(0);

        assert_eq!(caches.dirty(0, BLOCK), Some(0x1000));
        assert_eq!(caches.dirty(0x1040, BLOCK - 0x1040), None);
    }

    #[test]
    fn maintenance_in_vain_is_still_to_be_completed() {
        let mut caches = Caches::new(1);
        caches.clean(0, 0x1000, 64, |_, _| false);

        caches.host_write(0x1000, 64);

        assert!(caches.is_pending(0));
    }
}
