// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! arm64 stage-2 page tables: an engine that hypervisors can use, and a checker that knows the
//! architecture's rules. The companion Linux series lives beside this crate, in `linux/`.
//!
//! - [`Stage2`] is the table: map, unmap, relax, write-protect, age, split, recover blocks, walk.
//!   Its [`Policy`] switches what distinguishes one kernel from another.
//! - [`Operations`] is all that it asks of its surroundings: memory, barriers, TLBs, caches.
//! - [`fault::Mmu`] is the fault path around it, with the lock.
//! - [`check`] (feature `check`) records every event and holds it against the rules.
//!
//! The crate is `no_std`; with a [`pool::TablePool`] over static memory it allocates nothing.
#![no_std]

extern crate alloc;
#[cfg(any(test, feature = "check"))]
extern crate std;

#[cfg(feature = "check")]
pub mod check;
pub mod descriptor;
mod engine;
pub mod fault;
pub mod geometry;
#[cfg(feature = "check")]
pub mod grace;
mod memcache;
pub mod operations;
mod policy;
pub mod pool;
pub mod range;

pub use engine::{
    Access, Fault, FaultStatus, Features, MapError, MapRequest, Stage2, Translation, Walker,
};
pub use memcache::Memcache;
pub use operations::Operations;
pub use policy::{Coalesce, Locking, Maintenance, Policy, SameLeaf, TopUp, UnknownPolicy, Unmap};
