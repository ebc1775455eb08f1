// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The text of a trace: events, and comments that make a kept trace complete.
//!
//! ```text
//! granule-machine-trace 1
//! # setup {"linux":"5.10",…}
//! 0 stack 0 ffff800010073a2c
//! # place ffff800010073a2c stage2_map_walk_leaf+0x94 arch/arm64/kvm/hyp/pgtable.c:512
//! 0 vtcr 80023558
//! # end events=2 skipped=
//! ```
//!
//! The plugin writes the header, the events and the end; the lab adds `setup` and `place`.

use std::io;

use granule_stage2::check::machine::{
    MachineEvent,
    event::{HEADER, ParseMachineEventError},
};
use thiserror::Error;

use super::setup::Setup;

const SETUP: &str = "# setup ";
const PLACE: &str = "# place ";
const END: &str = "# end ";

/// Error returned for an unusable trace.
#[derive(Debug, Error)]
pub enum TraceError {
    #[error("it does not begin with '{HEADER}': it is no trace, or of another version of granule")]
    NoHeader,
    #[error("line {line} is no event ({reason}): {text}")]
    Malformed { line: u64, reason: String, text: String },
    #[error("it has no last line '# end': the emulator was killed, or the file is truncated")]
    Truncated,
    #[error("it has {found} events instead of {expected}: the file is damaged")]
    Incomplete { found: u64, expected: u64 },
    #[error(
        "it has no line '# setup', which `granule lab check --keep-trace` writes: replay such a \
         trace"
    )]
    NoSetup,
    #[error("cannot read it")]
    Read(#[from] io::Error),
}

/// Returns the error of a malformed line.
fn malformed(line: u64, reason: String, text: &str) -> TraceError {
    let text = text.trim_end().chars().take(200).collect();
    TraceError::Malformed { line, reason, text }
}

/// A line of a trace.
#[derive(Debug)]
pub enum Line {
    Event(MachineEvent),
    Setup(Box<Setup>),
    /// The place of an instruction: its address, and the text of a frame.
    Place(u64, String),
    /// A comment, or the end of the trace.
    Comment,
}

/// Parser of a trace, line by line.
#[derive(Debug, Default)]
pub struct Parser {
    lines: u64,
    events: u64,
    /// Number of events in the last line.
    end: Option<u64>,
}

impl Parser {
    /// Reports whether no line has been parsed.
    pub const fn is_at_start(&self) -> bool {
        self.lines == 0
    }

    /// Returns the error of the last line, which does not fit the setup.
    pub fn misfit(&self, text: &str, reason: String) -> TraceError {
        malformed(self.lines, reason, text)
    }

    /// Parses the next line.
    ///
    /// # Errors
    /// The line belongs to no trace.
    pub fn line(&mut self, text: &str) -> Result<Line, TraceError> {
        self.lines += 1;
        let text = text.trim_end();
        if self.lines == 1 {
            return if text == HEADER { Ok(Line::Comment) } else { Err(TraceError::NoHeader) };
        }
        let line = self.lines;
        let malformed = |reason: String| malformed(line, reason, text);
        if !text.starts_with('#') {
            let refused = |error: ParseMachineEventError| malformed(error.to_string());
            let event = text.parse().map_err(refused)?;
            self.events += 1;
            return Ok(Line::Event(event));
        }
        if let Some(setup) = text.strip_prefix(SETUP) {
            let setup =
                serde_json::from_str(setup).map_err(|error| malformed(error.to_string()))?;
            return Ok(Line::Setup(Box::new(setup)));
        }
        if let Some((address, place)) = text.strip_prefix(PLACE).and_then(|t| t.split_once(' ')) {
            let address = u64::from_str_radix(address, 16);
            let address = address.map_err(|error| malformed(error.to_string()))?;
            return Ok(Line::Place(address, place.to_owned()));
        }
        if let Some(end) = text.strip_prefix(END) {
            let events = end.split(' ').find_map(|word| word.strip_prefix("events=")?.parse().ok());
            self.end = Some(events.ok_or_else(|| malformed("no number of events".to_owned()))?);
        }
        Ok(Line::Comment)
    }

    /// Checks that the trace is complete.
    ///
    /// # Errors
    /// It has no last line, or too few events.
    pub fn finish(&self) -> Result<(), TraceError> {
        match self.end {
            None if self.lines == 0 => Err(TraceError::NoHeader),
            None => Err(TraceError::Truncated),
            Some(expected) if expected != self.events => {
                Err(TraceError::Incomplete { found: self.events, expected })
            }
            Some(_) => Ok(()),
        }
    }
}

/// Formats the line of a setup.
pub fn setup_line(setup: &Setup) -> String {
    // A setup consists of numbers and strings, which have a JSON text.
    format!("{SETUP}{}\n", serde_json::to_string(setup).unwrap_or_default())
}

/// Formats the line of a place.
pub fn place_line(address: u64, place: &str) -> String {
    format!("{PLACE}{address:x} {place}\n")
}

#[cfg(test)]
mod tests {
    use super::{super::setup::tests::setup, *};

    fn parse(text: &str) -> Result<Vec<Line>, TraceError> {
        let mut parser = Parser::default();
        let lines = text.lines().map(|line| parser.line(line)).collect::<Result<_, _>>()?;
        parser.finish().map(|()| lines)
    }

    #[test]
    fn lines_of_the_lab_are_parsed_as_written() {
        let place = place_line(0xffff_8000_1007_3a2c, "stage2_map_walk_leaf+0x94");
        let text = format!("{HEADER}\n{}0 isb\n{place}# end events=1 x\n", setup_line(&setup()));

        let lines = parse(&text).unwrap();

        assert!(matches!(&lines[1], Line::Setup(parsed) if **parsed == setup()));
        assert!(matches!(&lines[2], Line::Event(_)));
        let Line::Place(address, place) = &lines[3] else { panic!("{:?}", lines[3]) };
        assert_eq!(
            (*address, place.as_str()),
            (0xffff_8000_1007_3a2c, "stage2_map_walk_leaf+0x94")
        );
    }

    #[test]
    fn an_unusable_trace_is_refused_with_the_reason() {
        for (text, reason) in [
            (String::new(), "does not begin with"),
            ("0 isb\n".to_owned(), "does not begin with"),
            (format!("{HEADER}\n0 isb\n"), "no last line '# end'"),
            (format!("{HEADER}\n0 is\n"), "line 2 is no event (unknown word): 0 is"),
            (format!("{HEADER}\n# end events=2\n"), "0 events instead of 2"),
            (format!("{HEADER}\n# end\n# end x\n"), "no number of events"),
        ] {
            let error = parse(&text).unwrap_err().to_string();

            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
