// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Finds a text in the guest's console output. It marks the start of the guest's init for guests that do
//! not write the boot timer.

use std::{
    fmt,
    io::{self, Write},
};

/// A writer that calls a function when a text is written for the first time.
pub struct PatternMatcher<W> {
    to: W,
    pattern: Vec<u8>,
    /// The last bytes written, at most as many as the pattern has; empty after the match.
    last: Vec<u8>,
    on_match: Option<Box<dyn FnOnce() + Send>>,
}

impl<W> fmt::Debug for PatternMatcher<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PatternMatcher").field("pattern", &self.pattern).finish_non_exhaustive()
    }
}

impl<W: Write> PatternMatcher<W> {
    /// Returns a writer to `to` that searches for `pattern`; an empty pattern never matches.
    pub fn new(to: W, pattern: &str, on_match: Box<dyn FnOnce() + Send>) -> Self {
        Self {
            to,
            pattern: pattern.into(),
            last: Vec::new(),
            on_match: (!pattern.is_empty()).then_some(on_match),
        }
    }

    fn search(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if self.last.len() == self.pattern.len() {
                self.last.remove(0);
            }
            self.last.push(*byte);
            if self.last == self.pattern
                && let Some(on_match) = self.on_match.take()
            {
                self.last = Vec::new();
                return on_match();
            }
        }
    }
}

impl<W: Write> Write for PatternMatcher<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.on_match.is_some() {
            self.search(bytes);
        }
        // A partial write would pass the same bytes to the search again.
        self.to.write_all(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_pattern_is_found_once_across_writes() {
        let (sender, matches) = mpsc::channel();
        let mut output = Vec::new();
        let on_match = Box::new(move || sender.send(()).unwrap());
        let mut matcher = PatternMatcher::new(&mut output, "aab", on_match);

        for part in ["a", "aa"] {
            matcher.write_all(part.as_bytes()).unwrap();
            assert!(matches.try_recv().is_err());
        }
        matcher.write_all(b"b").unwrap();
        assert!(matches.try_recv().is_ok());
        matcher.write_all(b" aab").unwrap();

        assert!(matches.try_recv().is_err());
        assert_eq!(output, b"aaab aab");
    }
}
