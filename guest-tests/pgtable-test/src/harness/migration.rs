// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A load like live migration's, and the proof that no write was lost in it.
//!
//! ```text
//! vCPUs   create │            │ write at random, all the time ·········· │ stand still
//! host           │ logging on │ copy all    copy      …    copy          │ collect, copy │ logging off
//!                │            │ collect     collect        collect       │
//!                               round 1     round 2        round N         stop
//! ```
//!
//! A round copies the pages that the log before it named (the first one all of them) to the
//! destination, waits until its time is over, and collects the next log. Its time in the results is
//! that of the collection, for which the guest is held up; what the guest got done in it stands
//! beside. The stop's time is the guest's: from the order to stop until everything is copied. Rounds
//! follow each other at once; their records are handed on when the vCPUs stand still.
//!
//! Then source and destination must be equal to the byte. They would differ in a page that was
//! written after it was copied last and that no later log named. And the source must hold what the
//! vCPUs wrote: the host chooses the same places again ([`Places`]), so it knows the last write of
//! every vCPU to every page. By the same knowledge the stop's record says how many pages the logs
//! named that nobody wrote (`pages_logged_in_vain`): with none lost and none in vain, two hosts' logs
//! say the same about the same writes.

use std::{thread, time::Duration};

use super::{HarnessError, Phase, Run, crew_error, destination::Destination, host_error, in_phase};
use crate::{
    config::Migration,
    machine::{Live, Machine, Task},
    vcpu_threads::{Muster, RoundTimes, clock},
};
use granule_types::{mark, record::EventCounts};
use granule_vmm::kvm::tracepoints::difference;

/// What was measured in one round, or in the stop.
struct Measured {
    phase: Phase,
    round: Option<u32>,
    times: RoundTimes,
    events: EventCounts,
    gauges: EventCounts,
    /// How often each vCPU had written when it was over.
    writes: Vec<u64>,
}

impl Run<'_> {
    /// One iteration under this load.
    pub(super) fn migrate(&mut self, plan: Migration, iteration: u32) -> Result<(), HarnessError> {
        let most = self.region.host_page.0 / 8;
        if self.crew.vcpus() as u64 > most {
            return Err(HarnessError::Crowded {
                vcpus: self.crew.vcpus(),
                most,
            });
        }
        live(self.machine)?;
        self.begin(iteration)?;
        self.guest_phase(Phase::Create)?;
        let mut copy = Destination::new(self.region);
        self.host_phase(Phase::LoggingOn, |machine| machine.set_dirty_logging(true))?;
        let tasks: Vec<_> = (0..self.crew.vcpus())
            .map(|vcpu| self.tasks.write_at_random(vcpu))
            .collect();
        let measured = self.rounds(plan, &tasks, &mut copy)?;
        let writes: Vec<_> = measured.iter().map(|m| m.writes.clone()).collect();
        for m in measured {
            self.hand_on(m.phase, m.round, m.times, m.events, m.gauges)?;
        }
        self.host_phase(Phase::LoggingOff, |machine| {
            machine.set_dirty_logging(false)
        })?;
        copy.check(live(self.machine)?, &tasks, &writes)?;
        self.finish(iteration + 1 < self.plan.iterations)
    }

    /// All rounds and the stop.
    fn rounds(
        &mut self,
        plan: Migration,
        tasks: &[Task],
        copy: &mut Destination,
    ) -> Result<Vec<Measured>, HarnessError> {
        let machine = &mut *self.machine;
        tell(machine, false)?;
        let mut muster = self
            .crew
            .muster(tasks, self.plan.config.seed)
            .map_err(crew_error(&in_phase(Phase::Round)))?;
        let mut measured = Vec::new();
        let mut log = copy.everything();
        let mut before = counts(machine)?;
        let mut written = 0;
        mark::phase(Phase::Round);
        let mut begun = muster.open();
        for round in 1..=plan.rounds {
            copy.pages(live(machine)?, &log)?;
            let spent = Duration::from_nanos(clock::between(begun, clock::now()).0);
            thread::sleep(plan.round_time.saturating_sub(spent));
            let collecting = clock::now();
            log = collect(machine)?;
            let over = clock::now();
            let pages = copy.note(&log, round);
            let writes = writes(machine)?;
            let total = writes.iter().sum();
            let after = counts(machine)?;
            let mut events = difference(&before, &after);
            events.insert("guest_writes".to_owned(), total - written);
            events.insert("pages_logged".to_owned(), pages);
            let lasted = clock::between(begun, over).0;
            let mut gauges = machine.gauges().map_err(host_error("counting"))?;
            gauges.insert("round_ns".to_owned(), lasted);
            if let Some(each) = (1000 * lasted).checked_div(total - written) {
                gauges.insert("ns_per_1000_writes".to_owned(), each);
            }
            measured.push(Measured {
                phase: Phase::Round,
                round: Some(round),
                times: RoundTimes {
                    total: clock::between(collecting, over),
                    vcpus: Vec::new(),
                },
                events,
                gauges,
                writes,
            });
            (before, written) = (after, total);
            if round < plan.rounds {
                mark::phase(Phase::Round);
                begun = clock::now();
            }
        }
        mark::phase(Phase::Stop);
        let stopped = stop(machine, muster, copy, log, plan.rounds + 1);
        mark::outside();
        let (times, pages) = stopped?;
        let mut events = difference(&before, &counts(machine)?);
        let writes = writes(machine)?;
        let in_vain = copy.named_in_vain(tasks, &writes);
        events.insert("pages_logged".to_owned(), pages);
        events.insert("pages_logged_in_vain".to_owned(), in_vain);
        measured.push(Measured {
            phase: Phase::Stop,
            round: None,
            times,
            events,
            gauges: machine.gauges().map_err(host_error("counting"))?,
            writes,
        });
        Ok(measured)
    }
}

/// Stops the vCPUs, copies what `log` names and what the last log does; gives how many pages that
/// last one named. The total time is from the order to stop to the last page copied.
fn stop(
    machine: &mut dyn Machine,
    muster: Muster<'_>,
    copy: &mut Destination,
    mut log: Vec<u64>,
    round: u32,
) -> Result<(RoundTimes, u64), HarnessError> {
    let start = clock::now();
    tell(machine, true)?;
    let times = muster.release();
    let times = times.map_err(crew_error(&in_phase(Phase::Stop)))?;
    let last = collect(machine)?;
    let pages = copy.note(&last, round);
    for (word, more) in log.iter_mut().zip(&last) {
        *word |= more;
    }
    copy.pages(live(machine)?, &log)?;
    let total = clock::between(start, clock::now());
    Ok((RoundTimes { total, ..times }, pages))
}

fn live(machine: &mut dyn Machine) -> Result<&mut dyn Live, HarnessError> {
    machine.live().ok_or(HarnessError::NotLive)
}

fn tell(machine: &mut dyn Machine, stop: bool) -> Result<(), HarnessError> {
    let told = live(machine)?.set_stopping(stop);
    told.map_err(host_error("telling the vCPUs to write or to stop"))
}

fn collect(machine: &mut dyn Machine) -> Result<Vec<u64>, HarnessError> {
    let log = live(machine)?.collect_dirty_log();
    log.map_err(host_error("collecting the dirty log"))
}

fn writes(machine: &mut dyn Machine) -> Result<Vec<u64>, HarnessError> {
    let writes = live(machine)?.writes();
    writes.map_err(host_error("telling how often the vCPUs wrote"))
}

fn counts(machine: &mut dyn Machine) -> Result<EventCounts, HarnessError> {
    machine.events().map_err(host_error("counting"))
}
