// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! arm64 stage-2 page tables: an engine for hypervisors, and a checker of the architecture's rules.
//!
//! - [`Stage2`] is the table: map, unmap, relax, write-protect, age, split, recover blocks, walk.
//!   Its [`Policy`] switches what distinguishes one kernel from another.
//! - [`Operations`] is the engine's interface to its surroundings: memory, barriers, TLBs, caches.
//! - [`fault::Mmu`] is the fault path around the table, with the lock.
//! - `check` (feature `check`) records every event and checks it against the rules.
//!
//! The crate is `no_std`. With a [`pool::TablePool`] over static memory it needs no allocator either
//! (`examples/bare_metal.rs`). Features: `alloc` (default) for [`pool::words`], `std` for `epoch`,
//! `check` for the checker.
//!
//! # Map a guest
//!
//! ```
//! use granule_stage2::{descriptor::Attributes, geometry::*, operations::Vmid, pool::*, *};
//!
//! // 40 bits of guest addresses; 16 tables of 512 entries, the first two of them the root.
//! let geometry = Geometry::new(Granule::K4, 40)?;
//! let pool = TablePool::new(PhysAddr(0x8000_0000), &geometry, words(16 * 512), words(2 * 16)).unwrap();
//! // No CPU walks the table, so there is nothing to invalidate.
//! let ops = NoMaintenance(&pool);
//! let mut memcache = Memcache::new();
//! let mut guest = Stage2::new(geometry, Features::default(), Policy::GRANULE, Vmid(1), pool.root());
//!
//! memcache.top_up(&ops, guest.memcache_min(), 8);
//! let memory = MapRequest::new(Ipa(0x4000_0000), PhysAddr(0x1_0000_0000), 4 << 20, Attributes::READ_WRITE);
//! guest.map(&ops, &mut memcache, &memory)?;
//!
//! let seen = guest.translate(&ops, Ipa(0x4020_0123), Access::Write).unwrap();
//! assert_eq!(seen.phys, PhysAddr(0x1_0020_0123));
//! assert_eq!(seen.level, Level::new(2).unwrap(), "a block of 2M");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Take a fault
//!
//! The host looks the page up; [`fault::Mmu`] does the rest, under its lock.
//!
//! ```
//! use granule_stage2::{fault::*, geometry::*, operations::Vmid, pool::*, *};
//!
//! /// A host with memory in pieces of 2M.
//! struct Memory;
//!
//! impl Host for Memory {
//!     fn page(&self, ipa: Ipa, _: Access) -> Option<Page> {
//!         let ipa = ipa.align_down(2 << 20);
//!         Some(Page { ipa, phys: PhysAddr(0x1_0000_0000 + ipa.0), size: 2 << 20, writable: true })
//!     }
//!     fn logging(&self, _: Ipa) -> bool { false }
//!     fn sequence(&self) -> u64 { 0 }
//!     fn mark_dirty(&self, _: Ipa, _: u64) {}
//! }
//!
//! let geometry = Geometry::new(Granule::K4, 40)?;
//! let pool = TablePool::new(PhysAddr(0x8000_0000), &geometry, words(64 * 512), words(2 * 64)).unwrap();
//! let (ops, mut memcache) = (NoMaintenance(&pool), Memcache::new());
//! let table = Stage2::new(geometry, Features::default(), Policy::GRANULE, Vmid(1), pool.root());
//! let mmu: Mmu<parking_lot::RawRwLock> = Mmu::new(table);
//!
//! let fault = mmu.walker().translate(&ops, Ipa(0x5000), Access::Write).unwrap_err();
//! assert_eq!(fault.status, FaultStatus::Translation);
//! assert_eq!(mmu.fault(&ops, &Memory, &mut memcache, fault)?, Resolution::Resolved);
//! assert!(mmu.walker().translate(&ops, Ipa(0x5000), Access::Write).is_ok());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Log dirty pages, and recover blocks
//!
//! ```
//! use granule_stage2::{descriptor::Attributes, geometry::*, operations::Vmid, pool::*, *};
//!
//! # let geometry = Geometry::new(Granule::K4, 40)?;
//! # let pool = TablePool::new(PhysAddr(0x8000_0000), &geometry, words(16 * 512), words(2 * 16)).unwrap();
//! # let (ops, mut memcache) = (NoMaintenance(&pool), Memcache::new());
//! # let mut guest = Stage2::new(geometry, Features::default(), Policy::GRANULE, Vmid(1), pool.root());
//! # memcache.top_up(&ops, 4, 8);
//! # let memory = MapRequest::new(Ipa(0x4000_0000), PhysAddr(0x1_0000_0000), 2 << 20, Attributes::READ_WRITE);
//! # guest.map(&ops, &mut memcache, &memory)?;
//! // Dirty logging starts: the first write to each page faults.
//! guest.write_protect(&ops, Ipa(0x4000_0000), 2 << 20)?;
//! let fault = guest.translate(&ops, Ipa(0x4000_5678), Access::Write).unwrap_err();
//! assert_eq!(fault.status, FaultStatus::Permission);
//!
//! // The first write splits the block: its page becomes writable, the others stay read-only.
//! let page = MapRequest::new(Ipa(0x4000_5000), PhysAddr(0x1_0000_5000), 4096, Attributes::READ_WRITE);
//! guest.map(&ops, &mut memcache, &page)?;
//! assert!(guest.translate(&ops, Ipa(0x4000_5678), Access::Write).is_ok());
//! assert!(guest.translate(&ops, Ipa(0x4000_6000), Access::Write).is_err());
//! assert_eq!(guest.look_up(&ops, Ipa(0x4000_6000)).1, Level::PAGE);
//!
//! // Dirty logging stops: one block again, with the permissions that all parts have.
//! guest.recover_blocks(&ops, Ipa(0x4000_0000), 2 << 20, 2 << 20)?;
//! let (block, level) = guest.look_up(&ops, Ipa(0x4000_5678));
//! assert_eq!(level, Level::new(2).unwrap());
//! assert!(!block.attributes().write);
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
mod no_maintenance;
pub mod operations;
mod policy;
pub mod pool;
pub mod range;
mod sync;

pub use address::{EntryAddress, Ipa, PhysAddr, TableAddress};
pub use engine::{
    Access, ExclusiveWalk, Fault, FaultStatus, Features, MapError, MapRequest, Mapper, SharedWalk,
    Stage2, Translation, Walker,
};
pub use memcache::Memcache;
pub use no_maintenance::NoMaintenance;
pub use operations::Operations;
pub use policy::{
    CmoPlacement, Coalesce, ExistingLeaf, Locking, Policy, Reserve, TopUp, UnknownPolicy, Unmap,
};

/// The example of the README, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
