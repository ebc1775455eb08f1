// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The terminal as the guest's console.
//!
//! While a guest runs the terminal is raw: every key goes to the guest, Ctrl-C too. The way out is
//! the [escape key](Escape), Ctrl-A. The terminal gets its settings back when [`Terminal`] is
//! dropped, and by [`restore`] where nothing is dropped any more, in a signal's handler. Should a
//! run ever be killed outright, the next one finds a raw terminal; what it then gives back is a
//! usable one.
//!
//! Output processing stays as it is, so that our own messages have line ends.

use std::{
    io,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::termios::{
    InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, isatty, tcgetattr,
    tcsetattr,
};

/// What the terminal was like, and whether it is raw now.
static BEFORE: OnceLock<Termios> = OnceLock::new();
static RAW: AtomicBool = AtomicBool::new(false);

/// What makes a terminal one that people type lines into.
const COOKED: LocalModes = LocalModes::ICANON
    .union(LocalModes::ECHO)
    .union(LocalModes::ISIG)
    .union(LocalModes::IEXTEN);

/// Standard input as a raw terminal, until dropped.
#[derive(Debug)]
pub struct Terminal(());

impl Terminal {
    /// Makes standard input raw, if it is a terminal.
    ///
    /// # Errors
    /// It is a terminal and its settings cannot be changed.
    pub fn raw() -> io::Result<Option<Self>> {
        let input = io::stdin();
        if !isatty(&input) {
            return Ok(None);
        }
        let found = tcgetattr(&input)?;
        BEFORE.get_or_init(|| usable(found));
        let terminal = Self(());
        RAW.store(true, Ordering::SeqCst);
        terminal.again()?;
        Ok(Some(terminal))
    }

    /// Makes it raw again, after something else had the terminal.
    ///
    /// # Errors
    /// Its settings cannot be changed.
    pub fn again(&self) -> io::Result<()> {
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

/// Gives the terminal its settings back, if it is raw. It takes no lock and no memory, so a
/// signal's handler may call it.
pub fn restore() {
    if RAW.swap(false, Ordering::SeqCst)
        && let Some(before) = BEFORE.get()
    {
        // SAFETY: standard input is never closed; were it, the call below would fail and do nothing.
        let input = unsafe { std::os::fd::BorrowedFd::borrow_raw(0) };
        let _ = tcsetattr(input, OptionalActions::Now, before);
    }
}

/// What to go back to: the settings found, unless they are a killed run's.
fn usable(mut found: Termios) -> Termios {
    if !found.local_modes.intersects(COOKED) {
        found.local_modes |= COOKED;
        found.input_modes |= InputModes::ICRNL;
    }
    found
}

/// Every key as it is, at once; output as it was.
fn raw(mut settings: Termios) -> Termios {
    settings.local_modes &= !(COOKED | LocalModes::ECHONL);
    settings.input_modes &= !(InputModes::BRKINT
        | InputModes::ICRNL
        | InputModes::IGNCR
        | InputModes::INLCR
        | InputModes::ISTRIP
        | InputModes::IXON);
    settings.special_codes[SpecialCodeIndex::VMIN] = 1;
    settings.special_codes[SpecialCodeIndex::VTIME] = 0;
    settings
}

/// The key that the next one has a meaning of its own behind: Ctrl-A.
const KEY: u8 = 1;

/// What the escape key does, for people.
pub const HELP: &str = "Ctrl-A x ends the machine, Ctrl-A a sends Ctrl-A to the guest";

/// Finds the escape key in what is typed: Ctrl-A and then `x` to end the machine, `a` or Ctrl-A
/// for one Ctrl-A to the guest; anything else goes to the guest alone.
#[derive(Debug, Default)]
pub struct Escape {
    armed: bool,
}

impl Escape {
    /// Takes escapes out of `bytes`; false when the machine is to end.
    pub fn filter(&mut self, bytes: &mut Vec<u8>) -> bool {
        let mut go_on = true;
        bytes.retain_mut(|byte| {
            if !go_on {
                return false;
            }
            let armed = std::mem::replace(&mut self.armed, false);
            match (armed, *byte) {
                (false, KEY) => {
                    self.armed = true;
                    false
                }
                (true, b'x' | b'X') => {
                    go_on = false;
                    false
                }
                (true, b'a' | b'A') => {
                    *byte = KEY;
                    true
                }
                _ => true,
            }
        });
        go_on
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(escape: &mut Escape, keys: &[u8]) -> (Vec<u8>, bool) {
        let mut bytes = keys.to_vec();
        let go_on = escape.filter(&mut bytes);
        (bytes, go_on)
    }

    #[test]
    fn keys_go_to_the_guest_control_c_too() {
        let mut escape = Escape::default();

        assert_eq!(
            typed(&mut escape, b"ls\r\x03x"),
            (b"ls\r\x03x".to_vec(), true)
        );
    }

    #[test]
    fn control_a_x_ends_even_in_two_readings() {
        let mut escape = Escape::default();

        assert_eq!(typed(&mut escape, b"ab\x01"), (b"ab".to_vec(), true));
        assert_eq!(typed(&mut escape, b"xcd"), (Vec::new(), false));
    }

    #[test]
    fn control_a_reaches_the_guest_by_a_or_twice() {
        let mut escape = Escape::default();

        assert_eq!(
            typed(&mut escape, b"\x01a\x01\x01\x01qx"),
            (b"\x01\x01qx".to_vec(), true)
        );
    }

    #[test]
    fn a_raw_terminal_left_by_a_killed_run_is_made_usable_and_a_cooked_one_left_alone() {
        let Ok(mut found) = rustix::pty::openpt(rustix::pty::OpenptFlags::RDWR)
            .and_then(|terminal| tcgetattr(&terminal))
        else {
            return granule_types::testing::skip("this host provides no pseudo-terminal");
        };
        found.local_modes |= COOKED;
        let left = raw(found.clone());

        assert!(!left.local_modes.intersects(COOKED));
        assert!(usable(left).local_modes.contains(COOKED));
        let kept = usable(found.clone());
        assert_eq!(kept.local_modes, found.local_modes);
        assert_eq!(kept.output_modes, found.output_modes);
    }
}
