// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A migration workload, and the check that it loses no write.
//!
//! ```text
//! vCPUs   create │            │ write at random ······················· │ stopped
//! host           │ logging on │ copy all    copy      …    copy          │ collect, copy │ logging
//! off                │            │ collect     collect        collect       │
//!                               round 1     round 2        round N         stop
//! ```
//!
//! A round copies the pages of the previous dirty bitmap (the first round copies all pages) to the
//! destination, waits until the round's time is over, and collects the next bitmap. The record's
//! time is that of the collection, which blocks faulting vCPUs; its events and gauges cover the
//! guest's progress in the whole round. The time of the stop is measured from the request to stop
//! to the last copied page. Records are passed to the observer after the stop, so that no delay
//! separates rounds.
//!
//! Afterwards source and destination must be equal; a page differs if it was written after its last
//! copy and no later bitmap contained it. The source must also contain all writes: the host repeats
//! the vCPUs' [`RandomWalk`]s to compute the last write of each vCPU to each page. It also counts
//! the clean pages that the bitmaps contained (`pages_logged_in_vain` in the record of the stop).

use std::{thread, time::Duration};

use super::{
    error::{self, HarnessError, host_error, threads_error},
    runner::{PhaseMeasurement, Runner},
};
use crate::{
    clock,
    config::Migration,
    machine::{Machine, MigrationOps, Region},
    task::{RandomWalk, Task},
    vcpu_threads::{ArmedTasks, TaskTimes},
};
use granule_types::{
    mark,
    phase::Phase,
    record::EventCounts,
    units::{GuestAddress, Nanoseconds},
};
use granule_vmm::kvm::tracepoints::difference;

/// Measurements of one round, or of the stop, and the number of writes of each vCPU at its end.
type RoundMeasurement = (PhaseMeasurement, Vec<u64>);

pub(super) fn run(
    runner: &mut Runner<'_, '_>,
    config: Migration,
    iteration: u32,
) -> Result<(), HarnessError> {
    let vcpus = runner.threads.vcpus();
    let most = runner.region.host_page.0 / 8;
    if vcpus as u64 > most {
        return Err(HarnessError::TooManyVcpus(vcpus, most));
    }
    migration_ops(runner.machine)?;
    runner.begin(iteration)?;
    runner.guest_phase(Phase::Create)?;
    let mut copy = MigrationDestination::new(runner.region);
    runner.host_phase(Phase::LoggingOn, |machine| machine.set_dirty_logging(true))?;
    let tasks: Vec<_> = (0..vcpus).map(|vcpu| runner.tasks.write_at_random(vcpu)).collect();
    let measured = rounds_and_stop(runner, config, &tasks, &mut copy)?;
    let mut writes = Vec::with_capacity(measured.len());
    for (measurement, written) in measured {
        writes.push(written);
        runner.observe_phase(measurement)?;
    }
    runner.host_phase(Phase::LoggingOff, |machine| machine.set_dirty_logging(false))?;
    copy.check(migration_ops(runner.machine)?, &tasks, &writes)?;
    runner.finish()
}

/// State of the current round at its start.
struct RoundStart {
    events: EventCounts,
    /// Writes of all vCPUs.
    writes: u64,
    time: Nanoseconds,
}

fn rounds_and_stop(
    runner: &mut Runner<'_, '_>,
    config: Migration,
    tasks: &[Task],
    copy: &mut MigrationDestination,
) -> Result<Vec<RoundMeasurement>, HarnessError> {
    let machine = &mut *runner.machine;
    set_stopping(machine, false)?;
    let mut armed = runner
        .threads
        .arm(tasks, runner.plan.config.seed)
        .map_err(threads_error(&error::phase(Phase::Round)))?;
    let mut measured = Vec::new();
    let mut log = copy.all_pages();
    let events = events(machine)?;
    mark::phase(Phase::Round);
    let mut start = RoundStart { events, writes: 0, time: armed.open() };
    for round in 1..=config.rounds {
        copy.copy_pages(migration_ops(machine)?, &log)?;
        let spent = Duration::from_nanos(clock::between(start.time, clock::now()).0);
        thread::sleep(config.round_time.saturating_sub(spent));
        let (measurement, end);
        (measurement, end, log) = collect(machine, copy, round, &start)?;
        measured.push(measurement);
        start = end;
        if round < config.rounds {
            mark::phase(Phase::Round);
            start.time = clock::now();
        }
    }
    mark::phase(Phase::Stop);
    let stopped = stop(machine, armed, copy, log, config.rounds + 1);
    mark::outside();
    let (times, pages) = stopped?;
    let mut stop_events = difference(&start.events, &self::events(machine)?);
    let writes = writes(machine)?;
    let unwritten = copy.unwritten_pages_logged(tasks, &writes);
    stop_events.insert("pages_logged".to_owned(), pages);
    stop_events.insert("pages_logged_in_vain".to_owned(), unwritten);
    let stop = PhaseMeasurement {
        phase: Phase::Stop,
        round: None,
        times,
        events: stop_events,
        gauges: machine.gauges().map_err(host_error(error::COUNTERS))?,
    };
    measured.push((stop, writes));
    Ok(measured)
}

/// Collects the dirty bitmap at the end of a round. Returns the round's measurement, the start of
/// the next round, and the bitmap.
fn collect(
    machine: &mut dyn Machine,
    copy: &mut MigrationDestination,
    round: u32,
    start: &RoundStart,
) -> Result<(RoundMeasurement, RoundStart, Vec<u64>), HarnessError> {
    let collecting = clock::now();
    let log = collect_dirty_log(machine)?;
    let end = clock::now();
    let pages = copy.note(&log, round);
    let writes = writes(machine)?;
    let total = writes.iter().sum();
    let after = events(machine)?;
    let mut events = difference(&start.events, &after);
    events.insert("guest_writes".to_owned(), total - start.writes);
    events.insert("pages_logged".to_owned(), pages);
    let lasted = clock::between(start.time, end).0;
    let mut gauges = machine.gauges().map_err(host_error(error::COUNTERS))?;
    gauges.insert("round_ns".to_owned(), lasted);
    if let Some(each) = (1000 * lasted).checked_div(total - start.writes) {
        gauges.insert("ns_per_1000_writes".to_owned(), each);
    }
    let times = TaskTimes { total: clock::between(collecting, end), vcpus: Vec::new() };
    let measurement =
        PhaseMeasurement { phase: Phase::Round, round: Some(round), times, events, gauges };
    let next = RoundStart { events: after, writes: total, time: start.time };
    Ok(((measurement, writes), next, log))
}

/// Stops the vCPUs and copies the pages of `log` and of the last dirty bitmap. Returns the times,
/// whose total runs from the request to stop to the last copied page, and the number of pages in
/// the last bitmap.
fn stop(
    machine: &mut dyn Machine,
    armed: ArmedTasks<'_>,
    copy: &mut MigrationDestination,
    mut log: Vec<u64>,
    round: u32,
) -> Result<(TaskTimes, u64), HarnessError> {
    let start = clock::now();
    set_stopping(machine, true)?;
    let times = armed.release();
    let times = times.map_err(threads_error(&error::phase(Phase::Stop)))?;
    let last = collect_dirty_log(machine)?;
    let pages = copy.note(&last, round);
    for (word, more) in log.iter_mut().zip(&last) {
        *word |= more;
    }
    copy.copy_pages(migration_ops(machine)?, &log)?;
    let total = clock::between(start, clock::now());
    Ok((TaskTimes { total, ..times }, pages))
}

fn migration_ops(machine: &mut dyn Machine) -> Result<&mut dyn MigrationOps, HarnessError> {
    machine.migration_ops().ok_or(HarnessError::NoMigration)
}

fn set_stopping(machine: &mut dyn Machine, stop: bool) -> Result<(), HarnessError> {
    let result = migration_ops(machine)?.set_stopping(stop);
    result.map_err(host_error("starting or stopping the vCPUs' writes"))
}

fn collect_dirty_log(machine: &mut dyn Machine) -> Result<Vec<u64>, HarnessError> {
    let log = migration_ops(machine)?.collect_dirty_log();
    log.map_err(host_error("collecting the dirty bitmap"))
}

fn writes(machine: &mut dyn Machine) -> Result<Vec<u64>, HarnessError> {
    let writes = migration_ops(machine)?.writes();
    writes.map_err(host_error("reading the vCPUs' write counts"))
}

fn events(machine: &mut dyn Machine) -> Result<EventCounts, HarnessError> {
    machine.events().map_err(host_error(error::COUNTERS))
}

/// Memory of the destination: a copy of the region, which is compared with the source.
pub(super) struct MigrationDestination {
    region: Region,
    bytes: Vec<u8>,
    /// For each page the last round whose dirty bitmap contained it; 0 if none did.
    logged_in: Vec<u32>,
    scratch: Vec<u8>,
}

impl MigrationDestination {
    /// Allocates and populates memory for a region, so that copying takes no page faults.
    pub(super) fn new(region: Region) -> Self {
        Self {
            region,
            bytes: vec![0xa5; index(region.size.0)],
            logged_in: vec![0; index(region.size.0 / region.host_page.0)],
            scratch: vec![0; index(region.host_page.0)],
        }
    }

    pub(super) fn all_pages(&self) -> Vec<u64> {
        vec![u64::MAX; self.logged_in.len().div_ceil(64)]
    }

    /// Records the pages of a round's dirty bitmap and returns their number.
    pub(super) fn note(&mut self, log: &[u64], round: u32) -> u64 {
        let mut count = 0;
        for page in pages_in(log, self.logged_in.len()) {
            self.logged_in[page] = round;
            count += 1;
        }
        count
    }

    /// Copies the pages of a bitmap from the source.
    pub(super) fn copy_pages(
        &mut self,
        source: &dyn MigrationOps,
        log: &[u64],
    ) -> Result<(), HarnessError> {
        let size = self.scratch.len();
        for page in pages_in(log, self.logged_in.len()) {
            let at = page * size;
            let address = GuestAddress(self.region.start.0 + at as u64);
            read(source, address, &mut self.bytes[at..at + size])?;
        }
        Ok(())
    }

    /// Checks that source and destination are equal and hold all writes of the vCPUs. `tasks` are
    /// their tasks; `writes` are each vCPU's write counts after every round and after the stop.
    pub(super) fn check(
        mut self,
        source: &dyn MigrationOps,
        tasks: &[Task],
        writes: &[Vec<u64>],
    ) -> Result<(), HarnessError> {
        self.check_equal(source, writes)?;
        let none = Vec::new();
        for (vcpu, task) in tasks.iter().enumerate() {
            let count = writes.last().unwrap_or(&none).get(vcpu).copied();
            self.check_writes(task, count.unwrap_or(0))?;
        }
        Ok(())
    }

    fn check_equal(
        &mut self,
        source: &dyn MigrationOps,
        writes: &[Vec<u64>],
    ) -> Result<(), HarnessError> {
        let mut pages = 0;
        let mut first = None;
        let size = self.scratch.len();
        for (page, copied) in self.bytes.chunks_exact(size).enumerate() {
            let start = GuestAddress(self.region.start.0 + (page * size) as u64);
            read(source, start, &mut self.scratch)?;
            if self.scratch == copied {
                continue;
            }
            pages += 1;
            let words = copied.chunks_exact(8).zip(self.scratch.chunks_exact(8));
            let differs = |(copied, source)| copied != source;
            let word = words.clone().position(differs).unwrap_or(0);
            first.get_or_insert((page, word, value(copied, word), value(&self.scratch, word)));
        }
        let Some((page, word, copied, source)) = first else {
            return Ok(());
        };
        // Each vCPU writes its own word of a page, and stores the number of its write there.
        let before = |ends: &&Vec<u64>| ends.get(word).is_some_and(|&end| end < source);
        let round = writes.iter().take_while(before).count() + 1;
        Err(HarnessError::LostWrite {
            pages,
            address: GuestAddress(self.region.start.0 + (page * size + word * 8) as u64),
            source_holds: source,
            copied,
            round: u32::try_from(round).unwrap_or(u32::MAX),
            logged_in: self.logged_in[page],
        })
    }

    /// Returns the number of pages that dirty bitmaps contained although no vCPU wrote them;
    /// `writes` are each vCPU's write counts at the end.
    pub(super) fn unwritten_pages_logged(&self, tasks: &[Task], writes: &[u64]) -> u64 {
        let mut unwritten: Vec<_> = self.logged_in.iter().map(|&round| round != 0).collect();
        for (task, &count) in tasks.iter().zip(writes) {
            for page in RandomWalk::new(task.seed, task.count).take(index(count)) {
                unwritten[index(page)] = false;
            }
        }
        unwritten.into_iter().filter(|&page| page).count() as u64
    }

    /// Checks that the last write of a vCPU to each page is present.
    fn check_writes(&self, task: &Task, writes: u64) -> Result<(), HarnessError> {
        let mut last = vec![0; self.logged_in.len()];
        for (write, page) in (1..=writes).zip(RandomWalk::new(task.seed, task.count)) {
            last[index(page)] = write;
        }
        let word = index((task.start.0 - self.region.start.0) / 8);
        let pages = self.bytes.chunks_exact(self.scratch.len());
        for (page, (bytes, expected)) in pages.zip(last).enumerate() {
            let found = value(bytes, word);
            if expected != 0 && found != expected {
                return Err(HarnessError::Contents {
                    address: GuestAddress(task.start.0 + page as u64 * task.stride.0),
                    expected,
                    found,
                });
            }
        }
        Ok(())
    }
}

fn read(
    source: &dyn MigrationOps,
    address: GuestAddress,
    into: &mut [u8],
) -> Result<(), HarnessError> {
    let done = source.read(address, into);
    done.map_err(host_error("reading the region"))
}

fn value(page: &[u8], word: usize) -> u64 {
    let bytes = page.chunks_exact(8).nth(word);
    let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
    u64::from_le_bytes(bytes.unwrap_or_default())
}

/// Returns the pages of a bitmap that are below `pages`.
fn pages_in(log: &[u64], pages: usize) -> impl Iterator<Item = usize> {
    let words = log.iter().enumerate();
    words
        .flat_map(|(at, &word)| {
            let rest = |left: &u64| Some(left & left.wrapping_sub(1));
            let left = std::iter::successors(Some(word), rest).take_while(|&left| left != 0);
            left.map(move |left| at * 64 + left.trailing_zeros() as usize)
        })
        .take_while(move |&page| page < pages)
}

fn index(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
