// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest memory: all regions as one `vm-memory` map.

use std::sync::Arc;

use granule_types::units::{Bytes, GuestAddress};
use vm_memory::{GuestMemoryMmap, GuestRegionMmap, mmap::MmapRegionBuilder};

use super::{GuestRam, MemoryError};

/// Memory of a guest in the type that other virtualisation crates use.
#[derive(Debug, Clone)]
pub struct GuestMemory {
    map: GuestMemoryMmap,
    /// Owners of the mappings that `map` refers to.
    rams: Vec<Arc<GuestRam>>,
}

impl GuestMemory {
    /// Combines regions of memory.
    ///
    /// # Errors
    /// [`MemoryError::Range`]: a region exceeds 64 bits or overlaps another.
    pub fn new(rams: Vec<Arc<GuestRam>>) -> Result<Self, MemoryError> {
        let regions = rams.iter().map(|ram| region(ram)).collect::<Result<_, _>>()?;
        let map = GuestMemoryMmap::from_regions(regions).map_err(|error| MemoryError::Range {
            start: rams.first().map_or(GuestAddress(0), |ram| ram.start()),
            size: Bytes(rams.iter().map(|ram| ram.size().0).sum()),
            why: error.to_string(),
        })?;
        Ok(Self { map, rams })
    }

    /// Discards the backing of a range that the guest does not need; the guest reads zeros when it
    /// touches the range again. Returns the number of bytes discarded: whole pages of the backing
    /// within guest memory.
    #[must_use]
    pub fn discard(&self, start: GuestAddress, length: Bytes) -> Bytes {
        let end = start.0.saturating_add(length.0);
        let discarded = self.rams.iter().map(|ram| ram.discard(start.0, end)).sum();
        Bytes(discarded)
    }

    /// Returns the memory by guest-physical address.
    pub const fn map(&self) -> &GuestMemoryMmap {
        &self.map
    }
}

/// Returns a region that refers to the mapping of `ram` without owning it.
fn region(ram: &GuestRam) -> Result<GuestRegionMmap, MemoryError> {
    let range = |why: String| MemoryError::Range { start: ram.start(), size: ram.size(), why };
    let mapping = ram.mapping();
    let builder = MmapRegionBuilder::new(mapping.len())
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(ram.plan().map_flags())
        .with_hugetlbfs(ram.plan().is_hugetlb());
    // SAFETY: pointer and length are those of a mapping with this protection; [`GuestMemory`]
    // holds its owner as long as the region.
    let builder = unsafe { builder.with_raw_mmap_pointer(mapping.as_ptr()) };
    let region = builder.build().map_err(|error| range(error.to_string()))?;
    GuestRegionMmap::new(region, ram.start())
        .ok_or_else(|| range("the range exceeds 64 bits".to_owned()))
}
