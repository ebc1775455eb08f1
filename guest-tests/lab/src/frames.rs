// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How results leave the emulated host: as frames on its console.
//!
//! The console is the one channel that every kernel and every emulator has, and it is shared with
//! the kernel's own messages. So whatever the job produced is sent at the end, in frames that
//! cannot be mistaken or lose a byte unnoticed:
//!
//! ```text
//! @@granule begin results 1234 <SHA-256 in hexadecimal>
//! … 1234 bytes …
//! @@granule end results
//! ```
//!
//! The terminal puts a carriage return before each line feed; the reader drops every carriage
//! return, the writer sends none. Kernel messages are held back while frames are sent; one that
//! gets through breaks the checksum and is noticed.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use sha2::{Digest, Sha256};
use thiserror::Error;

const BEGIN: &str = "@@granule begin ";
const END: &str = "@@granule end ";

/// What was sent, by name.
pub type Frames = BTreeMap<String, Vec<u8>>;

/// Why a console log does not hold what was sent.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FrameError {
    /// A frame's head is damaged.
    #[error("console line '{0}' is a damaged frame: run again; if it recurs, look at the console")]
    Head(String),
    /// The console ends within a frame.
    #[error("the console ends within '{name}', {missing} bytes early: the host died sending it")]
    Truncated {
        /// The frame's name.
        name: String,
        /// How much is missing.
        missing: usize,
    },
    /// Something got in between or was lost.
    #[error("'{0}' arrived damaged: a kernel message got into it, see the console")]
    Damaged(String),
}

/// SHA-256 in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Sends one frame of text, carriage returns left out.
///
/// # Errors
/// The console cannot be written to.
pub fn send(to: &mut impl Write, name: &str, payload: &[u8]) -> io::Result<()> {
    let payload = String::from_utf8_lossy(payload).replace('\r', "");
    let (length, sum) = (payload.len(), sha256(payload.as_bytes()));
    write!(
        to,
        "\n{BEGIN}{name} {length} {sum}\n{payload}\n{END}{name}\n"
    )?;
    to.flush()
}

/// Finds all frames in what the console showed.
///
/// # Errors
/// A frame is damaged or not whole.
pub fn receive(console: &[u8]) -> Result<Frames, FrameError> {
    let text: Vec<u8> = console.iter().copied().filter(|b| *b != b'\r').collect();
    let mut frames = Frames::new();
    let mut rest = text.as_slice();
    while let Some(at) = find_line(rest, BEGIN.as_bytes()) {
        let line_end = rest[at..]
            .iter()
            .position(|b| *b == b'\n')
            .map_or(rest.len(), |n| at + n);
        let head = String::from_utf8_lossy(&rest[at + BEGIN.len()..line_end]).into_owned();
        let damaged = || FrameError::Head(head.clone());
        let mut words = head.split(' ');
        let (Some(name), Some(length), Some(sum), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(damaged());
        };
        let length: usize = length.parse().map_err(|_| damaged())?;
        let body = rest.get(line_end + 1..).unwrap_or_default();
        let Some(payload) = body.get(..length) else {
            return Err(FrameError::Truncated {
                name: name.to_owned(),
                missing: length - body.len(),
            });
        };
        let tail = format!("\n{END}{name}\n");
        if sha256(payload) != sum || !body[length..].starts_with(tail.as_bytes()) {
            return Err(FrameError::Damaged(name.to_owned()));
        }
        frames.insert(name.to_owned(), payload.to_vec());
        rest = &body[length..];
    }
    Ok(frames)
}

/// Where a line begins with `wanted`.
fn find_line(text: &[u8], wanted: &[u8]) -> Option<usize> {
    (0..text.len())
        .filter(|at| *at == 0 || text[at - 1] == b'\n')
        .find(|at| text[*at..].starts_with(wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn console(frames: &[(&str, &str)]) -> Vec<u8> {
        let mut sent = b"[    0.0] Booting Linux\r\n".to_vec();
        for (name, payload) in frames {
            send(&mut sent, name, payload.as_bytes()).unwrap();
        }
        String::from_utf8(sent)
            .unwrap()
            .replace('\n', "\r\n")
            .into_bytes()
    }

    #[test]
    fn frames_arrive_as_they_were_sent() {
        let console = console(&[("results", "{}\n{}\n"), ("stdout", ""), ("x", "no newline")]);

        let frames = receive(&console).unwrap();

        assert_eq!(frames["results"], b"{}\n{}\n");
        assert_eq!(frames["stdout"], b"");
        assert_eq!(frames["x"], b"no newline");
    }

    #[test]
    fn a_payload_may_look_like_a_frame() {
        let console = console(&[("stdout", "@@granule begin results 3 abc\nfoo\n")]);

        assert_eq!(receive(&console).unwrap().len(), 1);
    }

    #[test]
    fn a_console_cut_anywhere_within_a_frame_is_noticed() {
        let whole = console(&[("results", "{\"a\":1}\n{\"b\":2}\n")]);
        let begins = whole.windows(8).position(|w| w == b"@@granul").unwrap() + BEGIN.len();

        for cut in begins..whole.len() - 2 {
            assert!(receive(&whole[..cut]).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn a_kernel_message_within_a_frame_is_noticed() {
        let text = String::from_utf8(console(&[("results", "{\"a\":1}\n{\"b\":2}\n")])).unwrap();
        let broken = text.replace("{\"b\"", "[    1.0] BUG: x\r\n{\"b\"");

        assert_eq!(
            receive(broken.as_bytes()),
            Err(FrameError::Damaged("results".to_owned()))
        );
    }

    #[test]
    fn a_console_without_frames_has_none() {
        assert_eq!(
            receive(b"Kernel panic - not syncing\r\n"),
            Ok(Frames::new())
        );
    }
}
