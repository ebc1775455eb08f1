// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connects the terminal with the guest's console device.
//!
//! The terminal is connected to the serial port, or to the virtio console if there is one. A virtio
//! console receives all input, but the output of the serial port is still shown, because a kernel
//! prints its messages there until it has loaded the virtio driver.
//!
//! A text in the output can mark the start of the guest's init, for guests that do not write the
//! boot timer.

use std::{
    io::{self, Write},
    mem,
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
};

use vmm_sys_util::eventfd::EventFd;

use super::{
    device_manager::SharedSerialPort,
    seccomp::{ThreadRole, confine_if},
    terminal::{EscapeKey, Terminal},
};
use crate::{
    devices::{
        console_input::{self, Overflow, PipeSink, SerialSink},
        console_output::ConsoleOutput,
        serial::SerialOutput,
        virtio::console::Console,
    },
    scoped_thread::ScopedThread,
};

/// Starts the thread that writes console output to standard output.
pub fn stdout(confine: bool) -> io::Result<ConsoleOutput> {
    let output = io::stdout().as_fd().try_clone_to_owned()?;
    ConsoleOutput::new(output, move || confine_if(confine, ThreadRole::Console))
}

/// Callback for a text that was found in the console output.
pub type MatchCallback = Box<dyn FnOnce() + Send>;

/// A writer that calls a function when a text is written for the first time.
struct PatternMatcher<W> {
    to: W,
    pattern: Vec<u8>,
    /// The last bytes written, at most as many as in the pattern; empty after the match.
    last: Vec<u8>,
    on_match: Option<MatchCallback>,
}

impl<W: Write> PatternMatcher<W> {
    /// Returns a writer to `to` that searches for `pattern`; an empty pattern never matches.
    fn new(to: W, pattern: &str, on_match: MatchCallback) -> Self {
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

/// The VM's ends of the channels to the terminal.
pub struct ConsoleChannels {
    pub serial_output: SerialOutput,
    pub console: Option<Console>,
    pub console_input: Option<PipeSink>,
}

impl ConsoleChannels {
    /// Creates the channels to `output`, with or without a virtio console. The output of the device
    /// that the terminal is connected to is searched for `pattern`.
    pub fn new(
        output: &ConsoleOutput,
        virtio_console: bool,
        pattern: Option<(&str, MatchCallback)>,
    ) -> io::Result<Self> {
        let mut terminal_output: SerialOutput = match pattern {
            None => Box::new(output.clone()),
            Some((text, on_match)) => Box::new(PatternMatcher::new(output.clone(), text, on_match)),
        };
        if !virtio_console {
            return Ok(Self { serial_output: terminal_output, console: None, console_input: None });
        }
        let serial_output = Box::new(output.clone());
        let console_output = mem::replace(&mut terminal_output, serial_output);
        let (console_input, reader) = PipeSink::new()?;
        let reader = OwnedFd::from(reader);
        let console = Console::new(Some(reader), console_output, Some(output.clone()));
        Ok(Self {
            serial_output: terminal_output,
            console: Some(console),
            console_input: Some(console_input),
        })
    }
}

/// Starts the thread that forwards standard input to the virtio console, or to the serial port. The
/// escape key, which is recognised on a terminal only, signals `quit`.
pub fn forward_stdin(
    console: Option<PipeSink>,
    serial: &SharedSerialPort,
    terminal: Option<&Terminal>,
    quit: EventFd,
    mut confine: bool,
) -> io::Result<ScopedThread> {
    let input = io::stdin().as_fd().try_clone_to_owned()?;
    let overflow = match terminal {
        Some(_) => Overflow::Drop,
        None => Overflow::Wait,
    };
    let mut escape = terminal.map(|_| EscapeKey::default());
    let filter = move |bytes: &mut Vec<u8>| {
        if let Err(error) = confine_if(mem::take(&mut confine), ThreadRole::Console) {
            log::error!("the console input thread cannot be confined: {error}");
            let _ = quit.write(1);
            return false;
        }
        let proceed = escape.as_mut().is_none_or(|escape| escape.filter(bytes));
        if !proceed {
            let _ = quit.write(1);
        }
        proceed
    };
    match console {
        Some(sink) => console_input::forward_input(sink, input, overflow, filter),
        None => {
            let sink = SerialSink::new(Arc::clone(serial));
            console_input::forward_input(sink, input, overflow, filter)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Read as _, sync::mpsc};

    use super::*;

    #[test]
    fn the_pattern_is_searched_in_the_output_of_the_terminals_device() {
        for virtio_console in [false, true] {
            let (mut reader, to) = io::pipe().unwrap();
            let output = ConsoleOutput::new(to, || Ok(())).unwrap();
            let (sender, matches) = mpsc::channel();
            let on_match = Box::new(move || sender.send(()).unwrap());

            let pattern = Some(("login:", on_match as MatchCallback));
            let mut channels = ConsoleChannels::new(&output, virtio_console, pattern).unwrap();
            channels.serial_output.write_all(b"login: ").unwrap();
            let unwritten = output.finish();
            let mut written = String::new();
            reader.read_to_string(&mut written).unwrap();

            assert_eq!((unwritten, written.as_str()), (0, "login: "));
            assert_eq!(matches.try_recv().is_ok(), !virtio_console);
            assert_eq!(channels.console.is_some(), virtio_console);
            assert_eq!(channels.console_input.is_some(), virtio_console);
        }
    }

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
