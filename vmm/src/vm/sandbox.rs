// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What this process may still do once it runs a guest.
//!
//! A guest that found a hole in a device would be in one of our threads. Two fences stand there:
//!
//! * **Landlock**: of the file system, only what is below `/proc`, `/sys/kernel` and the like can be
//!   opened, which a machine's memory and counters are read from. The files given on the command line
//!   are open already ([`super::open_files`]); from the control socket's folder files can be removed, as
//!   the socket is at the end, and nothing else.
//! * **seccomp**: each kind of thread has the system calls it uses and no other. The main thread's
//!   list is inherited by all threads it starts and holds for the whole process; vCPU and console
//!   threads then add a narrower one. Programs cannot be executed, and no network socket made.
//!
//! A call that is not on a list ends the process with a message that names thread and call. On a
//! host whose kernel lacks one of the two, the machine runs without and says so.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fs, io,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use landlock::{
    ABI, Access, AccessFs, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter,
};
use thiserror::Error;
use vmm_sys_util::signal::register_signal_handler;

use super::{stats::REFRESH, terminal};
use crate::arch::host;

/// Why the fences cannot be put up.
#[derive(Debug, Error)]
pub enum SandboxError {
    /// A filter cannot be made.
    #[error("a seccomp filter cannot be made")]
    Filter(#[from] seccompiler::BackendError),
    /// A filter cannot be put in place.
    #[error("a seccomp filter cannot be put in place")]
    Apply(#[from] seccompiler::Error),
    /// Landlock refuses.
    #[error("Landlock refuses the rules; --sandbox off runs without")]
    Landlock(#[from] landlock::RulesetError),
    /// A file to be allowed cannot be opened.
    #[error("{path} cannot be opened", path = path.display())]
    Path {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The handler that tells of a call that is not allowed.
    #[error("the handler of SIGSYS cannot be installed")]
    Handler(#[source] io::Error),
}

/// Calls that every thread uses: memory, locks, signals, and its own end.
const EVERYWHERE: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_madvise,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_ppoll,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    libc::SYS_tkill,
    libc::SYS_write,
    libc::SYS_writev,
];

/// What a vCPU needs beyond that: the guest, and devices that work on the vCPU's thread.
const VCPU: &[i64] = &[
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_dup,
    libc::SYS_epoll_ctl,
    libc::SYS_eventfd2,
    libc::SYS_fallocate,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_fsync,
    libc::SYS_ioctl,
    libc::SYS_lseek,
    libc::SYS_prctl,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_rseq,
    libc::SYS_set_robust_list,
];

/// What the control socket's thread needs.
const API: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
];

/// What building and ending machines needs: the process as a whole.
const MAIN: &[i64] = &[
    libc::SYS_connect,
    libc::SYS_dup3,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_pwait,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_ftruncate,
    libc::SYS_getdents64,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_mbind,
    libc::SYS_memfd_create,
    libc::SYS_mincore,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_perf_event_open,
    libc::SYS_pipe2,
    libc::SYS_readlinkat,
    libc::SYS_recvmsg,
    libc::SYS_sched_setaffinity,
    // The narrower filters of the other threads.
    libc::SYS_seccomp,
    libc::SYS_sendmsg,
    libc::SYS_signalfd4,
    libc::SYS_statx,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_uname,
    libc::SYS_unlinkat,
];

/// Requests of `ioctl` that set a terminal: `TCSETS`, `TCSETS2`.
const TERMINAL_SETTINGS: [u64; 2] = [0x5402, 0x402c_542b];

/// A kind of thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thread {
    /// The main thread, and with it all others.
    Main,
    /// A vCPU.
    Vcpu,
    /// The console's input.
    Console,
    /// The control socket.
    Api,
}

impl Thread {
    fn calls(self) -> Vec<i64> {
        let own: &[&[i64]] = match self {
            Self::Main => &[EVERYWHERE, VCPU, API, MAIN, host::OLD_CALLS],
            Self::Vcpu => &[EVERYWHERE, VCPU],
            Self::Console => &[EVERYWHERE],
            Self::Api => &[EVERYWHERE, API],
        };
        own.concat()
    }

    fn filter(self) -> Result<BpfProgram, seccompiler::BackendError> {
        let rules = self.calls().into_iter().map(|call| (call, Vec::new()));
        let mut rules: BTreeMap<_, _> = rules.collect();
        // Every thread may have to give the terminal its settings back.
        if let Entry::Vacant(ioctl) = rules.entry(libc::SYS_ioctl) {
            let terminal = TERMINAL_SETTINGS.map(|request| {
                let (length, is) = (SeccompCmpArgLen::Dword, SeccompCmpOp::Eq);
                SeccompRule::new(vec![SeccompCondition::new(1, length, is, request)?])
            });
            ioctl.insert(terminal.into_iter().collect::<Result<_, _>>()?);
        }
        let filter = SeccompFilter::new(
            rules,
            SeccompAction::Trap,
            SeccompAction::Allow,
            std::env::consts::ARCH.try_into()?,
        )?;
        filter.try_into()
    }

    /// Allows the calling thread, and what it starts, this kind's system calls only.
    ///
    /// # Errors
    /// The kernel has seccomp and refuses the filter.
    pub fn confine(self) -> Result<(), SandboxError> {
        if !has_seccomp() {
            return Ok(());
        }
        install_handler()?;
        Ok(apply_filter(&self.filter()?)?)
    }
}

/// Whether the kernel has seccomp filters.
fn has_seccomp() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        let has = Path::new("/proc/sys/kernel/seccomp/actions_avail").exists();
        if !has {
            log::warn!("this host's kernel has no seccomp: the machine runs without its filters");
        }
        has
    })
}

/// What may be done with a file or folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Read it.
    Read,
    /// Read and write it.
    Write,
    /// Take a file or socket out of this folder.
    RemoveIn,
}

/// Leaves this process the files that a machine is made from, and `files`.
///
/// # Errors
/// The kernel has Landlock and refuses, or one of `files` is not there.
pub fn restrict_files(files: &[(PathBuf, Use)]) -> Result<(), SandboxError> {
    let abi = ABI::V3;
    let (read, all) = (AccessFs::from_read(abi), AccessFs::from_all(abi));
    let mut rules = Ruleset::default().handle_access(all)?.create()?;
    for (path, written) in [
        ("/dev/urandom", false),
        ("/proc", false),
        (REFRESH, true),
        ("/sys/kernel", false),
        ("/sys/devices/system", false),
    ] {
        // What is not there need not be allowed.
        if let Ok(file) = PathFd::new(path) {
            let access = if written {
                all & AccessFs::from_file(abi)
            } else {
                read
            };
            rules = rules.add_rule(PathBeneath::new(file, access))?;
        }
    }
    for (path, used) in files {
        let file = PathFd::new(path).map_err(|_| SandboxError::Path {
            path: path.clone(),
            source: io::Error::last_os_error(),
        })?;
        let of_kind = match fs::metadata(path) {
            Ok(file) if file.is_dir() => all,
            _ => AccessFs::from_file(abi),
        };
        let access = match used {
            Use::Read => read & of_kind,
            Use::Write => all & of_kind,
            Use::RemoveIn => AccessFs::RemoveFile.into(),
        };
        rules = rules.add_rule(PathBeneath::new(file, access))?;
    }
    let status = rules.restrict_self()?;
    if status.ruleset == RulesetStatus::NotEnforced {
        log::warn!("this host's kernel has no Landlock: the machine can open any file");
    }
    Ok(())
}

/// Installs, once, what tells of a call that is not allowed.
fn install_handler() -> Result<(), SandboxError> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    INSTALLED
        .get_or_init(|| {
            register_signal_handler(libc::SIGSYS, not_allowed).map_err(|error| error.errno())
        })
        .map_err(|error| SandboxError::Handler(io::Error::from_raw_os_error(error)))
}

/// Runs in the thread that made the call: says which, and ends the process.
extern "C" fn not_allowed(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    /// Where `struct siginfo` holds `si_syscall`: behind three numbers and the call's address.
    const SYSCALL_AT: usize = 24;
    terminal::restore();
    let at = info.cast::<u8>().wrapping_add(SYSCALL_AT).cast::<i32>();
    // SAFETY: the kernel hands a handler of SIGSYS a siginfo of 128 bytes, aligned to 8.
    let call = unsafe { at.read() };
    let mut line = *b"granule: system call      is not allowed here (seccomp); please report it\n";
    let mut rest = call.unsigned_abs();
    for digit in line[21..25].iter_mut().rev() {
        *digit = b'0' + u8::try_from(rest % 10).unwrap_or(0);
        rest /= 10;
    }
    // SAFETY: the line is valid for its length; write is safe in a handler.
    unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
    // SAFETY: ends the process at once, running nothing more of it.
    unsafe { libc::_exit(1) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_thread_has_a_filter_within_that_of_the_process() {
        let process = Thread::Main.calls();

        for kind in [Thread::Main, Thread::Vcpu, Thread::Console, Thread::Api] {
            assert!(kind.filter().is_ok(), "{kind:?}");
            assert!(
                kind.calls().iter().all(|call| process.contains(call)),
                "{kind:?}"
            );
        }
    }

    #[test]
    fn programs_and_network_sockets_are_on_no_list() {
        let process = Thread::Main.calls();

        for call in [
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_ptrace,
            libc::SYS_mount,
            libc::SYS_socket,
            libc::SYS_bind,
            libc::SYS_bpf,
        ] {
            assert!(!process.contains(&call), "{call}");
        }
    }

    /// In a process of its own: a filter stays for good.
    #[test]
    fn a_call_that_is_not_allowed_ends_the_process_with_its_number() {
        if std::env::var_os("GRANULE_TEST_SECCOMP").is_some() {
            Thread::Console.confine().unwrap();
            // SAFETY: takes nothing; the filter is to end the process here.
            unsafe { libc::getppid() };
            return;
        }
        if !has_seccomp() {
            return granule_types::testing::skip("this host has no seccomp");
        }
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "vm::sandbox::tests::a_call_that_is_not_allowed_ends_the_process_with_its_number",
            ])
            .args(["--nocapture", "--test-threads=1"])
            .env("GRANULE_TEST_SECCOMP", "1")
            .output()
            .unwrap();

        assert_eq!(output.status.code(), Some(1));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let number = format!("system call {:04} is not allowed", libc::SYS_getppid);
        assert!(said.contains(&number), "{said}");
    }

    /// In a process of its own, as above.
    #[test]
    fn files_that_were_not_given_cannot_be_opened() {
        let folder = tempfile::tempdir().unwrap();
        let [given, other] = ["given", "other"].map(|name| folder.path().join(name));
        if let Some(given) = std::env::var_os("GRANULE_TEST_LANDLOCK") {
            let given = PathBuf::from(given);
            restrict_files(&[(given.clone(), Use::Write)]).unwrap();
            fs::write(&given, "x").unwrap();
            let other = fs::read("/etc/hostname").map_err(|error| error.kind());
            println!("OTHER {other:?}");
            return;
        }
        fs::write(&given, "").unwrap();
        fs::write(&other, "").unwrap();
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "vm::sandbox::tests::files_that_were_not_given_cannot_be_opened",
            ])
            .arg("--nocapture")
            .env("GRANULE_TEST_LANDLOCK", &given)
            .output()
            .unwrap();

        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}");
        assert_eq!(fs::read(&given).unwrap(), b"x");
        if !Path::new("/sys/kernel/security/landlock").exists() && said.contains("OTHER Ok") {
            return granule_types::testing::skip("this host has no Landlock");
        }
        assert!(said.contains("PermissionDenied"), "{said}");
    }
}
