// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kicks, which force a vCPU out of the guest from another thread.
//!
//! A kick sets `immediate_exit` in the vCPU's `kvm_run`, so that no later `KVM_RUN` enters the
//! guest, and then sends a signal to the vCPU's thread, so that a running `KVM_RUN` returns. In
//! both cases `KVM_RUN` returns `EINTR`. This order loses no kick: if the signal arrives before
//! `KVM_RUN`, the flag is already set. The signal handler is empty. After
//! [`KickTarget::clear_kicks`] the vCPU can enter the guest again.
//!
//! A kick accesses the vCPU's `kvm_run` and its thread. Dropping [`KickTarget`] clears both
//! references under a lock, so a later kick has no effect.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
};

use kvm_ioctls::VcpuFd;
use parking_lot::Mutex;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

/// The bound vCPU and its thread.
#[derive(Debug)]
struct BoundVcpu {
    immediate_exit: *mut u8,
    thread_id: libc::pid_t,
}

// SAFETY: the pointer refers to a mapping that every thread may access; it is used for atomic
// stores only, under the lock that protects it.
unsafe impl Send for BoundVcpu {}

impl BoundVcpu {
    fn set_immediate_exit(&self, value: u8) {
        // SAFETY: the value is bound and its lock is held, so `kvm_run` is mapped; only this module
        // accesses this byte, by atomic stores.
        unsafe { AtomicU8::from_ptr(self.immediate_exit) }.store(value, Ordering::SeqCst);
    }
}

#[derive(Debug, Default)]
struct KickState {
    is_kicked: AtomicBool,
    vcpu: Mutex<Option<BoundVcpu>>,
}

/// The receiving end of kicks. Drop it before its vCPU; later kicks have no effect.
#[derive(Debug, Default)]
pub struct KickTarget {
    state: Arc<KickState>,
}

/// The sending end of kicks.
#[derive(Debug)]
pub struct Kicker {
    state: Arc<KickState>,
}

impl KickTarget {
    /// Binds kicks to `vcpu` and to the calling thread, which must run this vCPU.
    pub fn bind(&self, vcpu: &mut VcpuFd) -> io::Result<Kicker> {
        register_signal_handler(SIGRTMIN(), ignore_signal)?;
        let immediate_exit = &raw mut vcpu.get_kvm_run().immediate_exit;
        // SAFETY: gettid takes no argument and cannot fail.
        let thread_id = unsafe { libc::gettid() };
        *self.state.vcpu.lock() = Some(BoundVcpu { immediate_exit, thread_id });
        Ok(Kicker { state: Arc::clone(&self.state) })
    }

    /// Returns whether the vCPU was kicked since the last [`Self::clear_kicks`].
    pub fn is_kicked(&self) -> bool {
        self.state.is_kicked.load(Ordering::Acquire)
    }

    /// Makes the next `KVM_RUN` return without entering the guest, as a kick does.
    pub fn set_immediate_exit(&self) {
        if let Some(vcpu) = self.state.vcpu.lock().as_ref() {
            vcpu.set_immediate_exit(1);
        }
    }

    /// Clears earlier kicks, so that the vCPU can enter the guest again.
    ///
    /// This may also clear a kick that arrives during the call. The kicking thread must therefore
    /// publish its request before the kick, and the vCPU's thread must read it after this call and
    /// before it enters the guest.
    pub fn clear_kicks(&self) {
        let target = self.state.vcpu.lock();
        self.state.is_kicked.store(false, Ordering::Release);
        if let Some(vcpu) = target.as_ref() {
            vcpu.set_immediate_exit(0);
        }
    }
}

impl Drop for KickTarget {
    fn drop(&mut self) {
        *self.state.vcpu.lock() = None;
    }
}

impl Kicker {
    /// Forces the vCPU out of the guest until [`KickTarget::clear_kicks`].
    pub fn kick(&self) {
        self.state.is_kicked.store(true, Ordering::Release);
        if let Some(vcpu) = self.state.vcpu.lock().as_ref() {
            vcpu.set_immediate_exit(1);
            let process = std::process::id();
            // SAFETY: the signal has an empty handler; if the thread has ended, the call returns
            // ESRCH.
            unsafe { libc::syscall(libc::SYS_tgkill, process, vcpu.thread_id, SIGRTMIN()) };
        }
    }
}

extern "C" fn ignore_signal(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
