// SPDX-License-Identifier: GPL-2.0-or-later
//! Counters of the segments between marks, and their output.
//!
//! Each counted event has a slot, assigned when its first instruction is translated. Each emulated
//! CPU has a row of slots, so CPUs do not contend. A mark resets all rows and writes them as a
//! line:
//!
//! ```json
//! {"seq":1,"mark":97,"counts":{"DC CIVAC":32768},"per_cpu":{"0":{"DC CIVAC":32768}}}
//! ```
//!
//! `mark` is the mark that started the segment; the first segment, from power-on, has mark 0x60
//! (outside any phase). A segment inside a [span](crate::span) has its name as `span`; the segments
//! before and after it have the same mark. `blocks` has the counts of [blocks](crate::blocks), if they
//! are counted: executions and instructions, by address. The file ends with
//! `{"end":true,"segments":N}`.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, Write},
    ops::RangeInclusive,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use serde::Serialize;

use crate::{
    blocks::{BlockCounts, Blocks},
    clock::VirtualTime,
    decode::{FIRST_MARK, SysOperation},
};

/// Marks of a VMM: the start of its guest, and of the guest's init (`granule_types::mark`).
const VMM_MARKS: RangeInclusive<u8> = 0x71..=0x72;

/// Marks of the steps of a program (`granule_types::mark`).
const STEP_MARKS: RangeInclusive<u8> = 0x78..=0x7f;

/// Number of slots, enough for all `SYS` encodings with Cn 7, 8 or 9 (3 × 1024) and functions.
const MAX_SLOTS: usize = 4096;

/// Event that a slot counts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// A maintenance instruction.
    Maintenance(SysOperation),
    /// Call of a function, with the name of its count.
    Function(String),
    /// An interval with this name.
    Interval(String),
    /// An instruction in the interval with this name.
    InInterval(String),
    /// Any instruction.
    Instruction,
    /// A store.
    Store,
    /// A `DSB` or `ISB`, by its name.
    Barrier(&'static str),
    /// A data access that the model of TLBs observes.
    Access(Addresses),
    /// A walk of the copy with this grain in bytes.
    Walk(Addresses, u64),
}

/// Addresses of accesses and walks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Addresses {
    /// Addresses of any kind.
    All,
    /// Addresses of the linear map.
    Linear,
}

impl Addresses {
    const fn prefix(self) -> &'static str {
        match self {
            Self::All => "",
            Self::Linear => "linear ",
        }
    }
}

impl Event {
    fn name(&self) -> String {
        match self {
            Self::Maintenance(sys) => sys.name(),
            Self::Function(name) | Self::Interval(name) => name.clone(),
            Self::InInterval(name) => format!("{name}_ns"),
            Self::Instruction => "instructions".to_owned(),
            Self::Store => "stores".to_owned(),
            Self::Barrier(name) => (*name).to_owned(),
            Self::Access(addresses) => format!("{}accesses", addresses.prefix()),
            Self::Walk(addresses, grain) => format!("{}walks {}K", addresses.prefix(), grain >> 10),
        }
    }
}

type Counts = BTreeMap<String, u64>;

#[derive(Serialize)]
struct SegmentLine {
    seq: u64,
    mark: u8,
    #[serde(skip_serializing_if = "Option::is_none")]
    span: Option<String>,
    counts: Counts,
    per_cpu: BTreeMap<usize, Counts>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    blocks: BTreeMap<String, BlockCounts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<VirtualTime>,
}

/// Virtual time of a segment, and the CPU of each row of counts.
#[derive(Debug, Default)]
pub struct SegmentTimes {
    /// Virtual time of the segment that ends, if it is measured.
    pub time: Option<VirtualTime>,
    /// CPU number of a row, where it differs from the row's index.
    pub cpu_of_row: BTreeMap<usize, usize>,
}

#[derive(Serialize)]
struct EndLine {
    end: bool,
    segments: u64,
}

/// Counters of each CPU, and the output.
pub struct Segments<W> {
    rows: Vec<Box<[AtomicU64]>>,
    blocks: Blocks,
    writer: Mutex<SegmentWriter<W>>,
}

/// State that only translations and marks change.
struct SegmentWriter<W> {
    slots: HashMap<Event, usize>,
    names: Vec<String>,
    seq: u64,
    mark: u8,
    /// Name of the span that is open.
    span: Option<String>,
    out: W,
    has_write_failed: bool,
}

impl<W> std::fmt::Debug for Segments<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Segments").field("cpus", &self.rows.len()).finish_non_exhaustive()
    }
}

impl<W: Write> Segments<W> {
    /// Returns counters for CPUs 0 to `cpus` - 1 that are written to `out`.
    pub fn new(cpus: usize, out: W) -> Self {
        Self {
            rows: (0..cpus).map(|_| (0..MAX_SLOTS).map(|_| AtomicU64::new(0)).collect()).collect(),
            blocks: Blocks::default(),
            writer: Mutex::new(SegmentWriter {
                slots: HashMap::new(),
                names: Vec::new(),
                seq: 0,
                mark: FIRST_MARK,
                span: None,
                out,
                has_write_failed: false,
            }),
        }
    }

    /// Returns the slot of an event; assigns one to a new event.
    pub fn slot(&self, event: Event) -> usize {
        let writer = &mut *self.lock();
        if let Some(slot) = writer.slots.get(&event) {
            return *slot;
        }
        let slot = writer.names.len().min(MAX_SLOTS - 1);
        writer.names.push(event.name());
        writer.slots.insert(event, slot);
        slot
    }

    /// Adds to the count of a CPU.
    pub fn count(&self, cpu: usize, slot: usize, increment: u64) {
        if let Some(counter) = self.rows.get(cpu).and_then(|row| row.get(slot)) {
            counter.fetch_add(increment, Ordering::Relaxed);
        }
    }

    /// Returns the counts of blocks, which each segment contains.
    pub const fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Returns whether a mark begins a segment. The marks of a VMM that a program runs in one of its
    /// steps do not: the start of the guest belongs to the step.
    pub fn begins_segment(&self, mark: u8) -> bool {
        !VMM_MARKS.contains(&mark) || !STEP_MARKS.contains(&self.lock().mark)
    }

    /// Ends the segment and starts one with this mark.
    ///
    /// # Errors
    /// The line cannot be written; the file will have no end line.
    pub fn mark(&self, mark: u8, times: SegmentTimes) -> io::Result<()> {
        let writer = &mut *self.lock();
        let written = self.write_segment(writer, times);
        writer.mark = mark;
        written
    }

    /// Returns whether a span is open.
    pub fn is_in_span(&self) -> bool {
        self.lock().span.is_some()
    }

    /// Ends the segment and starts one in this span, or outside any span.
    ///
    /// # Errors
    /// The line cannot be written; the file will have no end line.
    pub fn set_span(&self, span: Option<&str>, times: SegmentTimes) -> io::Result<()> {
        let writer = &mut *self.lock();
        let written = self.write_segment(writer, times);
        writer.span = span.map(str::to_owned);
        written
    }

    /// Ends the last segment and writes the end line.
    ///
    /// # Errors
    /// This or an earlier line cannot be written.
    pub fn finish(&self, times: SegmentTimes) -> io::Result<()> {
        let writer = &mut *self.lock();
        self.write_segment(writer, times)?;
        if writer.has_write_failed {
            return Err(io::Error::other("an earlier segment could not be written"));
        }
        let end = EndLine { end: true, segments: writer.seq };
        write_line(&mut writer.out, &end)
    }

    fn write_segment(&self, writer: &mut SegmentWriter<W>, times: SegmentTimes) -> io::Result<()> {
        // A function without a call has the count 0, so that it differs from one that is not counted.
        let functions = writer.slots.keys().filter(|event| matches!(event, Event::Function(_)));
        let mut segment = SegmentLine {
            seq: writer.seq,
            mark: writer.mark,
            span: writer.span.clone(),
            counts: functions.map(|event| (event.name(), 0)).collect(),
            per_cpu: BTreeMap::new(),
            blocks: self.blocks.take(),
            time: times.time,
        };
        for (index, row) in self.rows.iter().enumerate() {
            let cpu = times.cpu_of_row.get(&index).copied().unwrap_or(index);
            for (name, counter) in writer.names.iter().zip(row) {
                let count = counter.swap(0, Ordering::Relaxed);
                if count != 0 {
                    *segment.counts.entry(name.clone()).or_default() += count;
                    let own = segment.per_cpu.entry(cpu).or_default();
                    *own.entry(name.clone()).or_default() += count;
                }
            }
        }
        writer.seq += 1;
        let written = write_line(&mut writer.out, &segment);
        writer.has_write_failed |= written.is_err();
        written
    }

    fn lock(&self) -> MutexGuard<'_, SegmentWriter<W>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn write_line(out: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    out.write_all(b"\n")?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CIVAC: Event = Event::Maintenance(SysOperation { op1: 3, cn: 7, cm: 14, op2: 1 });

    #[test]
    fn counts_are_assigned_to_segment_and_cpu() {
        let mut file = Vec::new();
        {
            let segments = Segments::new(2, &mut file);
            let civac = segments.slot(CIVAC);
            let aborts = segments.slot(Event::Function("guest_aborts".to_owned()));

            segments.count(0, civac, 1);
            segments.mark(0x61, SegmentTimes::default()).unwrap();
            segments.count(0, civac, 1);
            segments.count(1, civac, 1);
            segments.count(1, aborts, 1);
            segments.mark(0x60, SegmentTimes::default()).unwrap();
            segments.finish(SegmentTimes::default()).unwrap();
        }

        assert_eq!(
            String::from_utf8(file).unwrap(),
            concat!(
                r#"{"seq":0,"mark":96,"counts":{"DC CIVAC":1,"guest_aborts":0},"#,
                r#""per_cpu":{"0":{"DC CIVAC":1}}}"#,
                "\n",
                r#"{"seq":1,"mark":97,"counts":{"DC CIVAC":2,"guest_aborts":1},"#,
                r#""per_cpu":{"0":{"DC CIVAC":1},"1":{"DC CIVAC":1,"guest_aborts":1}}}"#,
                "\n",
                r#"{"seq":2,"mark":96,"counts":{"guest_aborts":0},"per_cpu":{}}"#,
                "\n",
                r#"{"end":true,"segments":3}"#,
                "\n",
            )
        );
    }

    #[test]
    fn a_guest_starts_no_segment_in_a_step() {
        let segments = Segments::new(1, Vec::new());
        assert!(segments.begins_segment(0x71));

        segments.mark(0x78, SegmentTimes::default()).unwrap();

        assert!(!segments.begins_segment(0x71));
        assert!(!segments.begins_segment(0x72));
        assert!(segments.begins_segment(0x60));
    }

    #[test]
    fn a_span_is_a_segment_with_the_mark_around_it() {
        let mut file = Vec::new();
        {
            let segments = Segments::new(1, &mut file);
            let stores = segments.slot(Event::Store);

            segments.mark(0x61, SegmentTimes::default()).unwrap();
            segments.set_span(Some("f"), SegmentTimes::default()).unwrap();
            assert!(segments.is_in_span());
            segments.count(0, stores, 3);
            segments.set_span(None, SegmentTimes::default()).unwrap();
            assert!(!segments.is_in_span());
            segments.finish(SegmentTimes::default()).unwrap();
        }

        let text = String::from_utf8(file).unwrap();
        let in_span = r#""mark":97,"span":"f","counts":{"stores":3}"#;
        assert_eq!(text.matches(in_span).count(), 1, "{text}");
        assert_eq!(text.matches(r#""mark":97,"counts":{}"#).count(), 2, "{text}");
    }

    #[test]
    fn a_function_without_a_call_has_a_count() {
        let mut out = Vec::new();
        let segments = Segments::new(1, &mut out);
        segments.slot(Event::Function("guest_aborts".to_owned()));
        segments.slot(Event::Store);
        segments.finish(SegmentTimes::default()).unwrap();
        drop(segments);

        let text = String::from_utf8(out).unwrap();
        assert!(text.contains(r#""counts":{"guest_aborts":0}"#), "{text}");
    }

    #[test]
    fn an_event_has_one_slot() {
        let segments = Segments::new(1, Vec::new());

        assert_eq!(segments.slot(CIVAC), segments.slot(CIVAC));
    }

    #[test]
    fn a_file_without_all_segments_has_no_end_line() {
        struct FullDisk;
        impl Write for FullDisk {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::Error::from(io::ErrorKind::StorageFull))
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let segments = Segments::new(1, FullDisk);

        assert!(segments.mark(0x61, SegmentTimes::default()).is_err());
        assert!(segments.finish(SegmentTimes::default()).is_err());
    }
}
