// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of the filters. A recorder notes the system calls of a thread and of the threads that it
//! starts, to show that each allowed call is used.
//!
//! The recorded thread installs a filter that notifies a supervisor of every call
//! (`SECCOMP_RET_USER_NOTIF`, seccomp_unotify(2)); the supervisor marks the number and lets the
//! call continue. It must not allocate or lock: a recorded thread may hold the allocator's lock
//! while it waits for the supervisor.

use std::{
    io::Write as _,
    process::Stdio,
    sync::atomic::{AtomicBool, AtomicI32, Ordering},
    thread,
};

use vmm_sys_util::{
    ioctl::{ioctl_with_mut_ref, ioctl_with_ref},
    ioctl_iowr_nr,
};

use super::{
    exercises::{OpenResources, run_components, start_client},
    *,
};
use crate::devices::virtio::testing::child_test;

const ROLES: [ThreadRole; 4] =
    [ThreadRole::Main, ThreadRole::Vcpu, ThreadRole::Console, ThreadRole::Api];

#[test]
fn the_filter_of_each_role_is_within_that_of_the_process() {
    let process = ThreadRole::Main.numbers();

    for role in ROLES {
        assert!(role.filter().is_ok(), "{role:?}");
        let within = role.numbers().iter().all(|call| process.contains(call));
        assert!(within, "{role:?}");
    }
}

#[test]
fn programs_and_sockets_and_io_uring_are_not_allowed() {
    let process = ThreadRole::Main.numbers();

    for call in [
        libc::SYS_execve,
        libc::SYS_execveat,
        libc::SYS_ptrace,
        libc::SYS_mount,
        libc::SYS_socket,
        libc::SYS_bind,
        libc::SYS_bpf,
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
    ] {
        assert!(!process.contains(&call), "{call}");
    }
}

/// Runs in a child process, because a filter stays in force.
#[test]
fn a_forbidden_call_ends_the_process_with_its_number() {
    if std::env::var_os("GRANULE_TEST_SECCOMP").is_some() {
        ThreadRole::Console.confine().unwrap();
        // SAFETY: the call has no arguments; the filter ends the process.
        unsafe { libc::getppid() };
        return;
    }
    if !has_seccomp() {
        return granule_types::testing::skip("this host has no seccomp");
    }
    let test = "vm::seccomp::tests::a_forbidden_call_ends_the_process_with_its_number";
    let output = child_test(test).env("GRANULE_TEST_SECCOMP", "1").output().unwrap();

    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    let number = format!("system call {:04} is not allowed", libc::SYS_getppid);
    assert!(message.contains(&number), "{message}");
}

#[test]
fn every_allowed_call_names_its_user_once() {
    let calls: BTreeMap<_, _> = ThreadRole::Main.allowed().copied().collect();

    assert_eq!(calls.len(), ThreadRole::Main.allowed().count());
    assert!(calls.values().all(|user| !user.is_empty()));
}

/// Name of the variable that makes the test the recorded child process; its value is a folder.
const RECORD: &str = "GRANULE_TEST_RECORD";

/// Runs in a child process, because filters stay in force and a forbidden call ends the process.
#[test]
fn every_allowed_call_is_exercised() {
    if let Some(folder) = std::env::var_os(RECORD) {
        return record_components(Path::new(&folder));
    }
    if !has_seccomp() {
        return granule_types::testing::skip("this host has no seccomp");
    }
    let folder = tempfile::tempdir().unwrap();
    let mut child = child_test("vm::seccomp::tests::every_allowed_call_is_exercised")
        .env(RECORD, folder.path())
        // One arena, so that allocations use brk.
        .env("MALLOC_ARENA_MAX", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"key\n").unwrap();
    let output = child.wait_with_output().unwrap();

    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    if printed.contains("NO NOTIFICATIONS") {
        return granule_types::testing::skip("this host's seccomp has no user notifications");
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}{errors}");
    let seen: Vec<i64> =
        printed.lines().filter_map(|line| line.strip_prefix("SEEN ")?.parse().ok()).collect();
    // `a_forbidden_call_ends_the_process_with_its_number` exercises exit_group.
    let missing: Vec<_> = ThreadRole::Main
        .allowed()
        .filter(|(number, _)| !seen.contains(number) && *number != libc::SYS_exit_group)
        .collect();
    assert!(missing.is_empty(), "no component uses {missing:?}");
}

fn record_components(folder: &Path) {
    let opened = OpenResources::new(folder);
    let client = start_client(&opened);
    let recorder = match Recorder::record(|| run_components(opened)) {
        Ok(recorder) => recorder,
        Err(error) => return println!("NO NOTIFICATIONS {error}"),
    };
    assert!(client.join().unwrap().contains("running"));
    for (number, _) in
        ThreadRole::Main.allowed().filter(|(number, _)| recorder.has_recorded(*number))
    {
        println!("\nSEEN {number}");
    }
}

/// Upper limit of system call numbers.
const NUMBERS: usize = 1024;

/// The numbers of the recorded calls.
struct Recorder {
    seen: Box<[AtomicBool]>,
    /// File descriptor of the notifications, -1 before the filter, or -2 after an error.
    listener: AtomicI32,
}

impl Recorder {
    /// Runs `work` in a thread and records its calls.
    ///
    /// # Errors
    /// The kernel has no notifications.
    fn record(work: impl FnOnce() + Send) -> io::Result<Self> {
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
    fn has_recorded(&self, number: i64) -> bool {
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
