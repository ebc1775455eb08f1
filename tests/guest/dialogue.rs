// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A dialogue with a program: wait for what it says, then say something.

use std::{
    io::{Read as _, Write as _},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

/// Emulation inside emulation, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(1200);

/// A program, and what it has said since the last thing waited for.
pub struct Dialogue {
    child: Child,
    input: ChildStdin,
    output: Receiver<Vec<u8>>,
    said: String,
}

impl Dialogue {
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
        Self {
            input: child.stdin.take().unwrap(),
            child,
            output,
            said: String::new(),
        }
    }

    /// Types a line.
    pub fn send(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
        self.input.flush().unwrap();
    }

    /// Waits until the program has said `text`; gives what it said before.
    pub fn expect(&mut self, text: &str) -> String {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.said.find(text) {
                let rest = self.said.split_off(at + text.len());
                let mut before = std::mem::replace(&mut self.said, rest);
                before.truncate(at);
                return before;
            }
            let left = until.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(bytes) => {
                    let bytes = String::from_utf8_lossy(&bytes);
                    self.said.extend(bytes.chars().filter(|c| *c != '\r'));
                }
                Err(RecvTimeoutError::Timeout) => panic!("'{text}' did not come: {}", self.said),
                Err(RecvTimeoutError::Disconnected) => panic!("it ended: {}", self.said),
            }
        }
    }
}

impl Drop for Dialogue {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
