// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Termination signals, which are blocked in every thread and read from a signalfd(2). A signal
//! that is ignored at the start (`nohup`) stays ignored. While the main thread builds a VM,
//! [`Signals::terminate_on_signal`] handles signals.

use std::{
    fs::File,
    io::{self, Read},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, FromRawFd},
};

use rustix::event::{PollFd, PollFlags, poll};
use vmm_sys_util::{eventfd::EventFd, signal::create_sigset};

use crate::scoped_thread::{ScopedThread, borrow_event};

/// The termination signals, and `SIGCONT`, after which the terminal must be set raw again.
const SIGNALS: [i32; 5] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGCONT];

/// Action that a signal requests of the main thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignalRequest {
    /// Termination, with the name of the signal.
    Terminate(&'static str),
    Continue,
}

/// A signalfd of the termination signals.
#[derive(Debug)]
pub struct Signals(File);

impl Signals {
    /// Blocks the signals in this thread and in all threads that it starts.
    pub fn block() -> io::Result<Self> {
        let set = signal_set()?;
        change_signal_mask(libc::SIG_BLOCK, &set)?;
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        // SAFETY: the set is initialised.
        let fd = unsafe { libc::signalfd(-1, &raw const set, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call returned a new file descriptor, which nothing else owns.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// Unblocks the signals in this thread, so that they terminate the process. Pending signals are
    /// discarded.
    pub fn release(self) {
        while self.next_request().is_some() {}
        if let Err(error) = signal_set().and_then(|set| change_signal_mask(libc::SIG_UNBLOCK, &set))
        {
            log::debug!("unblocking signals: {error}");
        }
    }

    pub fn next_request(&self) -> Option<SignalRequest> {
        let mut record = [0; size_of::<libc::signalfd_siginfo>()];
        (&self.0).read_exact(&mut record).ok()?;
        // The record starts with the signal number.
        let number = i32::from_ne_bytes(*record.first_chunk()?);
        Some(match number {
            libc::SIGCONT => SignalRequest::Continue,
            libc::SIGINT => SignalRequest::Terminate("SIGINT"),
            libc::SIGTERM => SignalRequest::Terminate("SIGTERM"),
            libc::SIGHUP => SignalRequest::Terminate("SIGHUP"),
            _ => SignalRequest::Terminate("SIGQUIT"),
        })
    }

    /// Starts a thread that calls `terminate` at a termination signal, until the result is dropped.
    /// The caller can then do work that cannot be interrupted, such as clearing memory.
    pub fn terminate_on_signal(
        &self,
        terminate: impl FnOnce(&'static str) + Send + 'static,
    ) -> io::Result<ScopedThread> {
        let signals = Self(self.0.try_clone()?);
        ScopedThread::start("signals", move |stop| {
            while wait_for_signal(&signals, stop) {
                if let Some(SignalRequest::Terminate(signal)) = signals.next_request() {
                    return terminate(signal);
                }
            }
        })
    }
}

/// Checks that no termination signal waits for [`Signals::next_request`]. Long work of the main thread
/// calls this at times, and ends early.
///
/// # Errors
/// A termination signal is pending, or the set cannot be read.
pub fn none_is_pending() -> io::Result<()> {
    let mut pending = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the call writes at most a set; the kernel's is shorter than that of the C library.
    if unsafe { libc::sigpending(pending.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the set was zero, and the call has written the part that has signals.
    let pending = unsafe { pending.assume_init() };
    let is_pending = |signal: i32| {
        // SAFETY: the set is initialised and the number is valid.
        let is_member = unsafe { libc::sigismember(&raw const pending, signal) };
        signal != libc::SIGCONT && is_member == 1
    };
    match SIGNALS.into_iter().any(is_pending) {
        true => Err(io::Error::other("a termination signal is pending")),
        false => Ok(()),
    }
}

/// Waits for a signal. Returns `false` when `stop` is signalled.
fn wait_for_signal(signals: &Signals, stop: &EventFd) -> bool {
    let mut fds = [
        PollFd::from_borrowed_fd(borrow_event(stop), PollFlags::IN),
        PollFd::new(signals, PollFlags::IN),
    ];
    match poll(&mut fds, None) {
        Ok(_) => fds[0].revents().is_empty(),
        Err(error) => error == rustix::io::Errno::INTR,
    }
}

fn signal_set() -> io::Result<libc::sigset_t> {
    let mut set = create_sigset(&[])?;
    for signal in SIGNALS {
        // SIGCONT is delivered even if it is ignored.
        if signal == libc::SIGCONT || !is_ignored(signal)? {
            // SAFETY: the set is initialised and the number is valid.
            unsafe { libc::sigaddset(&raw mut set, signal) };
        }
    }
    Ok(set)
}

fn change_signal_mask(how: libc::c_int, set: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: the set is initialised; nothing is written back.
    match unsafe { libc::pthread_sigmask(how, set, std::ptr::null_mut()) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

fn is_ignored(signal: i32) -> io::Result<bool> {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: the number is valid; the call changes nothing and writes the whole action.
    match unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) } {
        // SAFETY: the call has written the action.
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
        process::{Child, ChildStdout, Stdio},
        thread,
        time::Duration,
    };

    use rustix::process::{Pid, Signal, kill_process};

    use super::*;
    use crate::devices::virtio::testing::child_test_command;

    const CHILD_VARIABLE: &str = "GRANULE_TEST_SIGNALS";

    /// Starts a test in a child process that ignores SIGHUP and blocks the other signals, and waits
    /// until the test prints `ready`.
    fn start_child(test: &str) -> (Child, BufReader<ChildStdout>) {
        let mut command = child_test_command(&format!("vm::signals::tests::{test}"));
        command.env(CHILD_VARIABLE, "yes").stdout(Stdio::piped());
        let prepare = || {
            // SAFETY: the number is valid, and SIG_IGN calls nothing.
            unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
            // Threads of the test harness must not receive the signals.
            Signals::block().map(drop)
        };
        // SAFETY: the closure makes system calls only; it neither allocates nor locks.
        unsafe { command.pre_exec(prepare) };
        let mut child = command.spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("ready") {
            line.clear();
            assert!(output.read_line(&mut line).unwrap() > 0, "the child ended");
        }
        (child, output)
    }

    #[test]
    fn a_blocked_signal_is_read_unless_it_is_ignored_at_the_start() {
        if std::env::var_os(CHILD_VARIABLE).is_some() {
            let signals = Signals::block().unwrap();
            none_is_pending().unwrap();
            println!("\nready");
            let stop = EventFd::new(libc::EFD_NONBLOCK).unwrap();
            assert!(wait_for_signal(&signals, &stop));
            none_is_pending().unwrap_err();
            println!("\nreceived {:?}", signals.next_request().unwrap());
            assert_eq!(signals.next_request(), None);
            none_is_pending().unwrap();
            // A pending signal would end the process if `release` did not discard it.
            // SAFETY: the signal is blocked in this thread.
            assert_eq!(unsafe { libc::raise(libc::SIGTERM) }, 0);
            return signals.release();
        }
        let name = "a_blocked_signal_is_read_unless_it_is_ignored_at_the_start";
        let (mut child, mut output) = start_child(name);

        kill_process(Pid::from_child(&child), Signal::HUP).unwrap();
        thread::sleep(Duration::from_millis(100));
        let running = child.try_wait().unwrap().is_none();
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        let mut rest = String::new();
        output.read_to_string(&mut rest).unwrap();

        assert!(running, "{rest}");
        assert!(rest.contains("received Terminate(\"SIGTERM\")"), "{rest}");
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn a_signal_terminates_the_process_while_the_main_thread_is_busy() {
        if std::env::var_os(CHILD_VARIABLE).is_some() {
            let signals = Signals::block().unwrap();
            // A dropped thread does not call its closure.
            drop(signals.terminate_on_signal(|_| std::process::exit(2)).unwrap());
            let _thread = signals.terminate_on_signal(|signal| {
                println!("\nterminated by {signal}");
                std::process::exit(3);
            });
            println!("\nready");
            thread::sleep(Duration::from_secs(60));
            return;
        }
        let name = "a_signal_terminates_the_process_while_the_main_thread_is_busy";
        let (mut child, mut output) = start_child(name);

        kill_process(Pid::from_child(&child), Signal::CONT).unwrap();
        // A shell's background job ignores SIGINT.
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        let mut rest = String::new();
        output.read_to_string(&mut rest).unwrap();

        assert_eq!(child.wait().unwrap().code(), Some(3), "{rest}");
        assert!(rest.contains("terminated by SIGTERM"), "{rest}");
    }
}
