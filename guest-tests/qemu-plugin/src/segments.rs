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
//! (outside any phase). The file ends with `{"end":true,"segments":N}`.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, Write},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use serde::Serialize;

use crate::{
    clock::Time,
    decode::{FIRST_MARK, SysOperation},
};

/// Number of slots: more than the `SYS` encodings with Cn 7, 8 or 9 (3 × 1024) and functions.
const SLOTS: usize = 4096;

/// Event that a slot counts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// A maintenance instruction.
    Maintenance(SysOperation),
    /// Calls of a function, by the name of its count.
    Function(String),
    /// Any instruction.
    Any,
}

impl Event {
    fn name(&self) -> String {
        match self {
            Self::Maintenance(sys) => sys.name(),
            Self::Function(name) => name.clone(),
            Self::Any => "instructions".to_owned(),
        }
    }
}

type Counts = BTreeMap<String, u64>;

#[derive(Serialize)]
struct Segment {
    seq: u64,
    mark: u8,
    counts: Counts,
    per_cpu: BTreeMap<usize, Counts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<Time>,
}

/// Times of a segment, and the CPU of each row of counts.
#[derive(Debug, Default)]
pub struct Clocked {
    /// Times of the segment that ends.
    pub time: Option<Time>,
    /// CPU number of a row, where it differs from the row's index.
    pub numbers: BTreeMap<usize, usize>,
}

#[derive(Serialize)]
struct End {
    end: bool,
    segments: u64,
}

/// Counters of each CPU, and the output.
pub struct Segments<W> {
    rows: Vec<Box<[AtomicU64]>>,
    state: Mutex<SegmentWriter<W>>,
}

/// State that changes at a translation or a mark only.
struct SegmentWriter<W> {
    slots: HashMap<Event, usize>,
    names: Vec<String>,
    seq: u64,
    mark: u8,
    out: W,
    failed: bool,
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
            rows: (0..cpus).map(|_| (0..SLOTS).map(|_| AtomicU64::new(0)).collect()).collect(),
            state: Mutex::new(SegmentWriter {
                slots: HashMap::new(),
                names: Vec::new(),
                seq: 0,
                mark: FIRST_MARK,
                out,
                failed: false,
            }),
        }
    }

    /// Returns the slot of an event, which never changes.
    pub fn slot(&self, event: Event) -> usize {
        let state = &mut *self.lock();
        if let Some(slot) = state.slots.get(&event) {
            return *slot;
        }
        let slot = state.names.len().min(SLOTS - 1);
        state.names.push(event.name());
        state.slots.insert(event, slot);
        slot
    }

    /// Adds to the count of a CPU.
    pub fn count(&self, cpu: usize, slot: usize, increment: u64) {
        if let Some(counter) = self.rows.get(cpu).and_then(|row| row.get(slot)) {
            counter.fetch_add(increment, Ordering::Relaxed);
        }
    }

    /// Ends the segment and starts one with this mark.
    ///
    /// # Errors
    /// The line cannot be written; the file will have no end line.
    pub fn mark(&self, mark: u8, clocked: Clocked) -> io::Result<()> {
        let state = &mut *self.lock();
        let written = self.close(state, clocked);
        state.mark = mark;
        written
    }

    /// Ends the last segment and writes the end line.
    ///
    /// # Errors
    /// This or an earlier line cannot be written.
    pub fn finish(&self, clocked: Clocked) -> io::Result<()> {
        let state = &mut *self.lock();
        self.close(state, clocked)?;
        if state.failed {
            return Err(io::Error::other("an earlier segment could not be written"));
        }
        let end = End { end: true, segments: state.seq };
        write_line(&mut state.out, &end)
    }

    fn close(&self, state: &mut SegmentWriter<W>, clocked: Clocked) -> io::Result<()> {
        let mut segment = Segment {
            seq: state.seq,
            mark: state.mark,
            counts: Counts::new(),
            per_cpu: BTreeMap::new(),
            time: clocked.time,
        };
        for (index, row) in self.rows.iter().enumerate() {
            let cpu = clocked.numbers.get(&index).copied().unwrap_or(index);
            for (name, counter) in state.names.iter().zip(row) {
                let count = counter.swap(0, Ordering::Relaxed);
                if count != 0 {
                    *segment.counts.entry(name.clone()).or_default() += count;
                    let own = segment.per_cpu.entry(cpu).or_default();
                    *own.entry(name.clone()).or_default() += count;
                }
            }
        }
        state.seq += 1;
        let written = write_line(&mut state.out, &segment);
        state.failed |= written.is_err();
        written
    }

    fn lock(&self) -> MutexGuard<'_, SegmentWriter<W>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
            segments.mark(0x61, Clocked::default()).unwrap();
            segments.count(0, civac, 1);
            segments.count(1, civac, 1);
            segments.count(1, aborts, 1);
            segments.mark(0x60, Clocked::default()).unwrap();
            segments.finish(Clocked::default()).unwrap();
        }

        assert_eq!(
            String::from_utf8(file).unwrap(),
            concat!(
                r#"{"seq":0,"mark":96,"counts":{"DC CIVAC":1},"per_cpu":{"0":{"DC CIVAC":1}}}"#,
                "\n",
                r#"{"seq":1,"mark":97,"counts":{"DC CIVAC":2,"guest_aborts":1},"#,
                r#""per_cpu":{"0":{"DC CIVAC":1},"1":{"DC CIVAC":1,"guest_aborts":1}}}"#,
                "\n",
                r#"{"seq":2,"mark":96,"counts":{},"per_cpu":{}}"#,
                "\n",
                r#"{"end":true,"segments":3}"#,
                "\n",
            )
        );
    }

    #[test]
    fn an_event_has_one_slot() {
        let segments = Segments::new(1, Vec::new());

        assert_eq!(segments.slot(CIVAC), segments.slot(CIVAC));
    }

    #[test]
    fn a_file_that_lost_a_segment_has_no_end_line() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::Error::from(io::ErrorKind::StorageFull))
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let segments = Segments::new(1, Full);

        assert!(segments.mark(0x61, Clocked::default()).is_err());
        assert!(segments.finish(Clocked::default()).is_err());
    }
}
