// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Records the system calls of a thread and of the threads that it starts.
//!
//! The recorded thread installs a filter that notifies a supervisor of every call
//! (`SECCOMP_RET_USER_NOTIF`, seccomp_unotify(2)); the supervisor marks the number and lets the call
//! continue. It must not allocate or lock: a recorded thread may hold the allocator's lock while it waits
//! for the supervisor.

use std::{
    io,
    sync::atomic::{AtomicBool, AtomicI32, Ordering},
    thread,
};

use vmm_sys_util::{
    ioctl::{ioctl_with_mut_ref, ioctl_with_ref},
    ioctl_iowr_nr,
};

/// Upper limit of system call numbers.
const NUMBERS: usize = 1024;

/// The numbers of the recorded calls.
pub(super) struct Recorder {
    seen: Box<[AtomicBool]>,
    /// File descriptor of the notifications, -1 before the filter, or -2 after an error.
    listener: AtomicI32,
}

impl Recorder {
    /// Runs `work` in a thread and records its calls.
    ///
    /// # Errors
    /// The kernel has no notifications.
    pub(super) fn record(work: impl FnOnce() + Send) -> io::Result<Self> {
        let recorder = Self {
            seen: (0..NUMBERS).map(|_| AtomicBool::new(false)).collect(),
            listener: AtomicI32::new(-1),
        };
        thread::scope(|scope| {
            let worker = scope.spawn(|| match install_filter() {
                Ok(listener) => {
                    recorder.listener.store(listener, Ordering::Release);
                    work();
                    Ok(())
                }
                Err(error) => {
                    recorder.listener.store(-2, Ordering::Release);
                    Err(error)
                }
            });
            recorder.supervise(|| worker.is_finished());
            worker.join().expect("the recorded work panicked")
        })?;
        Ok(recorder)
    }

    /// Returns whether a call was recorded.
    pub(super) fn saw(&self, number: i64) -> bool {
        let index = usize::try_from(number).unwrap_or(usize::MAX);
        let seen = self.seen.get(index);
        seen.is_some_and(|seen| seen.load(Ordering::Relaxed))
    }

    fn supervise(&self, finished: impl Fn() -> bool) {
        let listener = loop {
            match self.listener.load(Ordering::Acquire) {
                -1 => std::hint::spin_loop(),
                -2 => return,
                listener => break listener,
            }
        };
        let mut poll = libc::pollfd { fd: listener, events: libc::POLLIN, revents: 0 };
        loop {
            // SAFETY: the argument is one valid pollfd.
            let ready = unsafe { libc::poll(&raw mut poll, 1, 10) };
            if ready <= 0 || poll.revents & libc::POLLIN == 0 {
                if finished() {
                    return;
                }
                continue;
            }
            self.handle(listener);
        }
    }

    /// Marks the number of one notification and continues the call.
    fn handle(&self, listener: i32) {
        // SAFETY: the struct consists of integers.
        let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the file descriptor is a listener, and the kernel writes the whole struct.
        if unsafe { ioctl_with_mut_ref(&listener, SECCOMP_IOCTL_NOTIF_RECV(), &mut call) } < 0 {
            return;
        }
        let index = usize::try_from(call.data.nr).unwrap_or(NUMBERS);
        if let Some(seen) = self.seen.get(index) {
            seen.store(true, Ordering::Relaxed);
        }
        let response = libc::seccomp_notif_resp { id: call.id, val: 0, error: 0, flags: CONTINUE };
        // SAFETY: the file descriptor is a listener, and the kernel reads the struct.
        unsafe { ioctl_with_ref(&listener, SECCOMP_IOCTL_NOTIF_SEND(), &response) };
    }
}

/// `SECCOMP_USER_NOTIF_FLAG_CONTINUE`.
const CONTINUE: u32 = 1;

ioctl_iowr_nr!(SECCOMP_IOCTL_NOTIF_RECV, 0x21, 0, libc::seccomp_notif);
ioctl_iowr_nr!(SECCOMP_IOCTL_NOTIF_SEND, 0x21, 1, libc::seccomp_notif_resp);

/// Installs a filter that notifies of every call of this thread; returns the listener.
fn install_filter() -> io::Result<i32> {
    let mut notify = libc::sock_filter {
        code: 0x06, // BPF_RET | BPF_K
        jt: 0,
        jf: 0,
        k: libc::SECCOMP_RET_USER_NOTIF,
    };
    let program = libc::sock_fprog { len: 1, filter: &raw mut notify };
    // SAFETY: the call takes integers.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the program is valid during the call.
    let listener = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    };
    match i32::try_from(listener) {
        Ok(listener @ 0..) => Ok(listener),
        _ => Err(io::Error::last_os_error()),
    }
}
