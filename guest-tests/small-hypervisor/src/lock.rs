// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A spinlock. Its word is 0 while it is free, so a checker sees its holders by the stores to the word,
//! whose address is the argument of [`small_hypervisor_lock`].

use core::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU32, Ordering},
};

/// A value under a spinlock.
#[derive(Debug)]
pub struct SpinLock<T> {
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the lock admits one CPU at a time to the value.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> SpinLock<T> {
    /// Returns a free lock.
    pub const fn new(value: T) -> Self {
        Self { word: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    /// Calls a function with the value under the lock.
    pub fn with<R>(&self, use_value: impl FnOnce(&mut T) -> R) -> R {
        small_hypervisor_lock(&self.word);
        // SAFETY: this CPU holds the lock until the store below.
        let result = use_value(unsafe { &mut *self.value.get() });
        self.word.store(0, Ordering::Release);
        result
    }
}

/// Acquires the lock with this word.
// SAFETY: no other function has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn small_hypervisor_lock(word: &AtomicU32) {
    while word.compare_exchange_weak(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
        core::hint::spin_loop();
    }
}
