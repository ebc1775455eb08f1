// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Waits for child processes with a timeout.

use std::{
    io,
    os::fd::AsFd,
    process::{Child, ExitStatus},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open},
    time::Timespec,
};

/// Time that a terminated emulator gets to write its counters.
const TERMINATION: Duration = Duration::from_secs(3);

/// Sleeps until the child exits or the time is up; returns whether it exited.
pub fn wait_for_exit(child: &Child, timeout: Duration) -> io::Result<bool> {
    let pidfd = pidfd_open(pid(child)?, PidfdFlags::empty())?;
    let timeout = Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    let mut polled = [PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN)];
    Ok(poll(&mut polled, Some(&timeout))? != 0)
}

/// Waits for the child and returns its status. After the deadline the child is terminated, and
/// killed if that has no effect; the result is `None`.
pub fn wait_or_terminate(child: &mut Child, deadline: Duration) -> io::Result<Option<ExitStatus>> {
    if wait_for_exit(child, deadline)? {
        return child.wait().map(Some);
    }
    kill_process(pid(child)?, Signal::TERM)?;
    if !wait_for_exit(child, TERMINATION)? {
        child.kill()?;
    }
    child.wait()?;
    Ok(None)
}

fn pid(child: &Child) -> io::Result<Pid> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    pid.ok_or_else(|| io::Error::other("the child has no process number"))
}
