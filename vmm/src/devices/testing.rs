// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Output that the tests of the serial ports share.

use std::{
    io::{self, Write},
    sync::Arc,
};

use parking_lot::Mutex;

/// Keeps the bytes that a port wrote.
#[derive(Debug, Clone, Default)]
pub struct CapturedOutput(pub Arc<Mutex<Vec<u8>>>);

impl Write for CapturedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
