// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The system calls that each kind of thread may use, with the user of each.
//!
//! `io_uring` calls are not allowed: an io_uring can create sockets and open files past the filter.

/// An allowed system call.
#[derive(Debug, Clone, Copy)]
pub(super) struct AllowedCall {
    /// Number of the call.
    pub(super) number: i64,
    /// Name of the number in `libc`.
    #[cfg_attr(not(test), expect(dead_code, reason = "for tests and readers"))]
    pub(super) name: &'static str,
    /// Code that uses the call.
    #[cfg_attr(not(test), expect(dead_code, reason = "for tests and readers"))]
    pub(super) user: &'static str,
}

macro_rules! allow {
    ($($call:ident: $user:literal,)*) => {
        &[$(AllowedCall {
            number: libc::$call,
            name: stringify!($call),
            user: $user,
        }),*]
    };
}

/// Calls of all threads.
pub(super) const ALL_THREADS: &[AllowedCall] = allow! {
    SYS_brk: "allocator",
    SYS_clock_gettime: "Instant::now, where the vDSO has no usable clock",
    SYS_clock_nanosleep: "thread::sleep",
    SYS_close: "drop of file descriptors",
    SYS_exit: "end of a thread",
    SYS_exit_group: "end of the process",
    SYS_futex: "locks, condition variables, channels",
    SYS_getpid: "kick::Kicker, raise",
    SYS_getrandom: "seeds of hash maps, virtio entropy device",
    SYS_gettid: "kick::KickTarget, thread start of the C library",
    SYS_madvise: "allocator, balloon, memory zones",
    SYS_mmap: "allocator, thread stacks, memory zones, kvm_run",
    SYS_mprotect: "guard pages of thread stacks, memory zones",
    SYS_mremap: "allocator",
    SYS_munmap: "allocator, thread stacks, memory zones",
    SYS_nanosleep: "thread::sleep of C libraries without clock_nanosleep",
    SYS_ppoll: "waiting for events",
    SYS_read: "eventfds, files, pipes",
    SYS_readv: "buffered reads of the C library",
    SYS_restart_syscall: "sleeps that a stop of the process interrupts",
    SYS_rt_sigaction: "kick::KickTarget, handler of SIGSYS",
    SYS_rt_sigprocmask: "thread start of the C library, Signals::release",
    SYS_rt_sigreturn: "return from signal handlers",
    SYS_sched_getaffinity: "available_parallelism, for prefaulting",
    SYS_sched_yield: "locks that spin",
    SYS_sigaltstack: "thread start of the standard library",
    SYS_tgkill: "kick::Kicker, raise",
    SYS_tkill: "raise of the C library",
    SYS_write: "eventfds, console output, log",
    SYS_writev: "log",
};

/// Additional calls of vCPU threads: `KVM_RUN`, and devices that are served in the vCPU's thread.
pub(super) const VCPU: &[AllowedCall] = allow! {
    SYS_clone: "start of device threads, by C libraries without clone3",
    SYS_clone3: "start of device threads",
    SYS_epoll_ctl: "events of the vsock device",
    SYS_eventfd2: "events of device threads",
    SYS_fallocate: "discard and write-zeroes of disks, balloon on a memfd",
    SYS_fcntl: "duplicates of file descriptors",
    SYS_fdatasync: "flush of disks",
    SYS_ioctl: "KVM_RUN, vhost, tap offloads, block device discards",
    SYS_lseek: "size of disks",
    SYS_prctl: "names of device threads, seccomp",
    SYS_pread64: "pagemap, statistics of KVM",
    SYS_preadv: "disk reads",
    SYS_pwrite64: "write-zeroes of disks without fallocate",
    SYS_pwritev: "disk writes",
    SYS_rseq: "thread start of the C library",
    SYS_set_robust_list: "thread start of the C library",
};

/// Additional calls of the control socket's thread.
pub(super) const API: &[AllowedCall] = allow! {
    SYS_accept4: "accepting clients",
    SYS_recvfrom: "reading requests",
    SYS_sendto: "writing responses",
    SYS_setsockopt: "timeouts of clients",
};

/// Additional calls of the main thread, and therefore of the process: building and ending VMs,
/// statistics.
pub(super) const MAIN: &[AllowedCall] = allow! {
    SYS_epoll_create1: "events of the vsock device",
    SYS_fstat: "metadata of files, by C libraries without statx",
    SYS_ftruncate: "memfd, statistics file",
    SYS_getdents64: "hugetlb pools in /sys/kernel/mm",
    SYS_mbind: "memory zones on a NUMA node",
    SYS_memfd_create: "shared memory zones",
    SYS_newfstatat: "metadata of paths",
    SYS_openat: "/proc and /sys files",
    SYS_perf_event_open: "event counters after a reboot",
    SYS_pipe2: "input of the virtio console",
    SYS_readlinkat: "backtrace of a panic",
    SYS_seccomp: "narrower filters of other threads",
    SYS_signalfd4: "termination signals",
    SYS_statx: "metadata of paths",
    SYS_unlinkat: "removal of the control socket",
};
