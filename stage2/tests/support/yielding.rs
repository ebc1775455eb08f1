// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A hook and a lock for threads that shuttle schedules: another thread may run before each
//! operation and while a lock is waited for.

use std::sync::atomic::{AtomicUsize, Ordering};

use granule_stage2::{
    Operations,
    check::{Call, Hook, Reply},
};
use shuttle::thread::yield_now;

/// Yields before each operation that another CPU can observe.
#[derive(Debug)]
pub struct Yielding;

impl<O: Operations> Hook<O> for Yielding {
    fn call(&self, inner: &O, call: Call) -> Reply {
        let is_private = matches!(
            call,
            Call::Allocate | Call::EndWalk | Call::References(_) | Call::Isb | Call::SwitchVmid(_)
        );
        if !is_private {
            yield_now();
        }
        match call {
            Call::Pause => Reply::Done,
            _ => call.run(inner),
        }
    }
}

/// A read-write lock that yields while it waits.
#[derive(Debug)]
pub struct YieldingLock(AtomicUsize);

const WRITER: usize = usize::MAX;

// SAFETY: a writer enters only at 0, and no other thread enters while the value is WRITER.
unsafe impl lock_api::RawRwLock for YieldingLock {
    const INIT: Self = Self(AtomicUsize::new(0));
    type GuardMarker = lock_api::GuardSend;

    fn lock_shared(&self) {
        while !self.try_lock_shared() {
            yield_now();
        }
    }

    fn try_lock_shared(&self) -> bool {
        let more = |readers: usize| (readers != WRITER).then(|| readers + 1);
        let done = self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, more);
        done.is_ok()
    }

    unsafe fn unlock_shared(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    fn lock_exclusive(&self) {
        while !self.try_lock_exclusive() {
            yield_now();
        }
    }

    fn try_lock_exclusive(&self) -> bool {
        let done = self.0.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed);
        done.is_ok()
    }

    unsafe fn unlock_exclusive(&self) {
        self.0.store(0, Ordering::Release);
    }
}
