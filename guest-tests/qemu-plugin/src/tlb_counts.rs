// SPDX-License-Identifier: GPL-2.0-or-later
//! The model of TLBs with the slots of its counts: of all addresses, and of the linear map.

use crate::{
    segments::{Addresses, Event},
    tlb::{TlbArguments, Tlbs},
};

/// TLBs whose accesses and walks are counted.
#[derive(Debug)]
pub struct CountedTlbs {
    /// The model.
    pub tlbs: Tlbs,
    accesses: [usize; 2],
    /// Slots of the walks of each grain.
    walks: Vec<[usize; 2]>,
}

impl CountedTlbs {
    /// Returns the model, which has the TLBs of one CPU; `None` without the argument. `slot` assigns
    /// the slots.
    ///
    /// # Errors
    /// The machine has several CPUs.
    pub fn new(
        arguments: &TlbArguments,
        cpus: usize,
        slot: impl Fn(Event) -> usize,
    ) -> Result<Option<Self>, String> {
        let Some(tlbs) = Tlbs::new(arguments) else { return Ok(None) };
        if cpus > 1 {
            return Err(format!("tlb models the TLBs of one CPU, but the machine has {cpus}"));
        }
        let slots = |event: &dyn Fn(Addresses) -> Event| {
            [Addresses::All, Addresses::Linear].map(|addresses| slot(event(addresses)))
        };
        let walks = arguments.grains.iter().map(|grain| slots(&|a| Event::Walk(a, *grain)));
        Ok(Some(Self { walks: walks.collect(), accesses: slots(&Event::Access), tlbs }))
    }

    /// Observes an access, and passes the slot of each count that it increments.
    pub fn access(&self, address: u64, count: impl Fn(usize)) {
        let count_slots = |slots: &[usize; 2], is_linear: bool| {
            slots[..=usize::from(is_linear)].iter().for_each(|slot| count(*slot));
        };
        let on_walk = |grain, is_linear| count_slots(&self.walks[grain], is_linear);
        let is_linear = self.tlbs.access(address, on_walk);
        count_slots(&self.accesses, is_linear);
    }
}
