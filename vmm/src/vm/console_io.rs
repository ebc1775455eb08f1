// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connects the terminal to the guest's console device.
//!
//! The console device is the virtio console, if there is one, or the serial port. A virtio console
//! receives all input, but the output of the serial port is still shown, because a kernel prints
//! its messages there until it has loaded the virtio driver.
//!
//! A text in the output can mark the start of init in guests that do not write the boot timer.

use std::{
    io::{self, Write},
    mem,
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
};

use vmm_sys_util::eventfd::EventFd;

use super::{
    device_manager::SharedSerialPort,
    seccomp::{ThreadRole, confine_optionally},
    terminal::{EscapeFilter, Terminal},
};
use crate::devices::{
    console_input::{ConsoleInput, InputConsole, OverflowPolicy, PipeSink},
    console_output::ConsoleOutput,
    serial::SerialOutput,
    virtio::console::Console,
};

/// Starts the thread that writes console output to standard output.
pub fn start_console_output(confine: bool) -> io::Result<ConsoleOutput> {
    let output = io::stdout().as_fd().try_clone_to_owned()?;
    ConsoleOutput::new(output, move || confine_optionally(confine, ThreadRole::Console))
}

/// Callback for the first match of a pattern in the console output.
pub type MatchCallback = Box<dyn FnOnce() + Send>;

/// A writer that calls a function when `pattern` is written for the first time.
struct PatternMatcher<W> {
    output: W,
    pattern: Vec<u8>,
    /// Last bytes written, up to the length of the pattern; empty after the match.
    tail: Vec<u8>,
    on_match: Option<MatchCallback>,
}

impl<W: Write> PatternMatcher<W> {
    /// Returns a writer to `output` that searches for `pattern`; an empty pattern never matches.
    fn new(output: W, pattern: &str, on_match: MatchCallback) -> Self {
        Self {
            output,
            pattern: pattern.into(),
            tail: Vec::new(),
            on_match: (!pattern.is_empty()).then_some(on_match),
        }
    }

    fn search(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if self.tail.len() == self.pattern.len() {
                self.tail.remove(0);
            }
            self.tail.push(*byte);
            if self.tail == self.pattern
                && let Some(on_match) = self.on_match.take()
            {
                self.tail = Vec::new();
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
        // After a partial write, the caller would pass the same bytes to the search again.
        self.output.write_all(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

/// Device ends of the channels to the terminal.
pub struct ConsoleChannels {
    pub serial_output: SerialOutput,
    pub console: Option<Console>,
    /// The virtio console, if there is one.
    pub input_console: Option<InputConsole>,
}

impl ConsoleChannels {
    /// Creates the channels to `output`, with or without a virtio console. Only the output of the
    /// console device is searched for `pattern`.
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
            return Ok(Self { serial_output: terminal_output, console: None, input_console: None });
        }
        let serial_output = Box::new(output.clone());
        let console_output = mem::replace(&mut terminal_output, serial_output);
        let (sink, reader) = PipeSink::new()?;
        let of_device = OwnedFd::from(reader.try_clone()?);
        let console = Console::new(Some(of_device), console_output, Some(output.clone()));
        Ok(Self {
            serial_output: terminal_output,
            console: Some(console),
            input_console: Some(InputConsole::Virtio(sink, reader)),
        })
    }
}

/// Starts to forward `earlier` and then standard input to the virtio console or the serial port. The
/// escape key signals `quit`; it is recognised on a terminal only.
pub fn forward_stdin(
    console: Option<InputConsole>,
    serial: &SharedSerialPort,
    earlier: Vec<u8>,
    terminal: Option<&Terminal>,
    quit: EventFd,
    mut confine: bool,
) -> io::Result<ConsoleInput> {
    let input = io::stdin().as_fd().try_clone_to_owned()?;
    let overflow = match terminal {
        Some(_) => OverflowPolicy::Drop,
        None => OverflowPolicy::Wait,
    };
    let mut escape = terminal.map(|_| EscapeFilter::default());
    let filter = move |bytes: &mut Vec<u8>| {
        if let Err(error) = confine_optionally(mem::take(&mut confine), ThreadRole::Console) {
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
    let console = console.unwrap_or_else(|| InputConsole::Serial(Arc::clone(serial)));
    ConsoleInput::start(console, earlier, input, overflow, filter)
}

#[cfg(test)]
mod tests {
    use std::{io::Read as _, sync::mpsc};

    use super::*;

    #[test]
    fn only_the_output_of_the_console_device_is_searched() {
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
            assert_eq!(channels.input_console.is_some(), virtio_console);
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
