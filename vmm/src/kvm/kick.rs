// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Getting a vCPU out of the guest from another thread, for good or until it is
//! [settled](KickTarget::clear_kicks).
//!
//! A kick sets `immediate_exit` in the vCPU's `kvm_run`, so that no later `KVM_RUN` enters the
//! guest, and then signals the vCPU's thread, so that a `KVM_RUN` under way comes back; in either
//! case it returns `EINTR`. In this order no kick is lost: a signal that arrives before `KVM_RUN`
//! finds the flag set. The signal's handler does nothing.
//!
//! What a kick uses belongs to the vCPU and its thread. Both are held in an [`KickTarget`] that is
//! emptied, under a lock, before the vCPU goes, so a late kick finds nothing and does nothing.

use std::{
    io,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
};

use kvm_ioctls::VcpuFd;
use vmm_sys_util::{
    errno,
    signal::{SIGRTMIN, register_signal_handler},
};

/// What a kick acts on.
#[derive(Debug)]
struct Target {
    immediate_exit: *mut u8,
    thread: libc::pid_t,
}

// SAFETY: the pointer is into a shared mapping of the kernel's that every thread may access; it is
// used for atomic stores only, while the lock around it is held.
unsafe impl Send for Target {}

#[derive(Debug, Default)]
struct Shared {
    kicked: AtomicBool,
    target: Mutex<Option<Target>>,
}

/// The vCPU's end. Dropping it makes kicks harmless; it must go before its vCPU.
#[derive(Debug, Default)]
pub struct KickTarget {
    shared: Arc<Shared>,
}

/// The kicking end.
#[derive(Debug)]
pub struct Kicker {
    shared: Arc<Shared>,
}

impl KickTarget {
    /// Ties kicks to `vcpu` and the calling thread, which is to run it.
    ///
    /// # Errors
    /// The signal handler cannot be installed.
    pub fn bind(&self, vcpu: &mut VcpuFd) -> io::Result<Kicker> {
        install_handler()?;
        let immediate_exit = &raw mut vcpu.get_kvm_run().immediate_exit;
        // SAFETY: gettid takes nothing and cannot fail.
        let thread = unsafe { libc::gettid() };
        *self.target() = Some(Target {
            immediate_exit,
            thread,
        });
        Ok(Kicker {
            shared: Arc::clone(&self.shared),
        })
    }

    /// Whether the vCPU was kicked.
    pub fn kicked(&self) -> bool {
        self.shared.kicked.load(Ordering::Acquire)
    }

    /// Forgets kicks so far, so that the vCPU can enter the guest again.
    ///
    /// A kick that comes in meanwhile may be forgotten too: whoever kicks must first say elsewhere
    /// what it wants, and the vCPU's thread look there between this call and entering the guest.
    pub fn clear_kicks(&self) {
        let target = self.target();
        self.shared.kicked.store(false, Ordering::Release);
        if let Some(target) = target.as_ref() {
            // SAFETY: as in [`Kicker::kick`], whose lock is held here too.
            let immediate_exit = unsafe { AtomicU8::from_ptr(target.immediate_exit) };
            immediate_exit.store(0, Ordering::SeqCst);
        }
    }

    fn target(&self) -> std::sync::MutexGuard<'_, Option<Target>> {
        self.shared
            .target
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for KickTarget {
    fn drop(&mut self) {
        *self.target() = None;
    }
}

impl Kicker {
    /// Gets the vCPU out of the guest; it does not enter again until the kick is settled.
    pub fn kick(&self) {
        self.shared.kicked.store(true, Ordering::Release);
        let guard = self
            .shared
            .target
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let Some(target) = guard.as_ref() else {
            return;
        };
        // SAFETY: while the lock is held and the target is there, its vCPU and the mapping of its
        // `kvm_run` live; this byte is only ever stored to, here and by nobody else.
        let immediate_exit = unsafe { AtomicU8::from_ptr(target.immediate_exit) };
        immediate_exit.store(1, Ordering::SeqCst);
        let process = std::process::id();
        // SAFETY: a signal with a handler that does nothing, to a thread of this process or, if
        // it is gone, to none (ESRCH).
        unsafe { libc::syscall(libc::SYS_tgkill, process, target.thread, SIGRTMIN()) };
    }
}

extern "C" fn do_nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Installs the handler once for the process.
fn install_handler() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), errno::Error>> = OnceLock::new();
    INSTALLED
        .get_or_init(|| register_signal_handler(SIGRTMIN(), do_nothing))
        .map_err(io::Error::from)
}
