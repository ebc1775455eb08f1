// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Expect: waits until a program has printed a text, then sends a line.
//!
//! Each exchange searches for its text after the previous match. All output is logged. If the
//! program ends before it prints a text, the remaining exchanges are skipped.

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
};

use serde::{Deserialize, Serialize};

/// Text to wait for, and the line to send then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exchange {
    /// Expected text; not empty.
    pub expect: String,
    /// Line without line feed.
    pub send: String,
}

impl Exchange {
    /// Returns the exchange that sends `send` after `expect`.
    pub fn new(expect: &str, send: &str) -> Self {
        Self { expect: expect.to_owned(), send: send.to_owned() }
    }
}

/// Program output after the last match.
#[derive(Debug, Default)]
pub struct UnmatchedOutput(Vec<u8>);

impl UnmatchedOutput {
    /// Appends output.
    pub fn push(&mut self, output: &[u8]) {
        self.0.extend_from_slice(output);
    }

    /// Removes the output up to and including the first `text` and returns the part before it.
    pub fn take_until(&mut self, text: &str) -> Option<Vec<u8>> {
        let length = text.len();
        let at = self.0.windows(length.max(1)).position(|part| part == text.as_bytes())?;
        let rest = self.0.split_off(at + length);
        let mut before = std::mem::replace(&mut self.0, rest);
        before.truncate(at);
        Some(before)
    }

    /// Drops all but the last `count` bytes.
    fn keep_last(&mut self, count: usize) {
        self.0.drain(..self.0.len().saturating_sub(count));
    }

    /// Returns the output as text.
    pub fn to_text(&self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }
}

/// Runs a script until the program closes its output.
///
/// # Errors
/// The output cannot be read or logged. A program that closes its input is not an error.
pub fn run_script(
    script: &[Exchange],
    mut output: impl Read,
    mut log: impl Write,
    mut input: impl Write,
) -> io::Result<()> {
    let mut script: VecDeque<&Exchange> = script.iter().collect();
    let mut unmatched = UnmatchedOutput::default();
    let mut bytes = [0; 4096];
    loop {
        let count = match output.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        log.write_all(&bytes[..count])?;
        unmatched.push(&bytes[..count]);
        while let Some(exchange) = script.front()
            && unmatched.take_until(&exchange.expect).is_some()
        {
            let sent = writeln!(input, "{}", exchange.send).and_then(|()| input.flush());
            if sent.is_err() {
                script.clear();
                break;
            }
            script.pop_front();
        }
        // The end of the output may be the start of the expected text.
        unmatched.keep_last(script.front().map_or(0, |exchange| exchange.expect.len()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Program output of which each read returns one chunk.
    struct ChunkedOutput(VecDeque<&'static str>);

    impl Read for ChunkedOutput {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            let chunk = self.0.pop_front().unwrap_or("").as_bytes();
            bytes[..chunk.len()].copy_from_slice(chunk);
            Ok(chunk.len())
        }
    }

    /// Runs a script; returns the log and the input of the program.
    fn run<const N: usize>(script: &[Exchange], output: [&'static str; N]) -> [String; 2] {
        let (mut log, mut input) = (Vec::new(), Vec::new());
        run_script(script, ChunkedOutput(output.into()), &mut log, &mut input).unwrap();
        [log, input].map(|bytes| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn each_line_is_sent_after_its_text_for_any_chunks_of_output() {
        let script = [Exchange::new("login: ", "root"), Exchange::new("# ", "poweroff")];

        let [log, input] = run(&script, ["# Debian\nhost lo", "gin: ", "root\r\nhost:~", "# bye"]);

        assert_eq!(log, "# Debian\nhost login: root\r\nhost:~# bye");
        assert_eq!(input, "root\npoweroff\n");
    }

    #[test]
    fn no_line_is_sent_before_its_text() {
        let script = [Exchange::new("# ", "one"), Exchange::new("# ", "two")];

        let [_, input] = run(&script, ["a# b", "c"]);

        assert_eq!(input, "one\n");
    }
}
