// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Samples of stage-2 faults, of what the kernel maps for them, of entries into the guest and of waits for
//! locks of the kernel, of the threads of this process.
//!
//! The kernel writes a sample of each event, with its thread and time, to the ring buffer of the CPU
//! that executes it. There is one buffer a CPU and event, because events that threads inherit
//! need a buffer of one CPU. The samples of a thread are thus in several buffers, and only their
//! times order them. Open the trace before the vCPU threads start.
//!
//! No tracepoint has the size that a fault maps: a [probe](super::map_probe) has it.

use std::{fmt, fs, io};

use granule_types::{cpu_list::CpuList, units::Bytes};
use perf_event::{Builder, Clock, SampleFlag, Sampler, data::Record};

use super::{config::StallDetail, map_probe};
use crate::{
    arch::host,
    kvm::tracepoints::{add_cause, find_event, find_tracefs, read_event_file, set_filter},
};

/// Size of a buffer in bytes: about 3,500 samples.
const BUFFER_SIZE: usize = 256 << 10;
/// Tracepoints of waits for a lock (Linux 5.19). Waits for several locks may be nested, as in a
/// reader-writer lock, and one that spins and then sleeps begins more than once.
const LOCK_WAITS: [(&str, EventOf); 2] = [
    ("lock/contention_begin", |lock| Some(TracedEvent::LockWait(lock))),
    ("lock/contention_end", |lock| Some(TracedEvent::LockWaitEnd(lock))),
];
/// Field of these tracepoints with the address of the lock.
const LOCK_FIELD: &str = "lock_addr";

/// Returns the event of a sample by its value.
type EventOf = fn(u64) -> Option<TracedEvent>;

/// An event of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TracedEvent {
    /// A stage-2 abort on memory, with its name by type and level.
    Fault(&'static str),
    /// A mapping of this size, of a page or a block.
    Map(Bytes),
    /// An entry into the guest.
    Entry,
    /// The start of a wait for the kernel's lock at this address, or of a further part of it.
    LockWait(u64),
    /// The end of the wait for this lock.
    LockWaitEnd(u64),
    /// Samples that the kernel dropped because a buffer was full.
    Lost(u64),
    /// Samples of mappings that it dropped. Population of stage 2 maps more than a buffer holds.
    LostMaps(u64),
}

/// A sample of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// Time by `CLOCK_MONOTONIC`; 0 for lost ones.
    pub nanoseconds: u64,
    /// Thread of the event.
    pub thread: u32,
    /// The event.
    pub event: TracedEvent,
}

impl Sample {
    /// Returns the number of samples of faults that are lost without this one, which may be a record of
    /// others. Without a size, a fault is not lost.
    pub const fn lost(&self) -> u64 {
        match self.event {
            TracedEvent::Lost(count) => count,
            TracedEvent::Map(_) | TracedEvent::LostMaps(_) => 0,
            _ => 1,
        }
    }

    /// Returns the number of lost samples of sizes that this one is a record of.
    pub const fn lost_sizes(&self) -> u64 {
        match self.event {
            TracedEvent::LostMaps(count) => count,
            _ => 0,
        }
    }
}

/// The buffers of all CPUs.
pub struct FaultTrace {
    samplers: Vec<TracedSampler>,
    has_lock_waits: bool,
}

/// A buffer, and the place in its samples of the field that an event needs.
struct TracedSampler {
    sampler: Sampler,
    /// Returns the event of samples that are lost.
    lost: fn(u64) -> TracedEvent,
    field: Option<Field>,
    event: EventOf,
}

impl fmt::Debug for FaultTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultTrace")
            .field("samplers", &self.samplers.len())
            .field("has_lock_waits", &self.has_lock_waits)
            .finish()
    }
}

impl FaultTrace {
    /// Opens the tracepoints on each CPU that is online.
    ///
    /// # Errors
    /// The host does not trace faults by level, has no probes for the sizes, a file is missing, or the
    /// kernel refuses a call.
    pub fn open(detail: StallDetail) -> io::Result<Self> {
        let (faults, syndrome) = host::FAULT_SYNDROME.ok_or_else(|| {
            io::Error::other("KVM of this architecture does not trace the level of a fault")
        })?;
        let mut events: Vec<(&str, Option<Field>, EventOf)> = vec![
            (faults, Some(find_field(faults, syndrome)?), |syndrome| {
                host::fault_name(syndrome).map(TracedEvent::Fault)
            }),
            ("kvm_entry", None, |_| Some(TracedEvent::Entry)),
        ];
        let fields = LOCK_WAITS.map(|(name, _)| find_field(name, LOCK_FIELD).ok());
        let has_lock_waits = fields.iter().all(Option::is_some);
        if has_lock_waits {
            let locks = LOCK_WAITS.into_iter().zip(fields);
            events.extend(locks.map(|((name, event), field)| (name, field, event)));
        }
        if detail == StallDetail::Sizes {
            map_probe::add()?;
            let field = find_field(map_probe::NAME, map_probe::SIZE_FIELD)?;
            let event: EventOf = |size| Some(TracedEvent::Map(Bytes(size)));
            events.push((map_probe::NAME, Some(field), event));
        }
        let cpus = fs::read_to_string("/sys/devices/system/cpu/online")?;
        let cpus: CpuList = cpus.parse().map_err(io::Error::other)?;
        let mut samplers = Vec::new();
        for &cpu in cpus.cpus() {
            for &(name, field, event) in &events {
                let sampler = open_sampler(name, cpu)?;
                let lost = match name {
                    map_probe::NAME => TracedEvent::LostMaps,
                    _ => TracedEvent::Lost,
                };
                samplers.push(TracedSampler { sampler, lost, field, event });
            }
        }
        Ok(Self { samplers, has_lock_waits })
    }

    /// Returns whether the trace has waits for locks.
    pub const fn has_lock_waits(&self) -> bool {
        self.has_lock_waits
    }

    /// Moves all samples of the buffers to `samples`.
    pub fn drain(&mut self, samples: &mut Vec<Sample>) {
        for TracedSampler { sampler, lost, field, event } in &mut self.samplers {
            let event = |data: &[u8]| event(field.map_or(Some(0), |field| field.read(data))?);
            drain(sampler, samples, *lost, event);
        }
    }
}

/// Returns the place of a field of a tracepoint.
fn find_field(tracepoint: &str, name: &str) -> io::Result<Field> {
    let format = read_event_file(find_tracefs(), tracepoint, "format")?;
    Field::find(&format, name)
        .ok_or_else(|| io::Error::other(format!("{tracepoint} has no field '{name}'")))
}

fn drain(
    sampler: &mut Sampler,
    samples: &mut Vec<Sample>,
    lost_event: fn(u64) -> TracedEvent,
    event: impl Fn(&[u8]) -> Option<TracedEvent>,
) {
    while let Some(record) = sampler.next_record() {
        match record.parse_record() {
            Ok(Record::Sample(sample)) => {
                let event = sample.raw().and_then(&event);
                if let (Some(nanoseconds), Some(thread), Some(event)) =
                    (sample.time(), sample.tid(), event)
                {
                    samples.push(Sample { nanoseconds, thread, event });
                }
            }
            Ok(Record::Lost(lost)) => {
                let event = lost_event(lost.lost);
                samples.push(Sample { nanoseconds: 0, thread: 0, event });
            }
            _ => {}
        }
    }
}

/// Opens a tracepoint on a CPU for all threads that this thread starts later.
fn open_sampler(tracepoint: &str, cpu: usize) -> io::Result<Sampler> {
    let counter = Builder::new(find_event(find_tracefs(), tracepoint)?)
        .inherit(true)
        .one_cpu(cpu)
        .include_kernel()
        .sample_period(1)
        .sample(SampleFlag::TID | SampleFlag::TIME | SampleFlag::RAW)
        .clockid(Clock::MONOTONIC)
        .build()
        .map_err(|error| add_cause("perf_event_open", error))?;
    let counter = match host::FAULT_SYNDROME {
        Some((faults, _)) if faults == tracepoint => set_filter(counter, host::MEMORY_FILTER)?,
        _ => counter,
    };
    let mut sampler =
        counter.sampled(BUFFER_SIZE).map_err(|error| add_cause("mmap of a perf event", error))?;
    sampler.as_counter_mut().enable().map_err(|error| add_cause("perf_event_open", error))?;
    Ok(sampler)
}

/// Place of a field in the data of a tracepoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Field {
    offset: usize,
    size: usize,
}

impl Field {
    /// Returns the field in the `format` file of a tracepoint
    /// (`Documentation/trace/events.rst`, 3).
    fn find(format: &str, name: &str) -> Option<Self> {
        let line = format.lines().find(|line| {
            let declaration = line.trim().strip_prefix("field:");
            let declaration = declaration.and_then(|line| line.split_once(';'));
            declaration.is_some_and(|(text, _)| text.split_whitespace().last() == Some(name))
        })?;
        let value =
            |key| line.split(';').find_map(|part| part.trim().strip_prefix(key)?.parse().ok());
        let field = Self { offset: value("offset:")?, size: value("size:")? };
        (field.size <= size_of::<u64>()).then_some(field)
    }

    fn read(self, data: &[u8]) -> Option<u64> {
        let bytes = data.get(self.offset..self.offset.checked_add(self.size)?)?;
        let mut value = [0; 8];
        value[..self.size].copy_from_slice(bytes);
        Some(u64::from_le_bytes(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_read_at_the_place_that_its_format_names() {
        let format = "name: kvm_guest_fault\nformat:\n\
            \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\n\
            \tfield:unsigned long hsr;\toffset:16;\tsize:8;\tsigned:0;\n\
            print fmt: \"ipa %#llx, hsr %#08lx\", REC->ipa, REC->hsr\n";
        let mut data = [0; 24];
        data[16] = 7;
        data[23] = 1;

        let field = Field::find(format, "hsr").unwrap();

        assert_eq!(field, Field { offset: 16, size: 8 });
        assert_eq!(field.read(&data), Some(1 << 56 | 7));
        assert_eq!(field.read(&data[..23]), None);
        assert_eq!(Field::find(format, "ipa"), None);
    }
}
