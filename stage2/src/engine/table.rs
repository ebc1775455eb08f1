// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A stage-2 table: shape, policy, root, and the errors of its operations.

use thiserror::Error;

use crate::{
    address::{Ipa, PhysAddr, TableAddress},
    geometry::{ADDRESS_BITS, Geometry},
    operations::Vmid,
    policy::{CmoPlacement, Policy},
};

/// CPU features that the engine uses; all CPUs of the machine must have them alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features {
    /// FEAT_S2FWB: stage 2 forces write-back, so guests cannot bypass the caches.
    pub fwb: bool,
    /// CTR_EL0.DIC: instruction fetches need no I-cache invalidation.
    pub dic: bool,
    /// FEAT_TLBIRANGE: one TLBI covers a range.
    pub tlb_range: bool,
    /// FEAT_BBM level, 0 to 2; 3 stands for level 2 on CPUs that raise no TLB conflict aborts.
    pub bbm: u8,
}

/// Error returned when an operation changed nothing, or only part of its range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum MapError {
    /// An address or the size is not a multiple of the page size.
    #[error("{ipa} to {phys}, {size:#x} bytes: not a multiple of the page size")]
    Unaligned {
        /// First guest address.
        ipa: Ipa,
        /// First host address.
        phys: PhysAddr,
        /// Bytes.
        size: u64,
    },
    /// The guest range does not end within the IPA space.
    #[error("guest range {ipa}, {size:#x} bytes: beyond the IPA space")]
    OutOfRange {
        /// First guest address.
        ipa: Ipa,
        /// Bytes.
        size: u64,
    },
    /// The host range does not end within the output addresses of descriptors.
    #[error("host range {phys}, {size:#x} bytes: beyond 48 address bits")]
    TooHigh {
        /// First host address.
        phys: PhysAddr,
        /// Bytes.
        size: u64,
    },
    /// A table is needed and the memcache is empty: top it up and retry.
    #[error("memcache empty: top it up and retry")]
    NoTable,
    /// Another CPU has changed the entry or is changing it: the guest retries.
    #[error("entry changed by another CPU: retry")]
    Again,
    /// The leaf belongs to a contiguous run, which only an exclusive walk changes: retry with
    /// `&mut self`.
    #[error("page in a contiguous run: retry with an exclusive walk")]
    Contiguous,
}

/// A stage-2 translation table.
#[derive(Debug)]
pub struct Stage2 {
    pub(super) geometry: Geometry,
    pub(super) features: Features,
    pub(super) policy: Policy,
    pub(super) vmid: Vmid,
    pub(super) root: TableAddress,
    /// Set if no map handler does CMOs, whatever it maps.
    pub(super) without_cmo: bool,
}

impl Stage2 {
    /// Creates a table over `root`: [`Geometry::root_tables`] zeroed tables side by side.
    pub const fn new(
        geometry: Geometry,
        features: Features,
        policy: Policy,
        vmid: Vmid,
        root: TableAddress,
    ) -> Self {
        Self {
            geometry,
            features,
            policy,
            vmid,
            root,
            without_cmo: (features.fwb && features.dic)
                || matches!(policy.cmo, CmoPlacement::FaultPath),
        }
    }

    /// Returns the shape of the IPA space.
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

    /// Returns the VMID that TLB invalidations apply to.
    pub const fn vmid(&self) -> Vmid {
        self.vmid
    }

    /// Returns the first table of the root.
    pub const fn root(&self) -> TableAddress {
        self.root
    }

    /// Returns the number of tables that one mapping may need at most, the size to which a memcache
    /// is topped up (Linux: `kvm_mmu_cache_min_pages()`).
    pub const fn memcache_min(&self) -> usize {
        self.geometry.depth()
    }

    /// Returns whether a range is invalidated by range TLBIs.
    #[inline]
    pub(super) const fn uses_range_tlbi(&self) -> bool {
        self.features.tlb_range && self.policy.range_invalidation
    }

    /// Checks that an address lies in the IPA space.
    pub(super) fn check_address(&self, ipa: Ipa) -> Result<(), MapError> {
        let page = self.geometry.granule().size();
        self.check_range(ipa.align_down(page), page)
    }

    /// Checks that a range consists of pages in the IPA space.
    #[inline]
    pub(super) fn check_range(&self, ipa: Ipa, size: u64) -> Result<(), MapError> {
        self.check_mapping(ipa, PhysAddr(0), size)
    }

    /// Checks that a guest range and a host range of one size consist of pages and end within
    /// their address spaces.
    #[inline]
    pub(super) fn check_mapping(
        &self,
        ipa: Ipa,
        phys: PhysAddr,
        size: u64,
    ) -> Result<(), MapError> {
        if (ipa.0 | phys.0 | size) & (self.geometry.granule().size() - 1) != 0 {
            return Err(MapError::Unaligned { ipa, phys, size });
        }
        let within = |from: u64, end| from.checked_add(size).is_some_and(|to| to <= end);
        if !within(ipa.0, self.geometry.size()) {
            return Err(MapError::OutOfRange { ipa, size });
        }
        if !within(phys.0, 1 << ADDRESS_BITS) {
            return Err(MapError::TooHigh { phys, size });
        }
        Ok(())
    }
}
