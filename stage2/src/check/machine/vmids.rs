// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VMIDs with which CPUs have run guests. TLBs tag the entries of a guest with its VMID, so no other
//! guest may run with it on this CPU until the entries have been invalidated.

use alloc::{collections::BTreeMap, vec, vec::Vec};

use crate::{
    address::Ipa,
    check::{entry::Invalidation, held_entries::Extent},
    operations::{Dsb, Scope, Vmid},
};

/// An invalidation that a CPU has issued and not completed: its VMID, or `None` for all.
type PendingInvalidation = (Option<Vmid>, Extent);

#[derive(Debug)]
pub(super) struct Vmids {
    /// The guests, by number, whose entries the TLB of each CPU may hold.
    guests: Vec<BTreeMap<Vmid, usize>>,
    /// The guest that each CPU runs, and its VMID.
    running: Vec<Option<(Vmid, usize)>>,
    pending: Vec<Vec<PendingInvalidation>>,
}

impl Vmids {
    pub(super) fn new(cpus: u8) -> Self {
        let cpus = usize::from(cpus);
        Self {
            guests: vec![BTreeMap::new(); cpus],
            running: vec![None; cpus],
            pending: vec![Vec::new(); cpus],
        }
    }

    /// Records the guest that a CPU runs, if any. Returns another guest whose entries have its VMID.
    pub(super) fn run(&mut self, cpu: usize, guest: Option<(Vmid, usize)>) -> Option<usize> {
        self.running[cpu] = guest;
        let (vmid, number) = guest?;
        self.guests[cpu].insert(vmid, number).filter(|other| *other != number)
    }

    /// Records an invalidation of the entries of a VMID, or of all.
    pub(super) fn invalidate(&mut self, cpu: u8, vmid: Option<Vmid>, kind: &Invalidation<Ipa>) {
        let is_broadcast = kind.scope == Scope::Broadcast;
        self.pending[usize::from(cpu)].push((vmid, Extent { is_broadcast, is_nxs: kind.is_nxs }));
    }

    /// Completes the invalidations of a CPU at its DSB. Returns those that affect all CPUs.
    pub(super) fn complete(&mut self, cpu: usize, dsb: Dsb, is_nxs: bool) -> Vec<Option<Vmid>> {
        if matches!(dsb, Dsb::IshSt | Dsb::NshSt) {
            return Vec::new();
        }
        let barrier = Extent { is_broadcast: dsb == Dsb::Ish, is_nxs };
        let completes = |(_, extent): &mut PendingInvalidation| barrier.completes(*extent);
        let done: Vec<_> = self.pending[cpu].extract_if(.., completes).collect();
        for (vmid, extent) in &done {
            for (other, guests) in self.guests.iter_mut().enumerate() {
                if extent.is_broadcast || other == cpu {
                    // A CPU that runs the guest has fetched entries since.
                    let runs = |own| self.running[other].is_some_and(|(vmid, _)| vmid == own);
                    guests.retain(|own, _| match vmid {
                        Some(vmid) => own != vmid || runs(*own),
                        None => false,
                    });
                }
            }
        }
        let broadcast = done.into_iter().filter(|(_, extent)| extent.is_broadcast);
        broadcast.map(|(vmid, _)| vmid).collect()
    }

    /// Returns whether a CPU runs a guest.
    pub(super) fn is_running(&self, number: usize) -> bool {
        self.running.iter().flatten().any(|(_, running)| *running == number)
    }
}
