// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Signals that end a machine, as something to wait for: they are blocked in every thread and read
//! from a file descriptor (signalfd(2)).

use std::{
    fs::File,
    io::{self, Read},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, FromRawFd},
};

/// The signals: those that ask to end, and the one that tells that the terminal is ours again.
const SIGNALS: [i32; 5] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGCONT,
];

/// What a signal asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// To end; the signal's name.
    End(&'static str),
    /// To go on after a stop.
    Continue,
}

/// The file descriptor.
#[derive(Debug)]
pub struct Signals(File);

impl Signals {
    /// Blocks the signals in this thread and all that it starts from now on.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn block() -> io::Result<Self> {
        let mut set = MaybeUninit::uninit();
        // SAFETY: the call initialises the set it is given.
        unsafe { libc::sigemptyset(set.as_mut_ptr()) };
        // SAFETY: initialised by the call above.
        let mut set = unsafe { set.assume_init() };
        for signal in SIGNALS {
            // SAFETY: the set is initialised and the numbers are valid.
            unsafe { libc::sigaddset(&raw mut set, signal) };
        }
        // SAFETY: the set is initialised; nothing is written back.
        match unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut())
        } {
            0 => {}
            error => return Err(io::Error::from_raw_os_error(error)),
        }
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        // SAFETY: the set is initialised.
        let fd = unsafe { libc::signalfd(-1, &raw const set, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nobody else's.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// What the next signal asks for, if one has come.
    pub fn next(&self) -> Option<Asked> {
        let mut record = [0; size_of::<libc::signalfd_siginfo>()];
        (&self.0).read_exact(&mut record).ok()?;
        // A record begins with the signal's number.
        let number = i32::from_ne_bytes(*record.first_chunk()?);
        Some(match number {
            libc::SIGCONT => Asked::Continue,
            libc::SIGINT => Asked::End("SIGINT"),
            libc::SIGTERM => Asked::End("SIGTERM"),
            libc::SIGHUP => Asked::End("SIGHUP"),
            _ => Asked::End("SIGQUIT"),
        })
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_read_instead_of_killing() {
        let signals = Signals::block().unwrap();
        assert_eq!(signals.next(), None);

        // SAFETY: takes nothing and cannot fail.
        let this = unsafe { libc::pthread_self() };
        // SAFETY: this thread lives, and the signal is blocked in it.
        unsafe { libc::pthread_kill(this, libc::SIGTERM) };

        assert_eq!(signals.next(), Some(Asked::End("SIGTERM")));
        assert_eq!(signals.next(), None);
    }
}
