// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#![doc = include_str!("../README.md")]
//!
//! # Handle a fault
//!
//! [`fault::Mmu`] handles a stage-2 abort. The host implements [`fault::HostMemory`] to look up
//! pages.
//!
//! ```
//! use granule_stage2::{fault::*, geometry::*, operations::Vmid, pool::*, *};
//!
//! /// Host memory in 2M pages.
//! struct Memory;
//!
//! impl HostMemory for Memory {
//!     fn look_up_page(&self, ipa: Ipa, _: Access) -> Option<HostPage> {
//!         let ipa = ipa.align_down(2 << 20);
//!         let phys = PhysAddr((4 << 30) + ipa.0);
//!         Some(HostPage { ipa, phys, size: 2 << 20, is_writable: true })
//!     }
//!     fn is_logging(&self, _: Ipa) -> bool { false }
//!     fn invalidation_sequence(&self) -> u64 { 0 }
//!     fn mark_dirty(&self, _: Ipa, _: u64) {}
//! }
//!
//! let geometry = Geometry::new(Granule::K4, 40)?;
//! let (entries, metadata) = (zeroed_words(64 * 512), zeroed_words(2 * 64));
//! let pool = TablePool::new(PhysAddr(0x8000_0000), &geometry, entries, metadata)?;
//! let (ops, mut memcache) = (NoMaintenance(&pool), Memcache::new());
//! let table = Stage2::new(geometry, Features::default(), Policy::GRANULE, Vmid(1), pool.root())?;
//! let mmu: Mmu<parking_lot::RawRwLock> = Mmu::new(table);
//!
//! let fault = mmu.walker().translate(&ops, Ipa(0x5000), Access::Write).unwrap_err();
//! assert_eq!(fault.status, FaultStatus::Translation);
//! assert_eq!(mmu.fault(&ops, &Memory, &mut memcache, fault)?, Resolution::Resolved);
//! assert!(mmu.walker().translate(&ops, Ipa(0x5000), Access::Write).is_ok());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![no_std]

#[cfg(any(test, feature = "alloc"))]
extern crate alloc;
#[cfg(any(test, feature = "std"))]
extern crate std;

mod address;
#[cfg(feature = "check")]
pub mod check;
pub mod descriptor;
mod engine;
#[cfg(feature = "std")]
pub mod epoch;
pub mod fault;
pub mod geometry;
mod memcache;
pub mod operations;
mod policy;
pub mod pool;

/// Atomics of `core`, or of loom with the feature `loom`.
mod sync {
    #[cfg(not(feature = "loom"))]
    pub(crate) use core::sync::atomic::{AtomicU64, Ordering, fence};
    #[cfg(all(feature = "std", not(feature = "loom")))]
    pub(crate) use {core::sync::atomic::AtomicUsize, std::sync::Mutex};

    #[cfg(feature = "loom")]
    pub(crate) use loom::sync::{
        Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering, fence},
    };
}

#[cfg(feature = "check")]
pub use address::VirtAddr;
pub use address::{EntryAddress, Ipa, PhysAddr, TableAddress};
pub use engine::{
    Access, BbmLevel, ExclusiveWalk, Fault, FaultStatus, Features, MapError, MapRequest, Mapper,
    SharedWalk, Stage2, Translation, Walker,
};
pub use memcache::Memcache;
pub use operations::Operations;
pub use policy::{
    CmoPlacement, CoalesceOrder, ExistingLeaf, Locking, Policy, TopUpCondition, UnknownPolicy,
    UnmapBatching,
};
pub use pool::NoMaintenance;
