// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A started program, and the list of all that have not ended: a signal that ends this process also
//! terminates them, so that no emulator outlives its run.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, OwnedFd},
    process::{Child, Command, ExitStatus},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
    time::Timespec,
};

/// Time between SIGTERM and SIGKILL, in which an emulator writes its counts.
const SIGTERM_TIMEOUT: Duration = Duration::from_secs(3);

/// Programs that have not ended, by process ID. A pidfd never names another process.
static RUNNING: Mutex<Programs> = Mutex::new(Programs::new());

type Programs = BTreeMap<u32, Arc<OwnedFd>>;

/// A program in the list of running ones until it is dropped.
#[derive(Debug)]
pub struct RunningProgram {
    child: Child,
    pidfd: Arc<OwnedFd>,
}

impl RunningProgram {
    /// Starts a program.
    ///
    /// # Errors
    /// The program cannot be started; the kind of the error is that of [`Command::spawn`].
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let mut running = running_programs();
        let child = command.spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::other("the child has no process ID"))?;
        let pidfd = Arc::new(pidfd_open(pid, PidfdFlags::empty())?);
        running.insert(child.id(), Arc::clone(&pidfd));
        Ok(Self { child, pidfd })
    }

    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Waits until the program exits or the timeout expires; returns whether it exited.
    pub fn wait_for_exit(&self, timeout: Duration) -> io::Result<bool> {
        let start = Instant::now();
        let mut polled = [PollFd::from_borrowed_fd(self.pidfd.as_fd(), PollFlags::IN)];
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            let left = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            match poll(&mut polled, Some(&left)) {
                // Any thread may receive the signal that ends this process.
                Err(Errno::INTR) => {}
                result => return Ok(result? != 0),
            }
        }
    }

    /// Waits for the program and returns its status. After the deadline, terminates the program with
    /// SIGTERM or, if it does not exit, SIGKILL, and returns `None`.
    pub fn wait_or_terminate(&mut self, deadline: Duration) -> io::Result<Option<ExitStatus>> {
        if self.wait_for_exit(deadline)? {
            return self.child.wait().map(Some);
        }
        pidfd_send_signal(&self.pidfd, Signal::TERM)?;
        if !self.wait_for_exit(SIGTERM_TIMEOUT)? {
            self.child.kill()?;
        }
        self.child.wait()?;
        Ok(None)
    }
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        running_programs().remove(&self.child.id());
    }
}

/// Terminates all running programs with SIGTERM. No program starts before the result is dropped.
pub fn terminate_all() -> MutexGuard<'static, Programs> {
    let running = running_programs();
    for pidfd in running.values() {
        // A program that has just ended needs no signal.
        let _ = pidfd_send_signal(pidfd, Signal::TERM);
    }
    running
}

fn running_programs() -> MutexGuard<'static, Programs> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            atomic::{AtomicBool, Ordering},
            mpsc,
        },
        thread,
    };

    use rustix::{process::kill_process, thread::gettid};
    use signal_hook::{consts::SIGUSR1, flag};

    use super::*;

    #[test]
    fn a_handled_signal_does_not_end_the_wait() {
        let handled = Arc::new(AtomicBool::new(false));
        flag::register(SIGUSR1, Arc::clone(&handled)).unwrap();
        let program = RunningProgram::start(Command::new("sleep").arg("0.5")).unwrap();
        let (sender, receiver) = mpsc::channel();

        let exited = thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                sender.send(gettid()).unwrap();
                program.wait_for_exit(Duration::from_secs(60))
            });
            let thread = receiver.recv().unwrap();
            while !waiter.is_finished() {
                // With the ID of a thread, kill() prefers this thread of the process.
                // It may just have ended.
                let _ = kill_process(thread, Signal::USR1);
                thread::sleep(Duration::from_millis(10));
            }
            waiter.join().unwrap()
        });

        assert!(exited.unwrap() && handled.load(Ordering::Relaxed));
    }

    #[test]
    fn a_program_is_in_the_list_until_it_is_dropped() {
        let mut program = RunningProgram::start(Command::new("sleep").arg("60")).unwrap();
        let id = program.child().id();

        let listed_while_running = running_programs().contains_key(&id);
        program.child().kill().unwrap();
        program.child().wait().unwrap();
        drop(program);

        assert!(listed_while_running && !running_programs().contains_key(&id));
    }
}
