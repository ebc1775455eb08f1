// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stalls of vCPUs by stage-2 faults: the time from the kernel's handling of an abort to the next
//! entry of the same vCPU into the guest, as a histogram for each type and level, and again as one for each
//! size of page or block that the kernel mapped for the fault, if it did.
//!
//! It includes all that delays the vCPU: locks, the allocation of the page, the userfaultfd handler,
//! other threads on its CPU. `lock-wait` is the part of it in which the vCPU waits for locks of the
//! kernel, such as the mmu_lock and the mmap_lock, as a histogram of the faults that wait. A pause of the
//! VM ends the stalls of its vCPUs.
//!
//! A thread reads the samples periodically. Those of several buffers are ordered only up to the time at
//! which a reading began, so later ones wait for the next reading.

use std::{
    collections::{BTreeMap, HashMap},
    fmt, io,
    sync::Arc,
    time::Duration,
};

use granule_types::{record::EventCounts, units::Bytes};
use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    time::{ClockId, clock_gettime},
};

use super::{
    config::StallDetail,
    fault_trace::{FaultTrace, Sample, TracedEvent},
};
use crate::{
    arch::host,
    scoped_thread::{ScopedThread, borrow_event},
    stalls::{LOST, LOST_SIZES, MAPPED, StallHistogram},
};

/// Time between two readings, in which a buffer must not become full.
const READ_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// Property that the stalls of a histogram have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// Type and level of the fault, by its name.
    Fault(&'static str),
    /// Size of the page or block that the kernel mapped.
    Mapped(Bytes),
    /// Time in which the vCPU waited for locks of the kernel, during the stall.
    LockWait,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fault(name) => f.write_str(name),
            Self::Mapped(size) => write!(f, "{MAPPED}{size}"),
            Self::LockWait => f.write_str("lock-wait"),
        }
    }
}

/// Stalls of the vCPUs of a process.
#[derive(Debug)]
pub struct FaultStalls {
    recorder: Arc<Mutex<Recorder>>,
    /// The thread that reads the samples, once it is started.
    reader: Option<ScopedThread>,
}

impl FaultStalls {
    /// Opens the trace of faults. The vCPU threads must start later.
    ///
    /// # Errors
    /// The host does not trace faults by level, or not the sizes, or not for this process.
    pub fn open(detail: StallDetail) -> io::Result<Self> {
        let trace = FaultTrace::open(detail)?;
        let lock_wait = trace.has_lock_waits().then_some(Kind::LockWait);
        let stalls = Stalls::new(host::fault_names().map(Kind::Fault).chain(lock_wait));
        let recorder = Recorder { detail, trace, stalls };
        Ok(Self { recorder: Arc::new(Mutex::new(recorder)), reader: None })
    }

    /// Starts the thread that reads the samples.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub fn start(&mut self) -> io::Result<()> {
        let recorder = Arc::clone(&self.recorder);
        self.reader = Some(ScopedThread::start("fault-stalls", move |stop| {
            loop {
                let mut fds = [PollFd::from_borrowed_fd(borrow_event(stop), PollFlags::IN)];
                match poll(&mut fds, Some(&READ_INTERVAL)) {
                    Ok(0) | Err(rustix::io::Errno::INTR) => {
                        recorder.lock().read();
                    }
                    _ => return,
                }
            }
        })?);
        Ok(())
    }

    /// Returns the handle by which a pause ends the stalls.
    pub fn pending(&self) -> PendingStalls {
        PendingStalls(Arc::clone(&self.recorder))
    }

    /// Adds the histograms to `counts`, as `TYPE.LEVEL`, `mapped-SIZE` and `lock-wait`, as [`LOST`] the
    /// number of samples that are lost or stand beside lost ones, and as [`LOST_SIZES`] that of sizes.
    pub fn add_to(&self, counts: &mut EventCounts) {
        let mut recorder = self.recorder.lock();
        recorder.read();
        for (kind, histogram) in &recorder.stalls.histograms {
            histogram.add_to(counts, &kind.to_string());
        }
        counts.insert(LOST.to_owned(), recorder.stalls.lost);
        if recorder.detail == StallDetail::Sizes {
            counts.insert(LOST_SIZES.to_owned(), recorder.stalls.lost_sizes);
        }
    }
}

/// The stalls that last while the VM is paused.
#[derive(Debug)]
pub struct PendingStalls(Arc<Mutex<Recorder>>);

impl PendingStalls {
    /// Ends the stalls of vCPUs that are out of the guest. Otherwise those that left KVM on a fault, because
    /// of the signal for the pause, would last as long as the pause.
    pub fn end(&self) {
        let mut recorder = self.0.lock();
        let now = recorder.read();
        recorder.stalls.end_pending(now);
    }
}

#[derive(Debug)]
struct Recorder {
    detail: StallDetail,
    trace: FaultTrace,
    stalls: Stalls,
}

impl Recorder {
    /// Reads the samples, and returns the time in nanoseconds until which they are recorded.
    fn read(&mut self) -> u64 {
        let now = clock_gettime(ClockId::Monotonic);
        let now = now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned();
        self.trace.drain(&mut self.stalls.samples);
        self.stalls.record_until(now);
        now
    }
}

/// A fault of a vCPU that has not entered the guest since.
#[derive(Debug, Default)]
struct PendingFault {
    name: &'static str,
    start: u64,
    /// Size that the kernel has mapped last.
    mapped: Option<Bytes>,
    /// Locks that it waits for.
    locks: Vec<u64>,
    /// Start of the wait for the first of them.
    wait_start: u64,
    /// Time of all waits that have ended, in which several waits count once.
    waited: u64,
}

impl PendingFault {
    /// Records the stall, which has ended.
    fn record(&self, end: u64, histograms: &mut Histograms) {
        let mut record = |kind, nanoseconds| {
            let stall = Duration::from_nanos(nanoseconds);
            histograms.entry(kind).or_default().record(stall);
        };
        // Clocks of CPUs differ, and the host may order samples of two of them wrongly.
        let stall = end.saturating_sub(self.start);
        record(Kind::Fault(self.name), stall);
        if let Some(size) = self.mapped {
            record(Kind::Mapped(size), stall);
        }
        if self.waited > 0 {
            record(Kind::LockWait, self.waited);
        }
    }
}

/// Histograms by the property of their stalls.
type Histograms = BTreeMap<Kind, StallHistogram>;

/// Pairs of faults and entries.
#[derive(Debug)]
struct Stalls {
    /// Samples that are not ordered yet.
    samples: Vec<Sample>,
    /// Fault of each thread that has not entered the guest since.
    pending: HashMap<u32, PendingFault>,
    /// Histograms of all kinds but sizes, which the kernel decides, so that a count of 0 is not absent.
    histograms: Histograms,
    lost: u64,
    lost_sizes: u64,
}

impl Stalls {
    fn new(kinds: impl Iterator<Item = Kind>) -> Self {
        Self {
            samples: Vec::new(),
            pending: HashMap::new(),
            histograms: kinds.map(|kind| (kind, StallHistogram::default())).collect(),
            lost: 0,
            lost_sizes: 0,
        }
    }

    /// Records the stalls that ended at `end` or before. The times of lost samples are not known: no
    /// stall beside them is recorded, as its entry may be that of a later fault.
    fn record_until(&mut self, end: u64) {
        let samples = self.samples.iter();
        // Each record of lost sizes leaves with this reading, as its time is 0.
        self.lost_sizes += samples.clone().map(Sample::lost_sizes).sum::<u64>();
        if samples.clone().any(|sample| matches!(sample.event, TracedEvent::Lost(_))) {
            self.lost += samples.map(Sample::lost).sum::<u64>();
            self.samples.clear();
            self.pending.clear();
            return;
        }
        // The sort is stable, and a buffer is in order.
        self.samples.sort_by_key(|sample| sample.nanoseconds);
        let count = self.samples.partition_point(|sample| sample.nanoseconds <= end);
        let Self { samples, pending, histograms, lost, .. } = self;
        for sample in samples.drain(..count) {
            match sample.event {
                TracedEvent::Fault(name) => {
                    let start = sample.nanoseconds;
                    let fault = PendingFault { name, start, ..PendingFault::default() };
                    // The kernel reports a loss only beside a later sample of the same CPU.
                    *lost += u64::from(pending.insert(sample.thread, fault).is_some());
                }
                TracedEvent::Map(size) => {
                    if let Some(fault) = pending.get_mut(&sample.thread) {
                        fault.mapped = Some(size);
                    }
                }
                TracedEvent::LockWait(lock) => {
                    if let Some(fault) = pending.get_mut(&sample.thread)
                        && !fault.locks.contains(&lock)
                    {
                        if fault.locks.is_empty() {
                            fault.wait_start = sample.nanoseconds;
                        }
                        fault.locks.push(lock);
                    }
                }
                TracedEvent::LockWaitEnd(lock) => {
                    if let Some(fault) = pending.get_mut(&sample.thread)
                        && let Some(index) = fault.locks.iter().position(|other| *other == lock)
                    {
                        fault.locks.swap_remove(index);
                        if fault.locks.is_empty() {
                            fault.waited += sample.nanoseconds.saturating_sub(fault.wait_start);
                        }
                    }
                }
                TracedEvent::Entry => {
                    if let Some(fault) = pending.remove(&sample.thread) {
                        fault.record(sample.nanoseconds, histograms);
                    }
                }
                // Counted above, where no lost sample of a fault is left.
                TracedEvent::LostMaps(_) | TracedEvent::Lost(_) => {}
            }
        }
    }

    /// Records the stalls of threads that have not entered the guest, which end at `end`.
    fn end_pending(&mut self, end: u64) {
        for (_, fault) in self.pending.drain() {
            fault.record(end, &mut self.histograms);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(nanoseconds: u64, thread: u32, event: TracedEvent) -> Sample {
        Sample { nanoseconds, thread, event }
    }

    /// Returns the number and the sum of the stalls of a name.
    fn total(stalls: &Stalls, name: &str) -> (u64, u64) {
        let mut counts = EventCounts::new();
        for (kind, histogram) in &stalls.histograms {
            histogram.add_to(&mut counts, &kind.to_string());
        }
        let count = |key: &str| counts.get(&format!("{name}.{key}")).copied().unwrap_or(0);
        (count("count"), count("ns"))
    }

    #[test]
    fn a_stall_lasts_until_the_next_entry_of_its_thread() {
        let mut stalls = Stalls::new(std::iter::empty());
        stalls.samples = vec![
            sample(10, 1, TracedEvent::Fault("translation.level2")),
            sample(15, 2, TracedEvent::Fault("permission.level3")),
            sample(12, 2, TracedEvent::Entry),
            sample(40, 1, TracedEvent::Entry),
            sample(20, 2, TracedEvent::Entry),
            sample(50, 1, TracedEvent::Entry),
        ];

        stalls.record_until(100);

        assert_eq!(total(&stalls, "translation.level2"), (1, 30));
        assert_eq!(total(&stalls, "permission.level3"), (1, 5));
    }

    #[test]
    fn waits_for_locks_in_a_fault_are_summed_without_those_within_others() {
        let mut stalls = Stalls::new(std::iter::empty());
        let (lock, queue, mutex) = (0xa0, 0xb0, 0xc0);
        stalls.samples = vec![
            sample(5, 1, TracedEvent::LockWait(lock)),
            sample(8, 1, TracedEvent::LockWaitEnd(lock)),
            sample(10, 1, TracedEvent::Fault("translation.level3")),
            sample(20, 1, TracedEvent::LockWait(lock)),
            sample(30, 1, TracedEvent::LockWait(queue)),
            sample(35, 1, TracedEvent::LockWaitEnd(queue)),
            sample(40, 1, TracedEvent::LockWaitEnd(lock)),
            // A wait that spins and then sleeps.
            sample(50, 1, TracedEvent::LockWait(mutex)),
            sample(52, 1, TracedEvent::LockWait(mutex)),
            sample(53, 1, TracedEvent::LockWaitEnd(mutex)),
            sample(60, 1, TracedEvent::Entry),
            sample(70, 1, TracedEvent::Fault("translation.level3")),
            sample(80, 1, TracedEvent::Entry),
        ];

        stalls.record_until(100);

        assert_eq!(total(&stalls, "lock-wait"), (1, 23));
        assert_eq!(total(&stalls, "translation.level3"), (2, 60));
    }

    #[test]
    fn a_stall_in_which_memory_is_mapped_has_its_size_too() {
        let mut stalls = Stalls::new(std::iter::empty());
        stalls.samples = vec![
            // Population of stage 2 before the start.
            sample(5, 1, TracedEvent::Map(Bytes::mib(2))),
            sample(10, 1, TracedEvent::Fault("translation.level2")),
            sample(12, 2, TracedEvent::Fault("translation.level3")),
            sample(15, 1, TracedEvent::Map(Bytes::mib(2))),
            sample(16, 2, TracedEvent::Map(Bytes::kib(4))),
            sample(20, 2, TracedEvent::Entry),
            sample(40, 1, TracedEvent::Entry),
            // The page has other permissions.
            sample(50, 1, TracedEvent::Fault("permission.level3")),
            sample(60, 1, TracedEvent::Entry),
        ];

        stalls.record_until(100);

        assert_eq!(total(&stalls, "mapped-2M"), (1, 30));
        assert_eq!(total(&stalls, "mapped-4K"), (1, 8));
        assert_eq!(total(&stalls, "permission.level3"), (1, 10));
    }

    #[test]
    fn samples_after_the_start_of_a_reading_wait_for_the_next_one() {
        let mut stalls = Stalls::new(std::iter::empty());
        stalls.samples = vec![sample(30, 1, TracedEvent::Entry)];
        stalls.record_until(20);
        stalls.samples.push(sample(10, 1, TracedEvent::Fault("translation.level3")));

        stalls.record_until(25);
        assert_eq!(total(&stalls, "translation.level3"), (0, 0));
        stalls.record_until(30);

        assert_eq!(total(&stalls, "translation.level3"), (1, 20));
    }

    #[test]
    fn a_stall_beside_lost_samples_is_not_recorded() {
        let mut stalls = Stalls::new(std::iter::empty());
        stalls.samples = vec![sample(10, 1, TracedEvent::Fault("translation.level3"))];
        stalls.record_until(10);
        // The entry that ended the second fault may be lost, too.
        stalls.samples = vec![
            sample(0, 0, TracedEvent::Lost(7)),
            sample(0, 0, TracedEvent::LostMaps(3)),
            sample(20, 2, TracedEvent::Fault("translation.level3")),
            sample(30, 2, TracedEvent::Map(Bytes::kib(4))),
            sample(90, 1, TracedEvent::Entry),
        ];
        stalls.record_until(100);
        stalls.samples = vec![sample(120, 2, TracedEvent::Entry)];

        stalls.record_until(130);

        assert_eq!(total(&stalls, "translation.level3"), (0, 0));
        assert_eq!((stalls.lost, stalls.lost_sizes), (9, 3));
    }

    #[test]
    fn a_lost_size_loses_no_stall() {
        let mut stalls = Stalls::new(std::iter::empty());
        stalls.samples = vec![
            sample(10, 1, TracedEvent::Fault("translation.level3")),
            sample(0, 0, TracedEvent::LostMaps(7)),
            sample(20, 1, TracedEvent::Entry),
        ];

        stalls.record_until(100);

        assert_eq!(total(&stalls, "translation.level3"), (1, 10));
        assert_eq!((stalls.lost, stalls.lost_sizes), (0, 7));
    }

    #[test]
    fn a_stall_whose_entry_is_missing_is_lost() {
        let mut stalls = Stalls::new(std::iter::empty());
        stalls.samples = vec![
            sample(10, 1, TracedEvent::Fault("translation.level3")),
            sample(50, 1, TracedEvent::Fault("translation.level3")),
            sample(55, 1, TracedEvent::Entry),
        ];

        stalls.record_until(100);

        assert_eq!(total(&stalls, "translation.level3"), (1, 5));
        assert_eq!(stalls.lost, 1);
    }

    #[test]
    fn a_pause_ends_the_stalls_of_its_vcpus() {
        let mut stalls = Stalls::new(std::iter::empty());
        stalls.samples = vec![sample(10, 1, TracedEvent::Fault("translation.level2"))];
        stalls.record_until(20);

        stalls.end_pending(20);
        stalls.samples = vec![sample(3_600_000, 1, TracedEvent::Entry)];
        stalls.record_until(4_000_000);

        assert_eq!(total(&stalls, "translation.level2"), (1, 10));
    }
}
