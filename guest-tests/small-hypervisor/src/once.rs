// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A static value that is created at run time.

use core::{
    cell::UnsafeCell,
    mem::MaybeUninit,
    sync::atomic::{AtomicBool, Ordering},
};

/// Memory of a value that is created once.
#[derive(Debug)]
pub struct Once<T> {
    is_created: AtomicBool,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: `create` returns the only reference to the value.
unsafe impl<T: Send> Sync for Once<T> {}

impl<T> Once<T> {
    /// Returns memory without a value.
    pub const fn empty() -> Self {
        Self { is_created: AtomicBool::new(false), value: UnsafeCell::new(MaybeUninit::uninit()) }
    }

    /// Creates the value.
    ///
    /// # Panics
    /// The value exists.
    #[expect(clippy::mut_from_ref, reason = "only the first call returns")]
    pub fn create(&'static self, value: T) -> &'static mut T {
        assert!(!self.is_created.swap(true, Ordering::Relaxed), "the value exists");
        // SAFETY: the flag admits one call, so there is no other reference.
        unsafe { (*self.value.get()).write(value) }
    }
}
