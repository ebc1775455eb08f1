// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Framing of results on the serial console.
//!
//! The console is the one channel of every kernel and every emulator, and the kernel's messages
//! share it. PID 1 sends its files at the end, in frames that detect a lost or inserted byte:
//!
//! ```text
//! @@granule begin results 1234 <SHA-256 in hexadecimal>
//! … 1234 bytes …
//! @@granule end results
//! ```
//!
//! The terminal inserts a carriage return before each line feed; the receiver drops all carriage
//! returns and the sender sends none. PID 1 lowers the console log level while it sends; a message
//! that appears nevertheless breaks the checksum.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use thiserror::Error;

use crate::digest::sha256;

const BEGIN: &str = "@@granule begin ";
const END: &str = "@@granule end ";

/// Payloads of the frames, by name.
pub type Frames = BTreeMap<String, Vec<u8>>;

/// Error returned when a console log has a damaged frame.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FrameError {
    #[error("malformed frame header '{0}': run again; if it recurs, see the console")]
    Header(String),
    #[error("the console log ends in frame '{name}', {missing} bytes early: the host crashed")]
    Truncated { name: String, missing: usize },
    #[error("frame '{0}' is damaged: a kernel message interrupted it, see the console")]
    Damaged(String),
}

/// Sends one frame of text, without carriage returns.
pub fn send(to: &mut impl Write, name: &str, payload: &[u8]) -> io::Result<()> {
    let payload = String::from_utf8_lossy(payload).replace('\r', "");
    let (length, sum) = (payload.len(), sha256(payload.as_bytes()));
    write!(to, "\n{BEGIN}{name} {length} {sum}\n{payload}\n{END}{name}\n")?;
    to.flush()
}

/// Returns all frames of a console log.
pub fn receive(console: &[u8]) -> Result<Frames, FrameError> {
    let text: Vec<u8> = console.iter().copied().filter(|b| *b != b'\r').collect();
    let mut frames = Frames::new();
    let mut rest = text.as_slice();
    while let Some(at) = find_line(rest, BEGIN.as_bytes()) {
        let line_end = rest[at..].iter().position(|b| *b == b'\n').map_or(rest.len(), |n| at + n);
        let header = String::from_utf8_lossy(&rest[at + BEGIN.len()..line_end]).into_owned();
        let malformed = || FrameError::Header(header.clone());
        let mut words = header.split(' ');
        let (Some(name), Some(length), Some(sum), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(malformed());
        };
        let length: usize = length.parse().map_err(|_| malformed())?;
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

/// Returns the offset of the first line that starts with `prefix`.
fn find_line(text: &[u8], prefix: &[u8]) -> Option<usize> {
    (0..text.len())
        .filter(|at| *at == 0 || text[at - 1] == b'\n')
        .find(|at| text[*at..].starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn console(frames: &[(&str, &str)]) -> Vec<u8> {
        let mut sent = b"[    0.0] Booting Linux\r\n".to_vec();
        for (name, payload) in frames {
            send(&mut sent, name, payload.as_bytes()).unwrap();
        }
        String::from_utf8(sent).unwrap().replace('\n', "\r\n").into_bytes()
    }

    #[test]
    fn frames_are_received_as_sent() {
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
    fn a_truncated_console_log_is_an_error() {
        let whole = console(&[("results", "{\"a\":1}\n{\"b\":2}\n")]);
        let begins = whole.windows(8).position(|w| w == b"@@granul").unwrap() + BEGIN.len();

        for cut in begins..whole.len() - 2 {
            assert!(receive(&whole[..cut]).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn a_kernel_message_inside_a_frame_is_an_error() {
        let text = String::from_utf8(console(&[("results", "{\"a\":1}\n{\"b\":2}\n")])).unwrap();
        let broken = text.replace("{\"b\"", "[    1.0] BUG: x\r\n{\"b\"");

        assert_eq!(receive(broken.as_bytes()), Err(FrameError::Damaged("results".to_owned())));
    }

    #[test]
    fn a_console_log_without_frames_is_empty() {
        assert_eq!(receive(b"Kernel panic - not syncing\r\n"), Ok(Frames::new()));
    }
}
