// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A dialogue with a program: wait until it has said something, then type a line.
//!
//! Each turn waits for its text behind the one that the turn before it found. What the program
//! says goes to a file all the while; a program that ends early, or never says what is waited for,
//! leaves the rest unsaid, and the file tells how far it came.

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
};

use serde::{Deserialize, Serialize};

/// One turn of a dialogue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Turn {
    /// What to wait for; not empty.
    pub expect: String,
    /// What is typed then, a line end behind it.
    pub send: String,
}

impl Turn {
    /// A turn.
    pub fn new(expect: &str, send: &str) -> Self {
        Self {
            expect: expect.to_owned(),
            send: send.to_owned(),
        }
    }
}

/// Holds the dialogue until the program says no more.
///
/// # Errors
/// What it says cannot be read or kept. A program that no longer listens is no error.
pub fn hold(
    turns: &[Turn],
    mut says: impl Read,
    mut keep: impl Write,
    mut hears: impl Write,
) -> io::Result<()> {
    let mut turns: VecDeque<&Turn> = turns.iter().collect();
    let mut said = Vec::new();
    let mut bytes = [0; 4096];
    loop {
        let count = match says.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        keep.write_all(&bytes[..count])?;
        if turns.is_empty() {
            continue;
        }
        said.extend_from_slice(&bytes[..count]);
        while let Some(turn) = turns.front()
            && let Some(end) = end_of(&said, turn.expect.as_bytes())
        {
            said.drain(..end);
            if writeln!(hears, "{}", turn.send)
                .and_then(|()| hears.flush())
                .is_err()
            {
                turns.clear();
                break;
            }
            turns.pop_front();
        }
        // What is waited for may still be half said, and no more of it than this.
        let half = turns.front().map_or(0, |turn| turn.expect.len());
        said.drain(..said.len().saturating_sub(half));
    }
}

/// Where the first `text` in `said` ends.
fn end_of(said: &[u8], text: &[u8]) -> Option<usize> {
    let at = said
        .windows(text.len().max(1))
        .position(|part| part == text)?;
    Some(at + text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Says its pieces one reading at a time.
    struct Pieces(VecDeque<&'static str>);

    impl Read for Pieces {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            let piece = self.0.pop_front().unwrap_or("").as_bytes();
            bytes[..piece.len()].copy_from_slice(piece);
            Ok(piece.len())
        }
    }

    #[test]
    fn each_answer_waits_for_its_text_in_whatever_pieces_it_comes() {
        let turns = [Turn::new("login: ", "root"), Turn::new("# ", "poweroff")];
        let says = Pieces(["# Debian\nhost lo", "gin: ", "root\r\nhost:~", "# bye"].into());
        let (mut kept, mut heard) = (Vec::new(), Vec::new());

        hold(&turns, says, &mut kept, &mut heard).unwrap();

        assert_eq!(kept, b"# Debian\nhost login: root\r\nhost:~# bye");
        assert_eq!(heard, b"root\npoweroff\n");
    }

    #[test]
    fn nothing_is_typed_before_its_text() {
        let turns = [Turn::new("# ", "one"), Turn::new("# ", "two")];
        let (mut kept, mut heard) = (Vec::new(), Vec::new());

        hold(&turns, Pieces(["a# b", "c"].into()), &mut kept, &mut heard).unwrap();

        assert_eq!(heard, b"one\n");
    }
}
