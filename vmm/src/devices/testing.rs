// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the tests of the ports share.

use std::{
    io::{self, Write},
    sync::Arc,
};

use parking_lot::Mutex;

/// What a port wrote, kept for a test to look at.
#[derive(Debug, Clone, Default)]
pub struct Page(pub Arc<Mutex<Vec<u8>>>);

impl Write for Page {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
