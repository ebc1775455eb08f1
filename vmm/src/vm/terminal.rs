// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Standard input as a raw terminal for the guest's console.
//!
//! While a guest runs, the terminal is raw: every key goes to the guest, Ctrl-C included, except
//! the [escape key](EscapeFilter), Ctrl-A. The settings are restored when [`Terminal`] is dropped,
//! and by [`restore`] in a signal handler. If a run is killed, the next run finds a raw terminal
//! and sets cooked mode at its end. Raw mode keeps the output processing of the terminal, because
//! this program's messages end in a line feed alone.

use std::{
    io, panic,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::termios::{
    InputModes, LocalModes, OptionalActions, Termios, isatty, tcgetattr, tcsetattr,
};

/// Settings to restore while `IS_RAW` is set.
static SAVED_SETTINGS: OnceLock<Termios> = OnceLock::new();
static IS_RAW: AtomicBool = AtomicBool::new(false);

/// Modes of a terminal with line editing and signals.
const COOKED_MODES: LocalModes =
    LocalModes::ICANON.union(LocalModes::ECHO).union(LocalModes::ISIG).union(LocalModes::IEXTEN);

/// A raw terminal on standard input. Dropping it restores the settings.
#[derive(Debug)]
pub struct Terminal(());

impl Terminal {
    /// Sets standard input to raw mode, if it is a terminal.
    pub fn enter_raw_mode() -> io::Result<Option<Self>> {
        let input = io::stdin();
        if !isatty(&input) {
            return Ok(None);
        }
        let found = tcgetattr(&input)?;
        SAVED_SETTINGS.get_or_init(|| {
            restore_before_abort();
            cooked_settings(found)
        });
        let terminal = Self(());
        IS_RAW.store(true, Ordering::SeqCst);
        terminal.set_raw()?;
        Ok(Some(terminal))
    }

    /// Sets raw mode again, after another program has used the terminal.
    pub fn set_raw(&self) -> io::Result<()> {
        let input = io::stdin();
        let settings = raw_settings(tcgetattr(&input)?);
        Ok(tcsetattr(&input, OptionalActions::Now, &settings)?)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        restore();
    }
}

/// Restores the settings when a panic of any thread ends the process, in a program that is built so.
fn restore_before_abort() {
    if cfg!(panic = "abort") {
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            restore();
            report(info);
        }));
    }
}

/// Restores the settings of a raw terminal. It neither locks nor allocates, so a signal handler may
/// call it.
pub fn restore() {
    if IS_RAW.swap(false, Ordering::SeqCst)
        && let Some(saved) = SAVED_SETTINGS.get()
    {
        // SAFETY: this program never closes standard input.
        let input = unsafe { std::os::fd::BorrowedFd::borrow_raw(0) };
        let _ = tcsetattr(input, OptionalActions::Now, saved);
    }
}

/// Returns the settings to restore: `found`, in cooked mode if a killed run left the terminal raw.
fn cooked_settings(mut found: Termios) -> Termios {
    if !found.local_modes.intersects(COOKED_MODES) {
        found.local_modes |= COOKED_MODES;
        found.input_modes |= InputModes::ICRNL;
    }
    found
}

/// Returns the settings with raw input and unchanged output.
fn raw_settings(mut settings: Termios) -> Termios {
    let output_modes = settings.output_modes;
    settings.make_raw();
    settings.output_modes = output_modes;
    settings
}

const CTRL_A: u8 = 1;

/// Help text of the escape key.
pub const ESCAPE_KEY_HELP: &str = "Ctrl-A x stops the VM, Ctrl-A a sends Ctrl-A to the guest";

/// A filter for the escape key: Ctrl-A and then `x` stops the VM, `a` or Ctrl-A sends one Ctrl-A to
/// the guest, and any other key is sent without the Ctrl-A.
#[derive(Debug, Default)]
pub struct EscapeFilter {
    has_pending_ctrl_a: bool,
}

impl EscapeFilter {
    /// Removes escape sequences from `bytes`. Returns `false` if the VM is to stop.
    pub fn filter(&mut self, bytes: &mut Vec<u8>) -> bool {
        let mut proceed = true;
        bytes.retain_mut(|byte| {
            if !proceed {
                return false;
            }
            let pending = std::mem::replace(&mut self.has_pending_ctrl_a, false);
            match (pending, *byte) {
                (false, CTRL_A) => {
                    self.has_pending_ctrl_a = true;
                    false
                }
                (true, b'x' | b'X') => {
                    proceed = false;
                    false
                }
                (true, b'a' | b'A') => {
                    *byte = CTRL_A;
                    true
                }
                _ => true,
            }
        });
        proceed
    }
}

#[cfg(test)]
mod tests {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

    use super::*;
    use crate::devices::virtio::testing::child_test_command;

    #[test]
    fn control_a_x_stops_and_control_a_a_sends_control_a() {
        for (reads, sent, proceed) in [
            // Other keys go to the guest, Ctrl-C included.
            (&[b"ls\r\x03x".as_slice()][..], b"ls\r\x03x".as_slice(), true),
            // The sequence may arrive in two reads.
            (&[b"ab\x01", b"xcd"], b"ab", false),
            (&[b"\x01a\x01\x01\x01qx"], b"\x01\x01qx", true),
        ] {
            let mut escape = EscapeFilter::default();
            let mut all = Vec::new();
            let mut proceeds = true;
            for read in reads {
                let mut bytes = read.to_vec();
                assert!(proceeds);
                proceeds = escape.filter(&mut bytes);
                all.extend(bytes);
            }
            assert_eq!((all.as_slice(), proceeds), (sent, proceed));
        }
    }

    const CHILD_VARIABLE: &str = "GRANULE_TEST_TERMINAL";

    /// Runs child processes on a terminal, one of which ends abnormally.
    #[test]
    fn a_run_restores_a_usable_terminal_even_if_an_earlier_run_was_killed() {
        if let Some(end) = std::env::var_os(CHILD_VARIABLE) {
            let _terminal = Terminal::enter_raw_mode().unwrap().unwrap();
            assert!(!tcgetattr(io::stdin()).unwrap().local_modes.intersects(COOKED_MODES));
            return if end == "abort" {
                std::process::abort()
            };
        }
        let main = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&main).and_then(|()| unlockpt(&main)).unwrap();
        let name = ptsname(&main, Vec::new()).unwrap();
        let mut options = std::fs::OpenOptions::new();
        let terminal = options.read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let found = tcgetattr(&terminal).unwrap();
        let name = "a_run_restores_a_usable_terminal_even_if_an_earlier_run_was_killed";
        let test = format!("vm::terminal::tests::{name}");

        for (end, cooked) in [("exit", true), ("abort", false), ("exit", true), ("exit", true)] {
            let mut child = child_test_command(&test);
            child.env(CHILD_VARIABLE, end).stdin(terminal.try_clone().unwrap());
            let output = child.output().unwrap();

            let modes = tcgetattr(&terminal).unwrap();
            assert_eq!(output.status.success(), cooked, "{output:?}");
            assert_eq!(modes.local_modes.contains(COOKED_MODES), cooked);
            assert_eq!(modes.local_modes.intersects(COOKED_MODES), cooked);
            assert_eq!(modes.output_modes, found.output_modes);
        }
    }
}
