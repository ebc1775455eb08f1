// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the guest says and what is typed to it, between the terminal and the guest's devices.
//!
//! The terminal is the serial port, or a virtio console if there is one: keys go to that one alone
//! then, and of the port what it says is shown, such as the messages of a kernel that has not loaded
//! its drivers yet.

use std::{
    io, mem,
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
};

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use super::{
    pattern_match::Watch,
    run::confined,
    sandbox::Thread,
    terminal::{Escape, Terminal},
};
use crate::{
    devices::{
        console_input::{self, Overflow, PipeSink, SerialSink},
        console_output::ConsoleOutput,
        serial::{SerialOutput, SerialPort},
        virtio::console::Console,
    },
    scoped_thread::ScopedThread,
};

/// A way out to standard output.
///
/// # Errors
/// It cannot be had twice, or there is no thread for it.
pub fn outlet(confine: bool) -> io::Result<ConsoleOutput> {
    let output = io::stdout().as_fd().try_clone_to_owned()?;
    ConsoleOutput::new(output, move || confined(confine, Thread::Console))
}

/// Called once a text has been found.
pub type Found = Box<dyn FnOnce() + Send>;

/// Between one machine and the terminal.
#[allow(missing_debug_implementations, reason = "it holds a closure")]
pub struct Ways {
    /// The serial port's output.
    pub output: SerialOutput,
    /// The virtio console, if there is one.
    pub console: Option<Console>,
    /// What is typed to that one.
    pub keys: Option<PipeSink>,
}

impl Ways {
    /// Ways to an outlet; with a virtio `console` or the serial port alone. Where the guest's init
    /// is known by a text, `tell` is called once the terminal's device has said it.
    ///
    /// # Errors
    /// No pipe can be had.
    pub fn new(
        outlet: &ConsoleOutput,
        console: bool,
        text: Option<(&str, Found)>,
    ) -> io::Result<Self> {
        let mut output: SerialOutput = match text {
            None => Box::new(outlet.clone()),
            Some((text, tell)) => Box::new(Watch::new(outlet.clone(), text, tell)),
        };
        if !console {
            return Ok(Self {
                output,
                console: None,
                keys: None,
            });
        }
        let said = mem::replace(&mut output, Box::new(outlet.clone()));
        let (keys, typed) = PipeSink::new()?;
        let typed = OwnedFd::from(typed);
        Ok(Self {
            output,
            console: Some(Console::new(Some(typed), said).with_backpressure(outlet.clone())),
            keys: Some(keys),
        })
    }
}

/// Carries what is typed to `keys` or else to the port. The escape key, which only a terminal has,
/// writes to `quit`.
///
/// # Errors
/// Standard input cannot be had twice, or there is no thread for it.
pub fn listen(
    keys: Option<PipeSink>,
    port: &Arc<Mutex<dyn SerialPort>>,
    terminal: Option<&Terminal>,
    quit: EventFd,
    mut confine: bool,
) -> io::Result<ScopedThread> {
    let input = io::stdin().as_fd().try_clone_to_owned()?;
    let excess = match terminal {
        Some(_) => Overflow::Drop,
        None => Overflow::Wait,
    };
    let mut escape = terminal.map(|_| Escape::default());
    let filter = move |bytes: &mut Vec<u8>| {
        if mem::take(&mut confine)
            && let Err(error) = Thread::Console.confine()
        {
            log::error!("the console's thread cannot be confined: {error}");
            let _ = quit.write(1);
            return false;
        }
        let go_on = escape.as_mut().is_none_or(|escape| escape.filter(bytes));
        if !go_on {
            let _ = quit.write(1);
        }
        go_on
    };
    match keys {
        Some(keys) => console_input::forward_input(keys, input, excess, filter),
        None => {
            console_input::forward_input(SerialSink::new(Arc::clone(port))?, input, excess, filter)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        sync::mpsc,
    };

    use super::*;

    #[test]
    fn the_text_is_looked_for_where_the_terminal_is() {
        for console in [false, true] {
            let (mut screen, to) = io::pipe().unwrap();
            let outlet = ConsoleOutput::new(to, || Ok(())).unwrap();
            let (sender, found) = mpsc::channel();
            let tell = Box::new(move || sender.send(()).unwrap());

            let mut ways = Ways::new(&outlet, console, Some(("login:", tell))).unwrap();
            ways.output.write_all(b"login: ").unwrap();
            let left = outlet.finish();
            let mut seen = String::new();
            screen.read_to_string(&mut seen).unwrap();

            assert_eq!((left, seen.as_str()), (0, "login: "));
            assert_eq!(found.try_recv().is_ok(), !console);
            assert_eq!(
                (ways.console.is_some(), ways.keys.is_some()),
                (console, console)
            );
        }
    }
}
