// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The stage-2 table engine, and the protocol by which it changes entries.
//!
//! A [`Stage2`] is protected by a read-write lock. A method with `&mut self` performs an
//! *exclusive* walk: it is the only walker and changes entries by plain stores. A method with
//! `&self` performs a *shared* walk: any number of walkers change entries by compare-and-swap from
//! the value that they have read, and a table is freed only when no walker can still be below it
//! ([`Operations::defer_free`](crate::Operations::defer_free)). Both use the same code, with the
//! walk mode as a type parameter (`walk`).
//!
//! A valid entry changes by break-before-make, except in permissions (Arm ARM R_WHZWS):
//!
//! 1. clean and invalidate memory to the PoC before the guest can access it (`cmo`),
//! 2. break: store an invalid entry (only in `bbm::break_entry`),
//! 3. DSB, TLBI, DSB (`tlbi`),
//! 4. make: store the new entry with release ordering,
//! 5. free the tables below the old entry.
//!
//! [`Policy`] moves steps 1 and 5 as particular kernels do, and decides whether FEAT_BBM replaces
//! steps 2 to 4 when only the size of a mapping changes.
//!
//! A contiguous run consists of several entries, so only an exclusive walk changes a run (`bbm`).

mod bbm;
mod cmo;
mod features;
mod free;
mod leaf;
mod lookup;
mod map;
mod mapper;
mod protect;
mod split_collapse;
mod tlbi;
mod unmap;
mod unmap_batch;
mod walk;

use thiserror::Error;

use crate::{
    address::{Ipa, PhysAddr, TableAddress},
    geometry::{ADDRESS_BITS, Geometry, RootError},
    operations::Vmid,
    policy::{CmoPlacement, Policy},
};

pub use features::{BbmLevel, Features};
pub use lookup::{Access, Fault, FaultStatus, Translation, Walker};
pub use map::MapRequest;
pub use mapper::Mapper;
pub use walk::{ExclusiveWalk, SharedWalk};

/// Error returned when an operation changed nothing or only part of its range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "fields are first addresses and bytes of the range")]
pub enum MapError {
    /// Error returned when an address or the size is not a multiple of the page size.
    #[error("{ipa} to {phys}, {size:#x} bytes: not a multiple of the page size")]
    Unaligned { ipa: Ipa, phys: PhysAddr, size: u64 },
    /// Error returned when the guest range extends beyond the IPA space.
    #[error("guest range {ipa}, {size:#x} bytes: beyond the IPA space")]
    IpaOutOfRange { ipa: Ipa, size: u64 },
    /// Error returned when the host range extends beyond the output address size of descriptors.
    #[error("host range {phys}, {size:#x} bytes: beyond 48 address bits")]
    PhysOutOfRange { phys: PhysAddr, size: u64 },
    /// Error returned when a table is needed and the memcache is empty: top it up and retry.
    #[error("memcache empty: top it up and retry")]
    NoTable,
    /// Error returned when another CPU has changed the entry or is changing it: the guest retries.
    #[error("entry changed by another CPU: retry")]
    Again,
    /// Error returned for a leaf in a contiguous run, which only an exclusive walk changes: retry
    /// with `&mut self`.
    #[error("page in a contiguous run: retry with an exclusive walk")]
    Contiguous,
}

/// A stage-2 translation table.
#[derive(Debug)]
pub struct Stage2 {
    geometry: Geometry,
    features: Features,
    policy: Policy,
    vmid: Vmid,
    root: TableAddress,
    /// Indicates that map walkers perform no CMOs for any attributes.
    skips_all_cmos: bool,
}

impl Stage2 {
    /// Creates a stage-2 table with `root`: [`Geometry::root_tables`] contiguous zeroed tables at a
    /// multiple of [`Geometry::root_alignment`].
    ///
    /// # Errors
    /// [`RootError`] if VTTBR_EL2 cannot select the root.
    pub const fn new(
        geometry: Geometry,
        features: Features,
        policy: Policy,
        vmid: Vmid,
        root: TableAddress,
    ) -> Result<Self, RootError> {
        if let Err(error) = geometry.check_root(root) {
            return Err(error);
        }
        Ok(Self {
            geometry,
            features,
            policy,
            vmid,
            root,
            skips_all_cmos: (features.fwb && features.dic)
                || matches!(policy.cmo_placement, CmoPlacement::FaultPath),
        })
    }

    /// Returns the geometry of the IPA space.
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Returns the policy.
    pub const fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Returns the CPU features.
    pub const fn features(&self) -> &Features {
        &self.features
    }

    /// Returns the first table of the root.
    pub const fn root(&self) -> TableAddress {
        self.root
    }

    /// Returns whether ranges are invalidated by range TLBIs.
    #[inline]
    const fn uses_range_tlbi(&self) -> bool {
        self.features.tlb_range && self.policy.uses_range_tlbi
    }

    fn check_address(&self, ipa: Ipa) -> Result<(), MapError> {
        let page = self.geometry.granule().size();
        self.check_range(ipa.align_down(page), page)
    }

    /// Checks that a range, which may be empty, is page-aligned and lies in the IPA space.
    #[inline]
    fn check_range(&self, ipa: Ipa, size: u64) -> Result<(), MapError> {
        self.check_mapping(ipa, PhysAddr(0), size)
    }

    /// Checks that a guest range and a host range of the same size are page-aligned and lie in
    /// their address spaces.
    #[inline]
    fn check_mapping(&self, ipa: Ipa, phys: PhysAddr, size: u64) -> Result<(), MapError> {
        if (ipa.0 | phys.0 | size) & (self.geometry.granule().size() - 1) != 0 {
            return Err(MapError::Unaligned { ipa, phys, size });
        }
        let within = |from: u64, end| from.checked_add(size).is_some_and(|to| to <= end);
        if !within(ipa.0, self.geometry.size()) {
            return Err(MapError::IpaOutOfRange { ipa, size });
        }
        if !within(phys.0, 1 << ADDRESS_BITS) {
            return Err(MapError::PhysOutOfRange { phys, size });
        }
        Ok(())
    }
}
