// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A migration workload, which checks that no write is lost.
//!
//! ```text
//! vCPUs │ create │            │ write at random ···················· │ stop          │
//! host  │        │ logging on │ copy all    copy      …   copy       │ collect, copy │ logging off
//!       │        │            │ collect     collect       collect    │               │
//!                             │ round 1     round 2       round N    │ stop
//! ```
//!
//! A round copies the pages of the previous dirty bitmap (the first round copies all pages) to the
//! destination, waits until the round's time is over, and collects the next bitmap. The time in the
//! round's record is the time of the collection, which blocks faulting vCPUs and has a mark of its
//! own; events and gauges cover the whole round. The time of the stop is measured from the stop
//! request to the last copied page. The observer receives the records after the stop, so it delays
//! no round.
//!
//! Then source and destination must be equal, and hold the last write of each vCPU to each page,
//! which the harness computes from the vCPUs' [`RandomWalk`]s. The harness also counts the clean
//! pages that the bitmaps reported (`clean_pages_logged` in the stop's record).

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

/// Measurements of a round or of the stop, and the number of writes of each vCPU at its end.
type RoundMeasurement = (PhaseMeasurement, Vec<u64>);

pub(super) fn run(
    runner: &mut Runner<'_, '_>,
    config: Migration,
    iteration: u32,
) -> Result<(), HarnessError> {
    let vcpus = runner.threads.vcpus();
    let max_vcpus = runner.region.host_page_size.0 / 8;
    if vcpus as u64 > max_vcpus {
        return Err(HarnessError::TooManyVcpus(vcpus, max_vcpus));
    }
    migration_ops(runner.machine)?;
    runner.begin_iteration(iteration)?;
    runner.guest_phase(Phase::Create)?;
    let mut copy = MigrationDestination::new(runner.region);
    runner.host_phase(Phase::LoggingOn, |machine| machine.set_dirty_logging(true))?;
    let tasks: Vec<_> = (0..vcpus).map(|vcpu| runner.tasks.write_at_random(vcpu)).collect();
    let measured = run_rounds(runner, config, &tasks, &mut copy)?;
    let mut writes = Vec::with_capacity(measured.len());
    for (measurement, written) in measured {
        writes.push(written);
        runner.observe_phase(measurement)?;
    }
    runner.host_phase(Phase::LoggingOff, |machine| machine.set_dirty_logging(false))?;
    copy.check(migration_ops(runner.machine)?, &tasks, &writes)?;
    runner.finish_iteration()
}

struct RoundStart {
    events: EventCounts,
    /// Writes of all vCPUs until the events were read.
    writes: u64,
    /// Writes of all vCPUs until `time`: the vCPUs write while figures are read.
    writes_at_time: u64,
    time: Nanoseconds,
}

fn run_rounds(
    runner: &mut Runner<'_, '_>,
    config: Migration,
    tasks: &[Task],
    copy: &mut MigrationDestination,
) -> Result<Vec<RoundMeasurement>, HarnessError> {
    let machine = &mut *runner.machine;
    set_stop_request(machine, false)?;
    let mut armed = runner
        .threads
        .arm(tasks, runner.plan.config.seed)
        .map_err(threads_error(&error::in_phase(Phase::Round)))?;
    let mut measured = Vec::new();
    let mut log = copy.all_pages();
    let events = read_events(machine)?;
    mark::begin_phase(Phase::Round);
    let mut start = RoundStart { events, writes: 0, writes_at_time: 0, time: armed.open() };
    for round in 1..=config.rounds {
        copy.copy_pages(migration_ops(machine)?, &log)?;
        let spent = Duration::from_nanos(clock::elapsed(start.time, clock::now()).0);
        thread::sleep(config.round_time.saturating_sub(spent));
        let (measurement, end);
        (measurement, end, log) = collect_round(machine, copy, round, &start)?;
        measured.push(measurement);
        start = end;
        if round < config.rounds {
            mark::begin_phase(Phase::Round);
            start.writes_at_time = read_write_counts(machine)?.iter().sum();
            start.time = clock::now();
        }
    }
    mark::begin_phase(Phase::Stop);
    let stopped = stop_and_copy(machine, armed, copy, log, config.rounds + 1);
    mark::end_phase();
    let (times, pages) = stopped?;
    let mut stop_events = difference(&start.events, &read_events(machine)?);
    let writes = read_write_counts(machine)?;
    let unwritten = copy.clean_pages_logged(tasks, &writes);
    stop_events.insert("pages_logged".to_owned(), pages);
    stop_events.insert("clean_pages_logged".to_owned(), unwritten);
    let stop = PhaseMeasurement {
        phase: Phase::Stop,
        round: None,
        times,
        events: stop_events,
        gauges: machine.gauges().map_err(host_error(error::READING_COUNTERS))?,
    };
    measured.push((stop, writes));
    Ok(measured)
}

/// Collects the dirty bitmap at the end of a round. Returns the round's measurement, the start of
/// the next round, and the bitmap.
fn collect_round(
    machine: &mut dyn Machine,
    copy: &mut MigrationDestination,
    round: u32,
    start: &RoundStart,
) -> Result<(RoundMeasurement, RoundStart, Vec<u64>), HarnessError> {
    mark::begin_collection();
    let collecting = clock::now();
    let log = collect_dirty_log(machine);
    let end = clock::now();
    mark::end_collection();
    let log = log?;
    // The vCPUs write meanwhile, so nothing may delay this read after `end`.
    let writes = read_write_counts(machine)?;
    let total = writes.iter().sum();
    let pages = copy.record_bitmap(&log, round);
    let after = read_events(machine)?;
    let mut events = difference(&start.events, &after);
    events.insert("guest_writes".to_owned(), total - start.writes);
    events.insert("pages_logged".to_owned(), pages);
    let duration = clock::elapsed(start.time, end).0;
    let mut gauges = machine.gauges().map_err(host_error(error::READING_COUNTERS))?;
    gauges.insert("round_ns".to_owned(), duration);
    if let Some(each) = (1000 * duration).checked_div(total - start.writes_at_time) {
        gauges.insert("ns_per_1000_writes".to_owned(), each);
    }
    let times = TaskTimes { total: clock::elapsed(collecting, end), vcpus: Vec::new() };
    let measurement =
        PhaseMeasurement { phase: Phase::Round, round: Some(round), times, events, gauges };
    let next = RoundStart { events: after, writes: total, writes_at_time: total, time: start.time };
    Ok(((measurement, writes), next, log))
}

/// Stops the vCPUs, and copies the pages of `log` and of the last dirty bitmap. Returns the times
/// and the number of pages in the last bitmap.
fn stop_and_copy(
    machine: &mut dyn Machine,
    armed: ArmedTasks<'_>,
    copy: &mut MigrationDestination,
    mut log: Vec<u64>,
    round: u32,
) -> Result<(TaskTimes, u64), HarnessError> {
    let start = clock::now();
    set_stop_request(machine, true)?;
    let times = armed.release();
    let times = times.map_err(threads_error(&error::in_phase(Phase::Stop)))?;
    let last = collect_dirty_log(machine)?;
    let pages = copy.record_bitmap(&last, round);
    for (word, more) in log.iter_mut().zip(&last) {
        *word |= more;
    }
    copy.copy_pages(migration_ops(machine)?, &log)?;
    let total = clock::elapsed(start, clock::now());
    Ok((TaskTimes { total, ..times }, pages))
}

fn migration_ops(machine: &mut dyn Machine) -> Result<&mut dyn MigrationOps, HarnessError> {
    machine.migration_ops().ok_or(HarnessError::MigrationUnsupported)
}

fn set_stop_request(machine: &mut dyn Machine, stop: bool) -> Result<(), HarnessError> {
    let result = migration_ops(machine)?.set_stop_request(stop);
    result.map_err(host_error("starting or stopping the vCPUs' writes"))
}

fn collect_dirty_log(machine: &mut dyn Machine) -> Result<Vec<u64>, HarnessError> {
    let log = migration_ops(machine)?.collect_dirty_log();
    log.map_err(host_error("collecting the dirty bitmap"))
}

fn read_write_counts(machine: &mut dyn Machine) -> Result<Vec<u64>, HarnessError> {
    let writes = migration_ops(machine)?.write_counts();
    writes.map_err(host_error("reading the vCPUs' write counts"))
}

fn read_events(machine: &mut dyn Machine) -> Result<EventCounts, HarnessError> {
    machine.events().map_err(host_error(error::READING_COUNTERS))
}

/// Memory of the migration's destination.
pub(super) struct MigrationDestination {
    region: Region,
    bytes: Vec<u8>,
    /// Last round whose dirty bitmap contained each page; 0 if no bitmap did.
    last_logged_round: Vec<u32>,
    page_buffer: Vec<u8>,
}

impl MigrationDestination {
    /// Allocates and populates memory for a region, so that copying takes no page faults.
    pub(super) fn new(region: Region) -> Self {
        Self {
            region,
            bytes: vec![0xa5; to_usize(region.size.0)],
            last_logged_round: vec![0; to_usize(region.size.0 / region.host_page_size.0)],
            page_buffer: vec![0; to_usize(region.host_page_size.0)],
        }
    }

    pub(super) fn all_pages(&self) -> Vec<u64> {
        vec![u64::MAX; self.last_logged_round.len().div_ceil(64)]
    }

    /// Records the pages of a round's dirty bitmap and returns their number.
    pub(super) fn record_bitmap(&mut self, log: &[u64], round: u32) -> u64 {
        let mut count = 0;
        for page in iter_set_bits(log, self.last_logged_round.len()) {
            self.last_logged_round[page] = round;
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
        let size = self.page_buffer.len();
        for page in iter_set_bits(log, self.last_logged_round.len()) {
            let at = page * size;
            let address = GuestAddress(self.region.start.0 + at as u64);
            read_source(source, address, &mut self.bytes[at..at + size])?;
        }
        Ok(())
    }

    /// Checks that source and destination are equal and hold all writes of the vCPUs, whose write
    /// counts after every round and after the stop are `writes`.
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
        let size = self.page_buffer.len();
        for (page, copied) in self.bytes.chunks_exact(size).enumerate() {
            let start = GuestAddress(self.region.start.0 + (page * size) as u64);
            read_source(source, start, &mut self.page_buffer)?;
            if self.page_buffer == copied {
                continue;
            }
            pages += 1;
            let words = copied.chunks_exact(8).zip(self.page_buffer.chunks_exact(8));
            let differs = |(copied, source)| copied != source;
            let word = words.clone().position(differs).unwrap_or(0);
            first.get_or_insert((
                page,
                word,
                word_at(copied, word),
                word_at(&self.page_buffer, word),
            ));
        }
        let Some((page, word, copied, source)) = first else {
            return Ok(());
        };
        // Each vCPU stores the number of its write in its own word of the page.
        let is_earlier = |counts: &&Vec<u64>| counts.get(word).is_some_and(|&n| n < source);
        let round = writes.iter().take_while(is_earlier).count() + 1;
        Err(HarnessError::LostWrite {
            pages,
            address: GuestAddress(self.region.start.0 + (page * size + word * 8) as u64),
            source_value: source,
            copied_value: copied,
            round: u32::try_from(round).unwrap_or(u32::MAX),
            last_logged_round: self.last_logged_round[page],
        })
    }

    /// Returns the number of clean pages that the dirty bitmaps reported; `writes` are the final
    /// write counts of the vCPUs.
    pub(super) fn clean_pages_logged(&self, tasks: &[Task], writes: &[u64]) -> u64 {
        let mut unwritten: Vec<_> =
            self.last_logged_round.iter().map(|&round| round != 0).collect();
        for (task, &count) in tasks.iter().zip(writes) {
            for page in RandomWalk::new(task.seed, task.count).take(to_usize(count)) {
                unwritten[to_usize(page)] = false;
            }
        }
        unwritten.into_iter().filter(|&page| page).count() as u64
    }

    /// Checks that the destination holds the last write of a vCPU to each page.
    fn check_writes(&self, task: &Task, writes: u64) -> Result<(), HarnessError> {
        let mut last = vec![0; self.last_logged_round.len()];
        for (write, page) in (1..=writes).zip(RandomWalk::new(task.seed, task.count)) {
            last[to_usize(page)] = write;
        }
        let word = to_usize((task.start.0 - self.region.start.0) / 8);
        let pages = self.bytes.chunks_exact(self.page_buffer.len());
        for (page, (bytes, expected)) in pages.zip(last).enumerate() {
            let found = word_at(bytes, word);
            if expected != 0 && found != expected {
                return Err(HarnessError::WrongContents {
                    address: GuestAddress(task.start.0 + page as u64 * task.stride.0),
                    expected,
                    found,
                });
            }
        }
        Ok(())
    }
}

fn read_source(
    source: &dyn MigrationOps,
    address: GuestAddress,
    buffer: &mut [u8],
) -> Result<(), HarnessError> {
    let done = source.read(address, buffer);
    done.map_err(host_error("reading the region"))
}

fn word_at(page: &[u8], word: usize) -> u64 {
    let bytes = page.chunks_exact(8).nth(word);
    let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
    u64::from_le_bytes(bytes.unwrap_or_default())
}

/// Returns the pages below `pages` whose bits are set.
fn iter_set_bits(log: &[u64], pages: usize) -> impl Iterator<Item = usize> {
    let words = log.iter().enumerate();
    words
        .flat_map(|(index, &word)| {
            let clear_lowest = |bits: &u64| Some(bits & bits.wrapping_sub(1));
            let suffixes = std::iter::successors(Some(word), clear_lowest);
            let suffixes = suffixes.take_while(|&bits| bits != 0);
            suffixes.map(move |bits| index * 64 + bits.trailing_zeros() as usize)
        })
        .take_while(move |&page| page < pages)
}

fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
