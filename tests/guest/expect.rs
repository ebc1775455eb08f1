// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An interactive session with a program: waits for its output, then sends a line.

use std::{
    io::{Read as _, Write as _},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use granule_lab::expect::Unmatched;

/// Timeout for nested emulation on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(1200);

/// A running program and its output since the last match.
pub struct Session {
    child: Child,
    input: ChildStdin,
    output: Receiver<Vec<u8>>,
    unmatched: Unmatched,
}

impl Session {
    pub fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the emulator starts");
        let mut stdout = child.stdout.take().unwrap();
        let (sender, output) = mpsc::channel();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = stdout.read(&mut bytes) {
                print!("{}", String::from_utf8_lossy(&bytes[..count]));
                if sender.send(bytes[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { input: child.stdin.take().unwrap(), child, output, unmatched: Unmatched::default() }
    }

    /// Sends a line.
    pub fn send(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
        self.input.flush().unwrap();
    }

    /// Waits for `text`; returns the output before it.
    pub fn expect(&mut self, text: &str) -> String {
        let until = Instant::now() + TIMEOUT;
        loop {
            if let Some(before) = self.unmatched.take_until(text) {
                return String::from_utf8_lossy(&before).into_owned();
            }
            let left = until.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(mut bytes) => {
                    bytes.retain(|byte| *byte != b'\r');
                    self.unmatched.push(&bytes);
                }
                Err(RecvTimeoutError::Timeout) => {
                    panic!("no '{text}' in time: {}", self.unmatched.to_text())
                }
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("no '{text}' before the end: {}", self.unmatched.to_text())
                }
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // The program may have exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
