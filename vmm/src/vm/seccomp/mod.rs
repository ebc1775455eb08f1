// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! seccomp filters, which limit each kind of thread to the system calls that it uses.
//!
//! Threads inherit the filter of the main thread that starts them; vCPU, console and control socket
//! threads add narrower filters. Several vCPU threads inherit one from a thread that starts them.
//! A forbidden call ends the process with a message that names the call. `io_uring` calls are not
//! allowed, because they can create sockets and open files without passing the filter.

#[cfg(test)]
mod components;
mod program;
#[cfg(test)]
mod tests;

use std::{io, path::Path, sync::OnceLock, thread};

use seccompiler::apply_filter;
use vmm_sys_util::signal::register_signal_handler;

use self::program::{Actions, Argument, ArgumentValues, Program};
use super::{
    fatal_signals::end_process,
    outcome::{VmError, failed},
};
use crate::arch::host;

/// An allowed system call and the code that uses it.
type AllowedCall = (i64, &'static str);

/// Calls of all threads.
const ALL_THREAD_CALLS: &[AllowedCall] = &[
    (libc::SYS_brk, "allocator"),
    (libc::SYS_clock_gettime, "Instant::now, where the vDSO has no usable clock"),
    (libc::SYS_clock_nanosleep, "thread::sleep"),
    (libc::SYS_close, "drop of file descriptors"),
    (libc::SYS_exit, "end of a thread"),
    (libc::SYS_exit_group, "end of the process"),
    (libc::SYS_futex, "locks, condition variables, channels"),
    (libc::SYS_getpid, "kick::Kicker, raise"),
    (
        libc::SYS_getrandom,
        "seeds of hash maps, virtio entropy device, seed and generation of a VM that reboots",
    ),
    (libc::SYS_gettid, "kick::KickTarget, thread start of the C library"),
    (libc::SYS_madvise, "allocator, balloon, memory zones"),
    (libc::SYS_mmap, "allocator, thread stacks, memory zones, kvm_run"),
    (libc::SYS_mprotect, "guard pages of thread stacks, memory zones"),
    (libc::SYS_mremap, "allocator"),
    (libc::SYS_munmap, "allocator, thread stacks, memory zones"),
    (libc::SYS_nanosleep, "thread::sleep of C libraries without clock_nanosleep"),
    (libc::SYS_ppoll, "waiting for events"),
    (libc::SYS_read, "eventfds, files, pipes"),
    (libc::SYS_readv, "buffered reads of the C library"),
    (libc::SYS_restart_syscall, "sleeps that SIGSTOP interrupts"),
    (libc::SYS_rt_sigaction, "kick::KickTarget, handler of SIGSYS"),
    (libc::SYS_rt_sigprocmask, "thread start of the C library, Signals::release"),
    (libc::SYS_rt_sigreturn, "return from signal handlers"),
    (libc::SYS_sched_getaffinity, "available_parallelism, for memory"),
    (libc::SYS_sched_yield, "locks that spin"),
    (libc::SYS_sigaltstack, "thread start of the standard library"),
    (libc::SYS_tgkill, "kick::Kicker, raise"),
    (libc::SYS_tkill, "raise() of the C library"),
    (libc::SYS_write, "eventfds, console output, log"),
    (libc::SYS_writev, "log"),
];

/// Additional calls of vCPU threads: `KVM_RUN`, and devices that are emulated in the vCPU's thread.
const VCPU_CALLS: &[AllowedCall] = &[
    (libc::SYS_clone, "start of vCPU and device threads, by C libraries without clone3"),
    (libc::SYS_clone3, "start of vCPU and device threads"),
    (libc::SYS_eventfd2, "events of device threads"),
    (libc::SYS_fallocate, "discard and write-zeroes of disks, balloon on a memfd"),
    (libc::SYS_fcntl, "duplicates of file descriptors"),
    (libc::SYS_fdatasync, "flush of disks"),
    (libc::SYS_ioctl, "KVM_RUN, vhost, tap offloads, block device discards"),
    (libc::SYS_lseek, "size of disks, write-zeroes of disks without fallocate"),
    (libc::SYS_prctl, "names of vCPU and device threads, seccomp"),
    (libc::SYS_pread64, "statistics of KVM"),
    (libc::SYS_preadv, "disk reads"),
    (libc::SYS_pwritev, "disk writes"),
    (libc::SYS_rseq, "thread start of the C library"),
    (libc::SYS_set_robust_list, "thread start of the C library"),
];

/// Additional calls of the control socket's thread.
const API_CALLS: &[AllowedCall] = &[
    (libc::SYS_accept4, "accepting clients"),
    (libc::SYS_recvfrom, "reading requests"),
    (libc::SYS_sendto, "writing responses"),
    (libc::SYS_setsockopt, "timeouts of clients"),
];

/// Additional calls of the main thread, which builds and ends VMs and reads statistics.
const MAIN_CALLS: &[AllowedCall] = &[
    (libc::SYS_fstat, "metadata of files, by C libraries without statx"),
    (libc::SYS_ftruncate, "memfd, statistics file"),
    (libc::SYS_getdents64, "hugetlb pools in /sys/kernel/mm, snapshots"),
    (libc::SYS_mbind, "memory zones on a NUMA node"),
    (libc::SYS_memfd_create, "shared memory zones"),
    (libc::SYS_mincore, "hugetlb pages of a snapshot or a reset"),
    (libc::SYS_newfstatat, "metadata of paths"),
    (libc::SYS_openat, "/proc and /sys files, snapshots"),
    (libc::SYS_perf_event_open, "event counters after a reboot"),
    (libc::SYS_pipe2, "input of the virtio console"),
    (libc::SYS_pwrite64, "snapshots"),
    (libc::SYS_renameat, "snapshots"),
    (libc::SYS_readlinkat, "backtrace of a panic"),
    (libc::SYS_rt_sigpending, "signals::none_is_pending"),
    (libc::SYS_seccomp, "narrower filters of other threads"),
    (libc::SYS_statx, "metadata of paths"),
    (libc::SYS_unlinkat, "removal of the control socket, snapshots"),
];

/// Calls that every thread may use with certain values of an argument: `TCSETS` and `TCSETS2` restore
/// the terminal's settings; debug builds of the standard library check a file descriptor with `F_GETFD`
/// before they close it; a thread may change its own CPUs, as those of vCPUs and of devices do.
const ARGUMENT_RESTRICTED_CALLS: &[ArgumentValues] = &[
    (libc::SYS_ioctl, Argument::Second, &[0x5402, 0x402c_542b]),
    (libc::SYS_fcntl, Argument::Second, &[libc::F_GETFD as u32]),
    (libc::SYS_sched_setaffinity, Argument::First, &[0]),
];

/// Values of an argument that no thread may use: `TIOCSTI` and `TIOCLINUX` type into the terminal, whose
/// shell executes it.
const FORBIDDEN_ARGUMENTS: &[ArgumentValues] =
    &[(libc::SYS_ioctl, Argument::Second, &[0x5412, 0x541c])];

/// Role of a thread, which selects its filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadRole {
    /// The main thread, whose filter later threads inherit.
    Main,
    /// A vCPU.
    Vcpu,
    /// Console input or output.
    Console,
    /// The control socket.
    Api,
}

impl ThreadRole {
    const fn allowed_calls(self) -> &'static [&'static [AllowedCall]] {
        match self {
            Self::Main => &[ALL_THREAD_CALLS, VCPU_CALLS, API_CALLS, MAIN_CALLS],
            Self::Vcpu => &[ALL_THREAD_CALLS, VCPU_CALLS],
            Self::Console => &[ALL_THREAD_CALLS],
            Self::Api => &[ALL_THREAD_CALLS, API_CALLS],
        }
    }

    const fn actions(self) -> Actions {
        let mut actions = Actions::NONE;
        let lists = self.allowed_calls();
        let (mut list, mut call) = (0, 0);
        while list < lists.len() {
            while call < lists[list].len() {
                actions.allow(lists[list][call].0);
                call += 1;
            }
            (list, call) = (list + 1, 0);
        }
        if matches!(self, Self::Main) {
            while call < host::LEGACY_SYSCALLS.len() {
                actions.allow(host::LEGACY_SYSCALLS[call]);
                call += 1;
            }
            call = 0;
        }
        while call < ARGUMENT_RESTRICTED_CALLS.len() {
            actions.allow_values(ARGUMENT_RESTRICTED_CALLS[call]);
            call += 1;
        }
        call = 0;
        while call < FORBIDDEN_ARGUMENTS.len() {
            actions.forbid_values(FORBIDDEN_ARGUMENTS[call]);
            call += 1;
        }
        actions
    }

    fn filter(self) -> &'static Program {
        static FILTERS: [Program; 4] = [
            Program::compile(&ThreadRole::Main.actions()),
            Program::compile(&ThreadRole::Vcpu.actions()),
            Program::compile(&ThreadRole::Console.actions()),
            Program::compile(&ThreadRole::Api.actions()),
        ];
        &FILTERS[self as usize]
    }

    /// Limits the calling thread, and threads that it starts, to the system calls of this role.
    pub fn confine(self) -> Result<(), VmError> {
        if !has_seccomp() {
            return Ok(());
        }
        register_signal_handler(libc::SIGSYS, report_forbidden_call)
            .map_err(failed("the handler of SIGSYS cannot be installed"))?;
        #[cfg(test)]
        if let Some(filter) = tests::filter_without_removed_call(self) {
            return apply_filter(filter.as_slice()).map_err(failed("a filter of a test"));
        }
        apply_filter(self.filter().as_slice())
            .map_err(failed("a seccomp filter cannot be installed; --sandbox off runs without it"))
    }
}

/// Confines the calling thread, if `confine` is set.
pub fn confine_optionally(confine: bool, role: ThreadRole) -> io::Result<()> {
    match confine {
        true => role.confine().map_err(io::Error::other),
        false => Ok(()),
    }
}

/// Runs a function in a thread of its own, confined if `confine` is set. Threads that the function starts
/// inherit the filter.
///
/// # Errors
/// The thread cannot be started or confined, or panics, or the function fails.
pub fn run_in_thread<T: Send>(
    confine: bool,
    role: ThreadRole,
    run: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    let run = || {
        confine_optionally(confine, role)?;
        run()
    };
    let panicked = |_| Err(io::Error::other("the thread panicked"));
    thread::scope(|scope| {
        let thread = thread::Builder::new().spawn_scoped(scope, run)?;
        thread.join().unwrap_or_else(panicked)
    })
}

/// Returns whether the kernel has seccomp filters.
fn has_seccomp() -> bool {
    static HAS_SECCOMP: OnceLock<bool> = OnceLock::new();
    *HAS_SECCOMP.get_or_init(|| {
        let has = Path::new("/proc/sys/kernel/seccomp/actions_avail").exists();
        if !has {
            log::warn!("this host's kernel has no seccomp: the VM runs without filters");
        }
        has
    })
}

/// Handles SIGSYS: writes the number of the forbidden call and ends the process.
extern "C" fn report_forbidden_call(
    _: libc::c_int,
    info: *mut libc::siginfo_t,
    _: *mut libc::c_void,
) {
    /// Offset of `si_syscall` in `struct siginfo`: after three numbers and the call's address.
    const SYSCALL_OFFSET: usize = 24;
    let field = info.cast::<u8>().wrapping_add(SYSCALL_OFFSET).cast::<i32>();
    // SAFETY: the kernel passes a siginfo of 128 bytes, aligned to 8.
    let call = unsafe { field.read() };
    let mut line = *b"granule: system call      is not allowed (seccomp): report this as a bug\n";
    let mut rest = call.unsigned_abs();
    for digit in line[21..25].iter_mut().rev() {
        *digit = b'0' + u8::try_from(rest % 10).unwrap_or(0);
        rest /= 10;
    }
    end_process(&line)
}
