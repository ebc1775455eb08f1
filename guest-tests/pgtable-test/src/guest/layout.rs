// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The layout of guest memory.
//!
//! ```text
//! 0x0_8000   doorbells, where they are addresses (no memory: every store exits)
//! 0x1_0000   program                                ┐
//!            tables of the architecture             │ low memory, one memslot
//!            mailboxes, a page for each vCPU        │
//!            stage-1 tables                         ┘
//!    …
//!            region under test, by default at the top of the physical addresses, one page below
//!            their end, as in the kernel's `kvm_page_table_test`
//! ```
//!
//! A guest-virtual address is the guest-physical one, truncated to the virtual address width. If
//! the physical width is larger, the truncated region must neither overlap low memory nor exceed
//! the last virtual address.

use thiserror::Error;

use super::tables::{Abi, GuestVirtAddr, Tables};
use crate::config::GuestMap;
use granule_types::{
    guest_mode::GuestMode,
    units::{Bytes, GuestAddress},
};

/// Start of low memory and address of the program, aligned to every granule and host page.
pub const LOW_MEMORY: GuestAddress = GuestAddress(0x1_0000);
pub const PROGRAM_AREA_SIZE: u64 = 0x8000;
/// Address of the architecture's tables, an area of 32 KiB.
pub const ARCH_TABLES: GuestAddress = GuestAddress(LOW_MEMORY.0 + PROGRAM_AREA_SIZE);
const MAILBOXES: u64 = ARCH_TABLES.0 + 0x8000;

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LayoutError {
    #[error("{size} of memory exceed the guest-physical addresses, which end at {end:#x}")]
    TooLarge { size: Bytes, end: u64 },
    #[error("the memory under test is empty; use a size above 0")]
    Empty,
    #[error(
        "a region at {start:#x} overlaps the test's program, mailboxes and tables; \
         use an offset of at least {free:#x}"
    )]
    Covers { start: u64, free: u64 },
    #[error(
        "guest-virtual addresses have {bits} bits, so a region at {start:#x} has the virtual \
         address {address:#x}, where it {problem}; use an offset whose lower {bits} bits are \
         {free:#x} to {last:#x}",
        problem = if address < free {
            "overlaps the test's program, mailboxes and tables"
        } else {
            "exceeds the last virtual address"
        }
    )]
    Virtual {
        start: u64,
        address: u64,
        bits: u8,
        free: u64,
        /// The last address at which a region of this size can start.
        last: u64,
    },
}

/// Returns the start of the region under test: `offset`, or the highest start below `end` that
/// keeps the last guest page free, as in the kernel's test; aligned down to a power of two.
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

/// Returns the maximum number of stage-1 tables for a region of this size: the root, one per level
/// for low memory, two per level for the ends of the region, and one per 64 GiB between the ends,
/// the range of a table of blocks with 16K granules (larger with other granules). With
/// `GuestMap::Pages`, one per table of pages, and as many again for the levels above.
pub(super) const fn max_tables(size: Bytes, granule: Bytes, map: GuestMap) -> u64 {
    let between = match map {
        GuestMap::Blocks => size.0 >> 36,
        GuestMap::Pages => 2 * (size.0 / (granule.0 * (granule.0 / 8))),
    };
    1 + 3 + 6 + between
}

const fn mask(bits: u8) -> u64 {
    (1 << bits) - 1
}

#[derive(Debug, Clone)]
pub struct Layout {
    abi: Abi,
    unit: u64,
    vcpus: u64,
    region: GuestAddress,
    size: Bytes,
    tables: Tables,
}

impl Layout {
    /// Lays out a guest with `vcpus` mailboxes, and builds stage-1 tables that map low memory and
    /// the region, the latter as `guest_map` selects. Region and size are aligned to the granule.
    pub fn new(
        abi: Abi,
        host_page: Bytes,
        vcpus: u32,
        region: GuestAddress,
        size: Bytes,
        guest_map: GuestMap,
    ) -> Result<Self, LayoutError> {
        let granule = abi.mode.page_size();
        // No two parts share a host or guest page.
        let unit = host_page.0.max(granule.0);
        let vcpus = u64::from(vcpus);
        let tables_at = GuestAddress(MAILBOXES + vcpus * unit);
        let free =
            (tables_at.0 + max_tables(size, granule, guest_map) * granule.0).next_multiple_of(unit);
        if region.0 < free {
            return Err(LayoutError::Covers { start: region.0, free });
        }
        let bits = abi.address_bits;
        let address = region.0 & mask(bits);
        let last = (1u64 << bits).saturating_sub(size.0) & !(granule.0 - 1);
        if address < free || address > last {
            return Err(LayoutError::Virtual { start: region.0, address, bits, free, last });
        }
        let mut tables = Tables::new(tables_at, abi);
        let mut map = |start: GuestAddress, size, memory, map| {
            tables.map(GuestVirtAddr(start.0 & mask(bits)), start, size, memory, map);
        };
        if let Some(doorbells) = abi.doorbells {
            let page = GuestAddress(doorbells.0 & !(granule.0 - 1));
            map(page, granule, abi.device, GuestMap::Blocks);
        }
        let low = Bytes(tables_at.0 - LOW_MEMORY.0);
        map(LOW_MEMORY, low, abi.normal, GuestMap::Blocks);
        map(region, size, abi.normal, guest_map);
        Ok(Self { unit, vcpus, region, size, tables, abi })
    }

    pub const fn mode(&self) -> GuestMode {
        self.abi.mode
    }

    /// Returns the guest-virtual address of a physical one.
    pub fn virtual_of(&self, physical: GuestAddress) -> GuestVirtAddr {
        GuestVirtAddr(physical.0 & mask(self.abi.address_bits))
    }

    /// Returns the guest-physical address of a virtual one; outside the region the two are equal.
    pub fn physical_of(&self, GuestVirtAddr(address): GuestVirtAddr) -> GuestAddress {
        let offset = address.wrapping_sub(self.virtual_of(self.region).0);
        GuestAddress(if offset < self.size.0 { self.region.0 + offset } else { address })
    }

    /// Returns the size of low memory, a multiple of the host page.
    pub fn low_size(&self) -> Bytes {
        let end = self.tables.base().0 + self.tables.size().0;
        Bytes((end - LOW_MEMORY.0).next_multiple_of(self.unit))
    }

    /// Returns the address of a vCPU's mailbox, which has a page of its own.
    pub fn mailbox(&self, vcpu: usize) -> GuestAddress {
        let vcpu = (vcpu as u64).min(self.vcpus);
        GuestAddress(MAILBOXES + vcpu * self.unit)
    }

    pub const fn tables(&self) -> &Tables {
        &self.tables
    }
}
