// SPDX-License-Identifier: GPL-2.0-or-later
//! Barriers, and those that add nothing to an earlier one.

use granule_stage2::check::machine::event::{Domain, MachineAction, OrderedAccesses};

/// A barrier instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Barrier {
    /// `DSB`.
    Dsb(OrderedAccesses, Domain),
    /// `DMB`.
    Dmb(OrderedAccesses, Domain),
    /// `ISB`.
    Isb,
}

impl Barrier {
    /// Returns whether the walkers of all CPUs observe stores before the barrier before later ones.
    pub fn orders_stores(self) -> bool {
        match self {
            Self::Dsb(accesses, domain) | Self::Dmb(accesses, domain) => {
                accesses != OrderedAccesses::Loads && domain != Domain::NonShareable
            }
            Self::Isb => false,
        }
    }

    /// Returns whether the walker of this CPU observes stores before the barrier before later ones.
    pub fn orders_stores_locally(self) -> bool {
        matches!(self, Self::Dsb(accesses, _) if accesses != OrderedAccesses::Loads)
    }

    /// Returns the event.
    pub fn action(self) -> MachineAction {
        match self {
            Self::Dsb(accesses, domain) => MachineAction::Dsb(accesses, domain),
            Self::Dmb(accesses, domain) => MachineAction::Dmb(accesses, domain),
            Self::Isb => MachineAction::Isb,
        }
    }

    /// Returns whether `other`, directly behind this barrier, has no effect.
    fn includes(self, other: Self) -> bool {
        match (self, other) {
            (Self::Isb, Self::Isb) => true,
            (Self::Dsb(accesses, domain), Self::Dsb(less, inner) | Self::Dmb(less, inner))
            | (Self::Dmb(accesses, domain), Self::Dmb(less, inner)) => {
                (accesses == OrderedAccesses::All || accesses == less)
                    && (rank(domain) >= rank(inner))
            }
            _ => false,
        }
    }
}

fn rank(domain: Domain) -> u8 {
    match domain {
        Domain::NonShareable => 0,
        Domain::InnerShareable => 1,
        Domain::OuterShareable => 2,
        Domain::FullSystem => 3,
    }
}

/// Barriers of a CPU since its last other event.
#[derive(Debug, Default)]
pub struct RecentBarriers(Vec<Barrier>);

impl RecentBarriers {
    /// Records a barrier; returns whether it adds to the recent ones.
    pub fn record(&mut self, barrier: Barrier) -> bool {
        if self.0.iter().any(|recent| recent.includes(barrier)) {
            return false;
        }
        if matches!(barrier, Barrier::Dsb(..)) {
            // An ISB behind a DSB makes its completion visible to the instructions that follow.
            self.0.retain(|recent| *recent != Barrier::Isb);
        }
        self.0.push(barrier);
        true
    }

    /// Forgets the barriers: the CPU has another event.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_that_adds_nothing_is_left_out() {
        let ish = Barrier::Dsb(OrderedAccesses::All, Domain::InnerShareable);
        let ishst = Barrier::Dsb(OrderedAccesses::Stores, Domain::InnerShareable);
        let ishld = Barrier::Dsb(OrderedAccesses::Loads, Domain::InnerShareable);
        let sy = Barrier::Dsb(OrderedAccesses::All, Domain::FullSystem);
        let dmb = Barrier::Dmb(OrderedAccesses::All, Domain::InnerShareable);
        let nxs = Barrier::Dsb(OrderedAccesses::NonXs, Domain::InnerShareable);
        for (sequence, kept) in [
            (&[ish, ish, ishst, ishld, dmb][..], &[true, false, false, false, false][..]),
            (&[ishst, ishld, ish, sy, ish], &[true, true, true, true, false]),
            (&[dmb, ish, dmb], &[true, true, false]),
            (&[nxs, nxs, dmb, ish, nxs], &[true, false, true, true, false]),
            (&[Barrier::Isb, Barrier::Isb, ish, Barrier::Isb], &[true, false, true, true]),
        ] {
            let mut recent = RecentBarriers::default();

            let found: Vec<_> = sequence.iter().map(|barrier| recent.record(*barrier)).collect();

            assert_eq!(found, kept, "{sequence:?}");
            recent.clear();
            assert!(recent.record(sequence[0]));
        }
    }

    #[test]
    fn a_barrier_of_stores_in_the_shareable_domain_orders_stores() {
        use {Domain::*, OrderedAccesses::*};
        for barrier in [
            Barrier::Dsb(Stores, InnerShareable),
            Barrier::Dsb(NonXs, InnerShareable),
            Barrier::Dmb(Stores, InnerShareable),
            Barrier::Dmb(All, FullSystem),
        ] {
            assert!(barrier.orders_stores());
        }
        for barrier in [
            Barrier::Dsb(All, NonShareable),
            Barrier::Dsb(Loads, FullSystem),
            Barrier::Dmb(All, NonShareable),
            Barrier::Isb,
        ] {
            assert!(!barrier.orders_stores(), "{barrier:?}");
        }
    }
}
