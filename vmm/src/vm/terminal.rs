// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Standard input as a raw terminal for the guest's console.
//!
//! While a guest runs, the terminal is raw: every key goes to the guest, Ctrl-C included, except
//! the [escape key](EscapeKey), Ctrl-A. The settings are restored when [`Terminal`] is dropped, and
//! by [`restore`] in a signal handler. If a run is killed, the next run finds a raw terminal and
//! restores usable settings.
//!
//! Output processing is not changed, so that line ends of this program's messages stay visible.

use std::{
    io,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::termios::{
    InputModes, LocalModes, OptionalActions, Termios, isatty, tcgetattr, tcsetattr,
};

/// The settings to restore, and whether the terminal is raw.
static SAVED: OnceLock<Termios> = OnceLock::new();
static RAW: AtomicBool = AtomicBool::new(false);

/// Modes of a terminal with line editing and signals.
const COOKED: LocalModes =
    LocalModes::ICANON.union(LocalModes::ECHO).union(LocalModes::ISIG).union(LocalModes::IEXTEN);

/// A raw terminal on standard input. Dropping it restores the settings.
#[derive(Debug)]
pub struct Terminal(());

impl Terminal {
    /// Sets standard input to raw mode, if it is a terminal.
    pub fn raw() -> io::Result<Option<Self>> {
        let input = io::stdin();
        if !isatty(&input) {
            return Ok(None);
        }
        let found = tcgetattr(&input)?;
        SAVED.get_or_init(|| usable(found));
        let terminal = Self(());
        RAW.store(true, Ordering::SeqCst);
        terminal.set_raw()?;
        Ok(Some(terminal))
    }

    /// Sets raw mode again, after another program has used the terminal.
    pub fn set_raw(&self) -> io::Result<()> {
        let input = io::stdin();
        let settings = raw(tcgetattr(&input)?);
        Ok(tcsetattr(&input, OptionalActions::Now, &settings)?)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        restore();
    }
}

/// Restores the settings of a raw terminal. It neither locks nor allocates, so a signal handler may
/// call it.
pub fn restore() {
    if RAW.swap(false, Ordering::SeqCst)
        && let Some(saved) = SAVED.get()
    {
        // SAFETY: this program never closes standard input.
        let input = unsafe { std::os::fd::BorrowedFd::borrow_raw(0) };
        let _ = tcsetattr(input, OptionalActions::Now, saved);
    }
}

/// Returns the settings to restore: `found`, in cooked mode if a killed run left the terminal raw.
fn usable(mut found: Termios) -> Termios {
    if !found.local_modes.intersects(COOKED) {
        found.local_modes |= COOKED;
        found.input_modes |= InputModes::ICRNL;
    }
    found
}

/// Returns the settings with raw input and unchanged output.
fn raw(mut settings: Termios) -> Termios {
    let output_modes = settings.output_modes;
    settings.make_raw();
    settings.output_modes = output_modes;
    settings
}

/// Ctrl-A.
const ESCAPE: u8 = 1;

/// Help text of the escape key.
pub const HELP: &str = "Ctrl-A x stops the VM, Ctrl-A a sends Ctrl-A to the guest";

/// A filter for the escape key: Ctrl-A and then `x` stops the VM, `a` or Ctrl-A sends one Ctrl-A to
/// the guest, any other key is sent alone.
#[derive(Debug, Default)]
pub struct EscapeKey {
    pending: bool,
}

impl EscapeKey {
    /// Removes escape sequences from `bytes`; returns `false` if the VM is to stop.
    pub fn filter(&mut self, bytes: &mut Vec<u8>) -> bool {
        let mut proceed = true;
        bytes.retain_mut(|byte| {
            if !proceed {
                return false;
            }
            let pending = std::mem::replace(&mut self.pending, false);
            match (pending, *byte) {
                (false, ESCAPE) => {
                    self.pending = true;
                    false
                }
                (true, b'x' | b'X') => {
                    proceed = false;
                    false
                }
                (true, b'a' | b'A') => {
                    *byte = ESCAPE;
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
    use crate::devices::virtio::testing::child_test;

    #[test]
    fn control_a_x_stops_and_control_a_a_sends_control_a() {
        for (reads, sent, proceed) in [
            // Other keys go to the guest, Ctrl-C included.
            (&[b"ls\r\x03x".as_slice()][..], b"ls\r\x03x".as_slice(), true),
            // The sequence may arrive in two reads.
            (&[b"ab\x01", b"xcd"], b"ab", false),
            (&[b"\x01a\x01\x01\x01qx"], b"\x01\x01qx", true),
        ] {
            let mut escape = EscapeKey::default();
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

    const CHILD: &str = "GRANULE_TEST_TERMINAL";

    /// Runs in child processes on a terminal; one of them ends abnormally.
    #[test]
    fn a_run_restores_a_usable_terminal_even_if_an_earlier_run_was_killed() {
        if let Some(end) = std::env::var_os(CHILD) {
            let _terminal = Terminal::raw().unwrap().unwrap();
            assert!(!tcgetattr(io::stdin()).unwrap().local_modes.intersects(COOKED));
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
            let mut child = child_test(&test);
            child.env(CHILD, end).stdin(terminal.try_clone().unwrap());
            let output = child.output().unwrap();

            let modes = tcgetattr(&terminal).unwrap();
            assert_eq!(output.status.success(), cooked, "{output:?}");
            assert_eq!(modes.local_modes.contains(COOKED), cooked);
            assert_eq!(modes.local_modes.intersects(COOKED), cooked);
            assert_eq!(modes.output_modes, found.output_modes);
        }
    }
}
