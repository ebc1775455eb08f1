// SPDX-License-Identifier: GPL-2.0-or-later
//! What is counted between two marks, and how it is written down.
//!
//! Each thing that is counted has a slot, given out when its first instruction is translated; each
//! emulated CPU has its own row of slots, so no CPU waits for another. A mark takes all rows down
//! to zero and writes them as one line:
//!
//! ```json
//! {"seq":1,"mark":97,"counts":{"DC CIVAC":32768},"per_cpu":{"0":{"DC CIVAC":32768}}}
//! ```
//!
//! `mark` is the mark that began the segment; the first segment, from power-on, has mark 0x60
//! (outside). The file ends with `{"end":true,"segments":N}`.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, Write},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use serde::Serialize;

use crate::decode::{FIRST_MARK, Sys};

/// More than every `SYS` encoding with Cn 7, 8 or 9 (3 × 1024) and any list of functions.
const SLOTS: usize = 4096;

/// What a slot counts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Counted {
    /// A maintenance instruction.
    Instruction(Sys),
    /// The entry of a function, by the name given for it.
    Function(String),
    /// Any instruction.
    Any,
}

impl Counted {
    fn name(&self) -> String {
        match self {
            Self::Instruction(sys) => sys.name(),
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
}

#[derive(Serialize)]
struct End {
    end: bool,
    segments: u64,
}

/// All counters and the file that the segments go to.
pub struct Segments<W> {
    rows: Vec<Box<[AtomicU64]>>,
    book: Mutex<Book<W>>,
}

/// What changes rarely: at a translation or at a mark.
struct Book<W> {
    slots: HashMap<Counted, usize>,
    names: Vec<String>,
    seq: u64,
    mark: u8,
    out: W,
    failed: bool,
}

impl<W> std::fmt::Debug for Segments<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Segments")
            .field("cpus", &self.rows.len())
            .finish_non_exhaustive()
    }
}

impl<W: Write> Segments<W> {
    /// Counters for CPUs 0 to `cpus` - 1; segments go to `out`.
    pub fn new(cpus: usize, out: W) -> Self {
        Self {
            rows: (0..cpus)
                .map(|_| (0..SLOTS).map(|_| AtomicU64::new(0)).collect())
                .collect(),
            book: Mutex::new(Book {
                slots: HashMap::new(),
                names: Vec::new(),
                seq: 0,
                mark: FIRST_MARK,
                out,
                failed: false,
            }),
        }
    }

    /// The slot of what is counted; the same one each time.
    pub fn slot(&self, counted: Counted) -> usize {
        let book = &mut *self.book();
        if let Some(slot) = book.slots.get(&counted) {
            return *slot;
        }
        let slot = book.names.len().min(SLOTS - 1);
        book.names.push(counted.name());
        book.slots.insert(counted, slot);
        slot
    }

    /// So many more on this CPU.
    pub fn count(&self, cpu: usize, slot: usize, more: u64) {
        if let Some(counter) = self.rows.get(cpu).and_then(|row| row.get(slot)) {
            counter.fetch_add(more, Ordering::Relaxed);
        }
    }

    /// Ends the segment and begins one with this mark.
    ///
    /// # Errors
    /// The line cannot be written; the file then never gets its last line.
    pub fn mark(&self, mark: u8) -> io::Result<()> {
        let book = &mut *self.book();
        let written = self.close(book);
        book.mark = mark;
        written
    }

    /// Ends the last segment and the file.
    ///
    /// # Errors
    /// The lines cannot be written, or an earlier one could not.
    pub fn finish(&self) -> io::Result<()> {
        let book = &mut *self.book();
        self.close(book)?;
        if book.failed {
            return Err(io::Error::other("an earlier segment could not be written"));
        }
        let end = End {
            end: true,
            segments: book.seq,
        };
        line(&mut book.out, &end)
    }

    fn close(&self, book: &mut Book<W>) -> io::Result<()> {
        let mut segment = Segment {
            seq: book.seq,
            mark: book.mark,
            counts: Counts::new(),
            per_cpu: BTreeMap::new(),
        };
        for (cpu, row) in self.rows.iter().enumerate() {
            for (name, counter) in book.names.iter().zip(row) {
                let count = counter.swap(0, Ordering::Relaxed);
                if count != 0 {
                    *segment.counts.entry(name.clone()).or_default() += count;
                    let own = segment.per_cpu.entry(cpu).or_default();
                    *own.entry(name.clone()).or_default() += count;
                }
            }
        }
        book.seq += 1;
        let written = line(&mut book.out, &segment);
        book.failed |= written.is_err();
        written
    }

    fn book(&self) -> MutexGuard<'_, Book<W>> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn line(out: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    out.write_all(b"\n")?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CIVAC: Counted = Counted::Instruction(Sys {
        op1: 3,
        cn: 7,
        cm: 14,
        op2: 1,
    });

    #[test]
    fn counts_belong_to_the_segment_and_the_cpu_they_happened_on() {
        let mut file = Vec::new();
        {
            let segments = Segments::new(2, &mut file);
            let civac = segments.slot(CIVAC);
            let aborts = segments.slot(Counted::Function("guest_aborts".to_owned()));

            segments.count(0, civac, 1);
            segments.mark(0x61).unwrap();
            segments.count(0, civac, 1);
            segments.count(1, civac, 1);
            segments.count(1, aborts, 1);
            segments.mark(0x60).unwrap();
            segments.finish().unwrap();
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
    fn the_same_thing_has_one_slot() {
        let segments = Segments::new(1, Vec::new());

        assert_eq!(segments.slot(CIVAC), segments.slot(CIVAC));
    }

    #[test]
    fn a_file_that_lost_a_segment_gets_no_end() {
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

        assert!(segments.mark(0x61).is_err());
        assert!(segments.finish().is_err());
    }
}
