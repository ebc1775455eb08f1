// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Signals that end a machine, as something to wait for: they are blocked in every thread and read
//! from a file descriptor (signalfd(2)). One that whoever started the program wants ignored
//! (`nohup`) is left ignored. While a machine is built nobody waits: a [guard](Signals::guard) does it then.

use std::{
    fs::File,
    io::{self, Read},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, FromRawFd},
};

use rustix::event::{PollFd, PollFlags, poll};
use vmm_sys_util::eventfd::EventFd;

use crate::scoped_thread::{ScopedThread, borrow_event};

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
        let set = set()?;
        mask(libc::SIG_BLOCK, &set)?;
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        // SAFETY: the set is initialised.
        let fd = unsafe { libc::signalfd(-1, &raw const set, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nobody else's.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// Has the signals do again, in this thread, what they do by themselves: end the process. Those
    /// that have come already are forgotten.
    pub fn release(self) {
        while self.next().is_some() {}
        if let Err(error) = set().and_then(|set| mask(libc::SIG_UNBLOCK, &set)) {
            log::debug!("releasing signals: {error}");
        }
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

impl Signals {
    /// Has a signal that asks to end call `end` in a thread of its own, until what is given is dropped:
    /// for work that cannot be interrupted, such as clearing memory.
    ///
    /// # Errors
    /// No descriptor or thread can be had.
    pub fn guard(
        &self,
        end: impl FnOnce(&'static str) + Send + 'static,
    ) -> io::Result<ScopedThread> {
        let signals = Self(self.0.try_clone()?);
        ScopedThread::start("signals", move |over| {
            while wait(&signals, over) {
                if let Some(Asked::End(signal)) = signals.next() {
                    return end(signal);
                }
            }
        })
    }
}

/// Waits for a signal; false when there is nothing to wait for any more.
fn wait(signals: &Signals, over: &EventFd) -> bool {
    let mut fds = [
        PollFd::from_borrowed_fd(borrow_event(over), PollFlags::IN),
        PollFd::new(signals, PollFlags::IN),
    ];
    match poll(&mut fds, None) {
        Ok(_) => fds[0].revents().is_empty(),
        Err(error) => error == rustix::io::Errno::INTR,
    }
}

/// Those of the signals that are taken.
fn set() -> io::Result<libc::sigset_t> {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the call initialises the set it is given.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: initialised by the call above.
    let mut set = unsafe { set.assume_init() };
    for signal in SIGNALS {
        // SIGCONT tells even where it does nothing.
        if signal != libc::SIGCONT && is_ignored(signal)? {
            continue;
        }
        // SAFETY: the set is initialised and the numbers are valid.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    Ok(set)
}

fn mask(how: libc::c_int, set: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: the set is initialised; nothing is written back.
    match unsafe { libc::pthread_sigmask(how, set, std::ptr::null_mut()) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Whether the program was started with this signal ignored.
fn is_ignored(signal: i32) -> io::Result<bool> {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: the number is valid, nothing is changed, and the action found is written whole.
    match unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) } {
        // SAFETY: written by the call.
        0 => Ok(unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN),
        _ => Err(io::Error::last_os_error()),
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader, Read as _},
        os::unix::process::CommandExt as _,
        process::{Child, ChildStdout, Command, Stdio},
        thread,
        time::Duration,
    };

    use super::*;

    const CHILD: &str = "GRANULE_TEST_SIGNALS";

    /// This test once more in a process of its own, in which SIGHUP is ignored and all threads have
    /// the other signals blocked, up to its saying that it is ready.
    fn child(test: &str) -> (Child, BufReader<ChildStdout>) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "--nocapture", "--test-threads=1"])
            .arg(format!("vm::signals::tests::{test}"))
            .env(CHILD, "yes")
            .stdout(Stdio::piped());
        let prepare = || {
            // SAFETY: a valid number; nothing is called by it.
            unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
            // Threads that the test's harness has started before must not take them.
            Signals::block().map(drop)
        };
        // SAFETY: it makes system calls only, and takes no memory or lock.
        unsafe { command.pre_exec(prepare) };
        let mut child = command.spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("ready") {
            line.clear();
            assert!(said.read_line(&mut line).unwrap() > 0, "it ended");
        }
        (child, said)
    }

    fn send(child: &Child, signal: i32) {
        let process = i32::try_from(child.id()).unwrap();
        // SAFETY: the child was not waited for yet, so the number is its.
        assert_eq!(unsafe { libc::kill(process, signal) }, 0);
    }

    #[test]
    fn a_signal_that_was_ignored_at_the_start_asks_for_nothing() {
        if std::env::var_os(CHILD).is_some() {
            let signals = Signals::block().unwrap();
            println!("\nready");
            let over = EventFd::new(libc::EFD_NONBLOCK).unwrap();
            assert!(wait(&signals, &over));
            println!("\nasked {:?}", signals.next().unwrap());
            return;
        }
        let name = "a_signal_that_was_ignored_at_the_start_asks_for_nothing";
        let (mut child, mut said) = child(name);

        send(&child, libc::SIGHUP);
        thread::sleep(Duration::from_millis(100));
        let lives = child.try_wait().unwrap().is_none();
        send(&child, libc::SIGTERM);
        let mut rest = String::new();
        said.read_to_string(&mut rest).unwrap();

        assert!(lives, "{rest}");
        assert!(rest.contains("asked End(\"SIGTERM\")"), "{rest}");
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn a_guarded_signal_ends_the_process_though_the_main_thread_is_busy() {
        if std::env::var_os(CHILD).is_some() {
            let signals = Signals::block().unwrap();
            // One that is over does nothing any more.
            drop(signals.guard(|_| std::process::exit(2)).unwrap());
            let _guard = signals.guard(|signal| {
                println!("\nended by {signal}");
                std::process::exit(3);
            });
            println!("\nready");
            thread::sleep(Duration::from_secs(60));
            return;
        }
        let name = "a_guarded_signal_ends_the_process_though_the_main_thread_is_busy";
        let (mut child, mut said) = child(name);

        send(&child, libc::SIGCONT);
        send(&child, libc::SIGINT);
        let mut rest = String::new();
        said.read_to_string(&mut rest).unwrap();

        assert_eq!(child.wait().unwrap().code(), Some(3), "{rest}");
        assert!(rest.contains("ended by SIGINT"), "{rest}");
    }

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
        // One that came too late is forgotten; or this would end here.
        // SAFETY: as above.
        unsafe { libc::pthread_kill(this, libc::SIGTERM) };
        signals.release();
    }
}
