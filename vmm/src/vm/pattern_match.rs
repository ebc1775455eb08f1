// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Finds a text in what the guest says on its console: how a guest that cannot write the boot timer
//! tells that it is up.

use std::io::{self, Write};

/// An output that tells when a text has gone through it for the first time.
pub struct Watch<W> {
    to: W,
    text: Vec<u8>,
    /// The last bytes that went through, as many as the text has; empty once it was found.
    last: Vec<u8>,
    tell: Option<Box<dyn FnOnce() + Send>>,
}

impl<W> std::fmt::Debug for Watch<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch")
            .field("text", &self.text)
            .finish_non_exhaustive()
    }
}

impl<W: Write> Watch<W> {
    /// Watches what goes to `to` for `text`, which is not empty.
    pub fn new(to: W, text: &str, tell: Box<dyn FnOnce() + Send>) -> Self {
        Self {
            to,
            text: text.into(),
            last: Vec::new(),
            tell: (!text.is_empty()).then_some(tell),
        }
    }

    fn look(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if self.last.len() == self.text.len() {
                self.last.remove(0);
            }
            self.last.push(*byte);
            if self.last == self.text
                && let Some(tell) = self.tell.take()
            {
                self.last = Vec::new();
                return tell();
            }
        }
    }
}

impl<W: Write> Write for Watch<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.tell.is_some() {
            self.look(bytes);
        }
        // All or an error: what was looked at must not come again.
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
    fn the_text_is_found_once_in_whatever_pieces_it_comes() {
        let (sender, found) = mpsc::channel();
        let mut page = Vec::new();
        let mut watch = Watch::new(&mut page, "aab", Box::new(move || sender.send(()).unwrap()));

        for piece in ["a", "aa"] {
            watch.write_all(piece.as_bytes()).unwrap();
            assert!(found.try_recv().is_err());
        }
        watch.write_all(b"b").unwrap();
        assert!(found.try_recv().is_ok());
        watch.write_all(b" aab").unwrap();

        assert!(found.try_recv().is_err());
        assert_eq!(page, b"aaab aab");
    }
}
