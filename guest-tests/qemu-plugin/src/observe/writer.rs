// SPDX-License-Identifier: GPL-2.0-or-later
//! Output of the trace.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use granule_stage2::check::machine::event::{HEADER, MachineEvent};

/// Writer of a trace. The first error ends the output.
pub struct TraceWriter {
    out: Box<dyn Write + Send>,
    events: u64,
    skipped: BTreeMap<String, u64>,
    error: Option<io::Error>,
}

impl std::fmt::Debug for TraceWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TraceWriter").field("events", &self.events).finish_non_exhaustive()
    }
}

impl TraceWriter {
    /// Returns a writer to `out` that has written the header.
    pub fn new(out: Box<dyn Write + Send>) -> Self {
        let mut writer = Self { out, events: 0, skipped: BTreeMap::new(), error: None };
        writer.line(format_args!("{HEADER}"));
        writer
    }

    /// Writes an event.
    pub fn event(&mut self, event: &MachineEvent) {
        self.events += 1;
        self.line(format_args!("{event}"));
    }

    /// Counts what is not reported.
    pub fn skip(&mut self, what: &str) {
        match self.skipped.get_mut(what) {
            Some(count) => *count += 1,
            None => drop(self.skipped.insert(what.to_owned(), 1)),
        }
    }

    /// Writes a comment.
    pub fn comment(&mut self, text: std::fmt::Arguments<'_>) {
        self.line(format_args!("# {text}"));
    }

    /// Writes the last line, which shows that the trace is complete.
    ///
    /// # Errors
    /// This or an earlier line cannot be written.
    pub fn finish(&mut self) -> io::Result<()> {
        let skipped: Vec<_> =
            self.skipped.iter().map(|(what, count)| format!("{what}:{count}")).collect();
        let (events, skipped) = (self.events, skipped.join(","));
        self.line(format_args!("# end events={events} skipped={skipped}"));
        match self.error.take() {
            Some(error) => Err(error),
            None => self.out.flush(),
        }
    }

    fn line(&mut self, text: std::fmt::Arguments<'_>) {
        if self.error.is_none() {
            self.error = writeln!(self.out, "{text}").err();
        }
    }
}
