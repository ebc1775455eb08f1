// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Atomics of the processor, or of loom's model with the feature `loom`.

#[cfg(not(feature = "loom"))]
mod real {
    #[cfg(feature = "std")]
    pub(crate) use core::sync::atomic::AtomicUsize;
    pub(crate) use core::sync::atomic::{AtomicU64, Ordering, fence};
    #[cfg(feature = "std")]
    pub(crate) use std::sync::Mutex;
}

#[cfg(feature = "loom")]
mod real {
    pub(crate) use loom::sync::{
        Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering, fence},
    };
}

pub(crate) use real::*;
