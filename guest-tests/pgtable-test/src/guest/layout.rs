// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Layout of guest memory.
//!
//! ```text
//! 0x0_8000   doorbells, if they are addresses (no memslot: every store exits)
//! 0x1_0000   program                                ┐
//!            descriptor tables                      │ low memory, one memslot
//!            mailboxes, a page for each vCPU        │
//!            stage-1 tables                         ┘
//!    …
//!            region under test, by default one page below the end of the physical addresses, as in
//!            `kvm_page_table_test`
//! ```
//!
//! A guest-virtual address is the guest-physical address, truncated to the virtual address width.
//! The truncated region must neither overlap low memory nor exceed the last virtual address.

use thiserror::Error;

use super::tables::{GuestArch, GuestVirtAddr, Stage1Tables};
use crate::config::GuestMap;
use granule_types::{
    guest_mode::GuestMode,
    units::{Bytes, GuestAddress},
};

/// Start of low memory and of the program, aligned to all granules and host page sizes.
pub const LOW_MEMORY: GuestAddress = GuestAddress(0x1_0000);
pub const PROGRAM_AREA_SIZE: u64 = 0x8000;
/// Address of the architecture's descriptor tables, an area of 32 KiB.
pub const DESCRIPTOR_TABLES: GuestAddress = GuestAddress(LOW_MEMORY.0 + PROGRAM_AREA_SIZE);
const MAILBOX_START: u64 = DESCRIPTOR_TABLES.0 + 0x8000;

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LayoutError {
    #[error("{size} of memory exceeds the guest-physical addresses, which end at {end:#x}")]
    TooLarge { size: Bytes, end: u64 },
    #[error("the memory under test is empty; use a size above 0")]
    Empty,
    #[error(
        "a region at {start:#x} overlaps the test's program, mailboxes and tables; \
         use an offset of at least {first_free:#x}"
    )]
    OverlapsLowMemory { start: u64, first_free: u64 },
    #[error(
        "guest-virtual addresses have {bits} bits, so a region at {start:#x} has the virtual \
         address {address:#x}, where it {problem}; use an offset whose lower {bits} bits are \
         {first_free:#x} to {last_address:#x}",
        problem = if address < first_free {
            "overlaps the test's program, mailboxes and tables"
        } else {
            "exceeds the last virtual address"
        }
    )]
    VirtualAddress {
        start: u64,
        address: u64,
        bits: u8,
        first_free: u64,
        /// Last virtual address at which a region of this size can start.
        last_address: u64,
    },
}

/// Returns the start of the region under test, aligned down to `align`, a power of two: `offset`,
/// or the highest address for which the last guest page below `end` is free, as in the kernel's
/// test.
pub fn place_region(
    end: GuestAddress,
    granule: Bytes,
    size: Bytes,
    align: Bytes,
    offset: Option<GuestAddress>,
) -> Result<GuestAddress, LayoutError> {
    if size.0 == 0 {
        return Err(LayoutError::Empty);
    }
    let GuestAddress(end) = end;
    let too_large = LayoutError::TooLarge { size, end };
    let start = match offset {
        Some(GuestAddress(offset)) => Some(offset),
        None => end.checked_sub(granule.0 + size.0),
    };
    start
        .map(|start| start & !(align.0 - 1))
        .filter(|start| start.checked_add(size.0).is_some_and(|last| last <= end))
        .map(GuestAddress)
        .ok_or(too_large)
}

/// Returns the maximum number of stage-1 tables for a region of this size: the root, one for each
/// level of low memory, two for each level at the ends of the region, and those between the ends.
/// Between the ends, a table of blocks maps at least 64 GiB (with 16K granules). With
/// `GuestMap::Pages` each last-level table counts twice, for the levels above it.
pub(super) const fn max_tables(size: Bytes, granule: Bytes, map: GuestMap) -> u64 {
    let between = match map {
        GuestMap::Blocks => size.0 >> 36,
        GuestMap::Pages => 2 * (size.0 / (granule.0 * (granule.0 / 8))),
    };
    1 + 3 + 6 + between
}

const fn address_mask(bits: u8) -> u64 {
    (1 << bits) - 1
}

#[derive(Debug, Clone)]
pub struct Layout {
    arch: GuestArch,
    alignment: u64,
    vcpus: u64,
    region: GuestAddress,
    region_size: Bytes,
    tables: Stage1Tables,
}

impl Layout {
    /// Lays out a guest with `vcpus` mailboxes, and builds stage-1 tables that map low memory and
    /// the region, which `guest_map` maps. Region and size are aligned to the granule.
    pub fn new(
        arch: GuestArch,
        host_page_size: Bytes,
        vcpus: u32,
        region: GuestAddress,
        size: Bytes,
        guest_map: GuestMap,
    ) -> Result<Self, LayoutError> {
        let granule = arch.mode.page_size();
        // Parts of low memory share neither host nor guest pages.
        let alignment = host_page_size.0.max(granule.0);
        let vcpus = u64::from(vcpus);
        let tables_at = GuestAddress(MAILBOX_START + vcpus * alignment);
        let first_free = (tables_at.0 + max_tables(size, granule, guest_map) * granule.0)
            .next_multiple_of(alignment);
        let start = region.0;
        if start < first_free {
            return Err(LayoutError::OverlapsLowMemory { start, first_free });
        }
        let bits = arch.address_bits;
        let address = start & address_mask(bits);
        let last_address = (1u64 << bits).saturating_sub(size.0) & !(granule.0 - 1);
        if address < first_free || address > last_address {
            return Err(LayoutError::VirtualAddress {
                start,
                address,
                bits,
                first_free,
                last_address,
            });
        }
        let mut tables = Stage1Tables::new(tables_at, arch);
        let mut map = |start: GuestAddress, size, memory, map| {
            tables.map(GuestVirtAddr(start.0 & address_mask(bits)), start, size, memory, map);
        };
        if let Some(doorbell) = arch.first_doorbell {
            let page = GuestAddress(doorbell.0 & !(granule.0 - 1));
            map(page, granule, arch.device_memory, GuestMap::Blocks);
        }
        let low = Bytes(tables_at.0 - LOW_MEMORY.0);
        map(LOW_MEMORY, low, arch.normal_memory, GuestMap::Blocks);
        map(region, size, arch.normal_memory, guest_map);
        Ok(Self { alignment, vcpus, region, region_size: size, tables, arch })
    }

    pub const fn mode(&self) -> GuestMode {
        self.arch.mode
    }

    /// Returns the guest-virtual address of a guest-physical address.
    pub fn virtual_address(&self, physical: GuestAddress) -> GuestVirtAddr {
        GuestVirtAddr(physical.0 & address_mask(self.arch.address_bits))
    }

    /// Returns the guest-physical address of a guest-virtual address.
    pub fn physical_address(&self, GuestVirtAddr(address): GuestVirtAddr) -> GuestAddress {
        let offset = address.wrapping_sub(self.virtual_address(self.region).0);
        GuestAddress(if offset < self.region_size.0 { self.region.0 + offset } else { address })
    }

    /// Returns the size of low memory, a multiple of the host's page size.
    pub fn low_memory_size(&self) -> Bytes {
        let end = self.tables.root().0 + self.tables.size().0;
        Bytes((end - LOW_MEMORY.0).next_multiple_of(self.alignment))
    }

    /// Returns the address of a vCPU's mailbox, at the start of a page.
    pub fn mailbox(&self, vcpu: usize) -> GuestAddress {
        let vcpu = (vcpu as u64).min(self.vcpus);
        GuestAddress(MAILBOX_START + vcpu * self.alignment)
    }

    pub const fn tables(&self) -> &Stage1Tables {
        &self.tables
    }
}
