// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The stage-2 table engine: its operations, and the protocol by which each changes entries.
//!
//! A [`Stage2`] belongs into a read-write lock. A method with `&mut self` walks *exclusively*: it
//! is the only walker and changes entries by plain stores. A method with `&self` walks *shared*:
//! any number of walkers change entries by compare-and-swap from the value that they have read, and
//! a table is freed only after an epoch in which no walker can still be below it
//! ([`Operations::defer`](crate::Operations::defer)). Both are the same code, with the kind of walk
//! as a type parameter (`walk`).
//!
//! A change of a valid entry other than its permissions needs break-before-make (Arm ARM D8.16.1):
//!
//! 1. clean and invalidate the memory that the guest is about to reach (`cmo`),
//! 2. break: store an invalid entry (`bbm::break_entry`, the only place that does),
//! 3. DSB, TLBI, DSB (`tlbi`),
//! 4. make: store the new entry with release ordering,
//! 5. free the tables that the old entry led to.
//!
//! [`Policy`](crate::Policy) moves steps 1 and 5 to where particular kernels have them, and decides
//! whether FEAT_BBM replaces steps 2 to 4 where only the size of a mapping changes.
//!
//! A contiguous run is represented by all of its entries, so only an exclusive walk changes one
//! (`contiguous`).

mod bbm;
mod cmo;
mod contiguous;
mod free;
mod leaf;
mod lookup;
mod map;
mod mapper;
mod protect;
mod split_collapse;
mod table;
mod tlbi;
mod unmap;
mod walk;

pub use lookup::{Access, Fault, FaultStatus, Translation, Walker};
pub use map::MapRequest;
pub use mapper::Mapper;
pub use table::{Features, MapError, Stage2};
pub use walk::{ExclusiveWalk, SharedWalk};
