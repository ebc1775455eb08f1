// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! seccomp filters: each kind of thread is limited to the system calls that it uses.
//!
//! The filter of the main thread is inherited by all threads that it starts and holds for the whole
//! process; vCPU, console and control socket threads add a narrower one. A call that is not allowed
//! ends the process with a message that names the call.

mod allowed;
#[cfg(test)]
mod exercises;
#[cfg(test)]
mod recorder;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, btree_map::Entry},
    io,
    path::Path,
    sync::OnceLock,
};

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter,
};
use vmm_sys_util::signal::register_signal_handler;

use super::{
    outcome::{VmError, failed},
    terminal,
};
use crate::arch::host;
use allowed::AllowedCall;

/// Calls that every thread may use with certain values of the second argument: `TCSETS` and `TCSETS2`
/// restore the terminal's settings; debug builds of the standard library check a file descriptor with
/// `F_GETFD` before they close it.
const RESTRICTED: &[(i64, &[u64])] =
    &[(libc::SYS_ioctl, &[0x5402, 0x402c_542b]), (libc::SYS_fcntl, &[libc::F_GETFD as u64])];

/// A kind of thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadRole {
    /// The main thread; its filter holds for all threads.
    Main,
    /// A vCPU.
    Vcpu,
    /// Console input or output.
    Console,
    /// The control socket.
    Api,
}

impl ThreadRole {
    fn allowed(self) -> impl Iterator<Item = &'static AllowedCall> {
        let lists: &[&[AllowedCall]] = match self {
            Self::Main => &[allowed::ALL_THREADS, allowed::VCPU, allowed::API, allowed::MAIN],
            Self::Vcpu => &[allowed::ALL_THREADS, allowed::VCPU],
            Self::Console => &[allowed::ALL_THREADS],
            Self::Api => &[allowed::ALL_THREADS, allowed::API],
        };
        lists.iter().copied().flatten()
    }

    /// Returns the numbers of the allowed calls.
    fn numbers(self) -> Vec<i64> {
        let legacy: &[i64] = match self {
            Self::Main => host::LEGACY_SYSCALLS,
            _ => &[],
        };
        let numbers = self.allowed().map(|call| call.number);
        numbers.chain(legacy.iter().copied()).collect()
    }

    fn filter(self) -> Result<BpfProgram, seccompiler::BackendError> {
        let rules = self.numbers().into_iter().map(|call| (call, Vec::new()));
        let mut rules: BTreeMap<_, _> = rules.collect();
        for (call, values) in RESTRICTED {
            if let Entry::Vacant(entry) = rules.entry(*call) {
                let rules = values.iter().map(|value| {
                    let (length, is) = (SeccompCmpArgLen::Dword, SeccompCmpOp::Eq);
                    SeccompRule::new(vec![SeccompCondition::new(1, length, is, *value)?])
                });
                entry.insert(rules.collect::<Result<_, _>>()?);
            }
        }
        let filter = SeccompFilter::new(
            rules,
            SeccompAction::Trap,
            SeccompAction::Allow,
            std::env::consts::ARCH.try_into()?,
        )?;
        filter.try_into()
    }

    /// Limits the calling thread, and threads that it starts, to the system calls of this role.
    ///
    /// # Errors
    /// The kernel has seccomp and refuses the filter.
    pub fn confine(self) -> Result<(), VmError> {
        if !has_seccomp() {
            return Ok(());
        }
        install_handler()?;
        let filter = self.filter().map_err(failed("a seccomp filter cannot be compiled"))?;
        apply_filter(&filter)
            .map_err(failed("a seccomp filter cannot be installed; --sandbox off runs without it"))
    }
}

/// Confines the calling thread, if `confine` is set.
///
/// # Errors
/// [`VmError`].
pub fn confine_if(confine: bool, role: ThreadRole) -> io::Result<()> {
    match confine {
        true => role.confine().map_err(io::Error::other),
        false => Ok(()),
    }
}

/// Returns whether the kernel has seccomp filters.
fn has_seccomp() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        let has = Path::new("/proc/sys/kernel/seccomp/actions_avail").exists();
        if !has {
            log::warn!("this host's kernel has no seccomp: the VM runs without filters");
        }
        has
    })
}

/// Installs the handler of SIGSYS once in the process.
fn install_handler() -> Result<(), VmError> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    INSTALLED
        .get_or_init(|| {
            register_signal_handler(libc::SIGSYS, report_forbidden_call)
                .map_err(|error| error.errno())
        })
        .map_err(io::Error::from_raw_os_error)
        .map_err(failed("the handler of SIGSYS cannot be installed"))
}

/// The handler of SIGSYS: writes the number of the call and ends the process.
extern "C" fn report_forbidden_call(
    _: libc::c_int,
    info: *mut libc::siginfo_t,
    _: *mut libc::c_void,
) {
    /// Offset of `si_syscall` in `struct siginfo`: after three numbers and the call's address.
    const SYSCALL_OFFSET: usize = 24;
    terminal::restore();
    let field = info.cast::<u8>().wrapping_add(SYSCALL_OFFSET).cast::<i32>();
    // SAFETY: the kernel passes a siginfo of 128 bytes, aligned to 8.
    let call = unsafe { field.read() };
    let mut line = *b"granule: system call      is not allowed (seccomp): report this as a bug\n";
    let mut rest = call.unsigned_abs();
    for digit in line[21..25].iter_mut().rev() {
        *digit = b'0' + u8::try_from(rest % 10).unwrap_or(0);
        rest /= 10;
    }
    // SAFETY: the line is valid for its length; write is async-signal-safe.
    unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
    // SAFETY: the call ends the process without running destructors.
    unsafe { libc::_exit(1) };
}
