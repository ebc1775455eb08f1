// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The possible outcomes of a guest's access, from the table and from what its CPU may still hold.

use alloc::{collections::BTreeSet, vec::Vec};

use super::{checker::Checker, event::Outcome};
use crate::{
    address::{Ipa, PhysAddr},
    descriptor::{Descriptor, MemoryType},
    engine::Access,
};

/// A leaf that may translate the address.
struct Candidate {
    leaf: Descriptor,
    ipa: Ipa,
    size: u64,
    is_current: bool,
}

impl Checker {
    /// Returns the possible outcomes of an access now; an `uncached` access bypasses the caches.
    pub fn possible_outcomes(
        &self,
        cpu: usize,
        ipa: Ipa,
        access: Access,
        uncached: bool,
    ) -> BTreeSet<Outcome> {
        let mut outcomes = BTreeSet::new();
        let candidates = self.candidates(cpu, ipa);
        let current = candidates.first().filter(|c| c.is_current);
        if current.is_none() {
            outcomes.insert(Outcome::Fault);
        }
        if candidates.iter().any(|c| c.size != candidates[0].size) {
            outcomes.insert(Outcome::ConflictAbort);
        }
        let phys_of = |c: &Candidate| c.leaf.address() + (ipa - c.ipa);
        let right = current.map(phys_of);
        for candidate in &candidates {
            let (attributes, phys) = (candidate.leaf.attributes(), phys_of(candidate));
            let moved = Some(phys) != right || access == Access::Write;
            outcomes.insert(if !attributes.permit(access) || !attributes.accessed {
                Outcome::Fault
            } else if !candidate.is_current && moved {
                Outcome::StaleTranslation
            } else if self.is_stale_data(phys, candidate.leaf, access, uncached) {
                Outcome::StaleData
            } else {
                Outcome::RightData
            });
        }
        outcomes
    }

    /// Returns the current leaf, if there is one, and then the stale ones.
    fn candidates(&self, cpu: usize, ipa: Ipa) -> Vec<Candidate> {
        let current = self.tables.walk(ipa).filter(|(e, level)| e.is_leaf(*level));
        let current = current.map(|(leaf, level)| {
            let size = self.setup.geometry.span(level);
            Candidate { leaf, ipa: ipa.align_down(size), size, is_current: true }
        });
        let stale = self.tlbs.stale.iter().filter(|stale| {
            let is_leaf = stale.entry.table.is_none();
            is_leaf && cpu < self.cpus.len() && stale.is_held_by(cpu) && stale.overlaps(ipa, 1)
        });
        let stale = stale.map(|stale| Candidate {
            leaf: stale.entry.was,
            ipa: stale.entry.position.ipa,
            size: stale.entry.size,
            is_current: false,
        });
        current.into_iter().chain(stale).collect()
    }

    fn is_stale_data(
        &self,
        phys: PhysAddr,
        leaf: Descriptor,
        access: Access,
        uncached: bool,
    ) -> bool {
        let features = self.setup.features;
        let bypasses = uncached && !features.fwb || leaf.attributes().memory != MemoryType::Normal;
        let fetches = access == Access::Fetch && !features.dic;
        bypasses && self.caches.dirty(phys, 1).is_some()
            || fetches && self.caches.stale(phys, 1).is_some()
    }
}
