// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where things lie in the guest.
//!
//! ```text
//! 0x0_8000   the bells, where they are addresses: no memory, every store leaves the guest
//! 0x1_0000   the program; behind it what the     ┐
//!            architecture wants besides          │
//!            one mailbox a vCPU, a page each     │ low memory, one slot
//!            the guest's own tables              ┘
//!    …
//! the region under test: by default the top of the mode's physical addresses, one page short of
//! their end, as the kernel's `kvm_page_table_test` places it
//! ```
//!
//! Guest-virtual addresses are the physical ones, cut to the width of a virtual address. That makes a
//! difference only where it is less than a physical one's; there the region must neither come to
//! lie on low memory by it nor go on beyond the last virtual address.

use std::sync::Arc;

use thiserror::Error;

use super::tables::{Format, MemoryKind, TableError, Tables};
use crate::config::GuestMap;
use granule_types::{
    guest_mode::GuestMode,
    units::{Bytes, GuestAddress},
};

/// Where low memory begins: aligned to every granule and host page.
pub const LOW_MEMORY: GuestAddress = GuestAddress(0x1_0000);

/// Room for the program.
const PROGRAM_ROOM: u64 = 0x8000;
/// Room for what the architecture wants besides.
const EXTRA_ROOM: u64 = 0x8000;
/// Where the mailboxes begin.
const MAILBOXES: u64 = LOW_MEMORY.0 + PROGRAM_ROOM + EXTRA_ROOM;

/// What an architecture says about its guests.
#[derive(Debug, Clone)]
pub struct Abi {
    /// The guest mode.
    pub mode: GuestMode,
    /// What the guest's own tables look like.
    pub format: Arc<dyn Format>,
    /// Where the bells are, if they are addresses.
    pub bells: Option<GuestAddress>,
}

/// Why the guest cannot be laid out.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// The region does not fit below the end of physical addresses.
    #[error("{size} of memory do not fit below the end of guest-physical addresses, {end:#x}")]
    TooLarge {
        /// The region's size.
        size: Bytes,
        /// The end of physical addresses.
        end: u64,
    },
    /// There is no region.
    #[error("0 bytes of memory leave nothing to test: name a size")]
    Empty,
    /// The region covers the test's own code.
    #[error(
        "a region at {start:#x} covers the test's own code, mailboxes and tables: \
         use an offset of at least {free:#x}"
    )]
    Covers {
        /// Where the region would begin.
        start: u64,
        /// The first address that is free.
        free: u64,
    },
    /// The region's virtual addresses cannot be had.
    #[error(
        "the guest's virtual addresses have {bits} bits, and so a region at {start:#x} is at \
         {address:#x} for it, where {problem}: use an offset whose lower {bits} bits are \
         {free:#x} to {last:#x}",
        problem = if address < free {
            "the test's own code, mailboxes and tables are"
        } else {
            "it does not fit below their end"
        }
    )]
    Virtual {
        /// Where the region would begin.
        start: u64,
        /// Where it would begin for the guest.
        address: u64,
        /// The width of a virtual address.
        bits: u8,
        /// The first virtual address that is free.
        free: u64,
        /// The last virtual address at which a region of this size can begin.
        last: u64,
    },
    /// The guest's tables cannot be built.
    #[error("the guest's own tables cannot be built")]
    Tables(#[from] TableError),
}

/// Where the region under test begins: at `offset`, or as high below `end` as the kernel's test puts
/// it (the last guest page stays free); aligned down to `align`, a power of two.
///
/// # Errors
/// [`LayoutError::TooLarge`] or [`LayoutError::Empty`].
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

/// How many tables a guest with a region of this size takes at most: the root, one a level for low
/// memory, two a level for the ends of the region, and between them one for each 64 GiB (what one
/// table of 16K-granule blocks maps; those of other granules map more), or, by pages, for each that
/// a table of pages maps, and as many again for the levels above.
const fn most_tables(size: Bytes, granule: Bytes, map: GuestMap) -> u64 {
    let between = match map {
        GuestMap::Blocks => size.0 >> 36,
        GuestMap::Pages => 2 * (size.0 / (granule.0 * (granule.0 / 8))),
    };
    1 + 3 + 6 + between
}

/// The bits of a physical address that a virtual one has.
const fn mask(bits: u8) -> u64 {
    (1 << bits) - 1
}

/// A guest laid out.
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
    /// Lays a guest out: `vcpus` mailboxes, and tables that map them and the region,
    /// the region as `map` says.
    ///
    /// # Errors
    /// The region covers low memory, or the tables cannot be built.
    pub fn new(
        abi: Abi,
        host_page: Bytes,
        vcpus: u32,
        region: GuestAddress,
        size: Bytes,
        map: GuestMap,
    ) -> Result<Self, LayoutError> {
        let granule = abi.mode.page_size();
        // Nothing shares a page, neither the host's nor the guest's.
        let unit = host_page.0.max(granule.0);
        let vcpus = u64::from(vcpus);
        let tables_at = GuestAddress(MAILBOXES + vcpus * unit);
        let free =
            (tables_at.0 + most_tables(size, granule, map) * granule.0).next_multiple_of(unit);
        if region.0 < free {
            return Err(LayoutError::Covers {
                start: region.0,
                free,
            });
        }
        let bits = abi.format.address_bits();
        let address = region.0 & mask(bits);
        let last = (1u64 << bits).saturating_sub(size.0) & !(granule.0 - 1);
        if address < free || address > last {
            return Err(LayoutError::Virtual {
                start: region.0,
                address,
                bits,
                free,
                last,
            });
        }
        let low = Bytes(tables_at.0 - LOW_MEMORY.0);
        let blocks = GuestMap::Blocks;
        let bells = abi.bells.map(|bells| {
            let page = GuestAddress(bells.0 & !(granule.0 - 1));
            (page, granule, MemoryKind::Device, blocks)
        });
        let mut layout = Self {
            unit,
            vcpus,
            region,
            size,
            tables: Tables::new(tables_at, Arc::clone(&abi.format)),
            abi,
        };
        let memory = [
            (LOW_MEMORY, low, MemoryKind::Normal, blocks),
            (region, size, MemoryKind::Normal, map),
        ];
        for (start, size, kind, map) in bells.into_iter().chain(memory) {
            let virtual_start = layout.virtual_of(start);
            layout.tables.map_by(map);
            layout.tables.map(virtual_start, start, size, kind)?;
        }
        Ok(layout)
    }

    /// The guest mode.
    pub const fn mode(&self) -> GuestMode {
        self.abi.mode
    }

    /// The guest-virtual address of a physical one.
    pub fn virtual_of(&self, physical: GuestAddress) -> u64 {
        physical.0 & mask(self.abi.format.address_bits())
    }

    /// The guest-physical address of a virtual one; elsewhere than in the region they are the same.
    pub fn physical_of(&self, address: u64) -> GuestAddress {
        let offset = address.wrapping_sub(self.virtual_of(self.region));
        GuestAddress(if offset < self.size.0 {
            self.region.0 + offset
        } else {
            address
        })
    }

    /// The size of low memory, a multiple of the host's page.
    pub fn low_size(&self) -> Bytes {
        let end = self.tables.base().0 + self.tables.size().0;
        Bytes((end - LOW_MEMORY.0).next_multiple_of(self.unit))
    }

    /// Where the program goes, aligned for its vectors.
    pub const fn program(&self) -> GuestAddress {
        LOW_MEMORY
    }

    /// How large the program may be.
    pub const fn program_room(&self) -> Bytes {
        Bytes(PROGRAM_ROOM)
    }

    /// Where what the architecture wants besides goes: 32 KiB.
    pub const fn extra(&self) -> GuestAddress {
        GuestAddress(LOW_MEMORY.0 + PROGRAM_ROOM)
    }

    /// A vCPU's mailbox, at the beginning of a page of its own.
    pub fn mailbox(&self, vcpu: usize) -> GuestAddress {
        let vcpu = (vcpu as u64).min(self.vcpus);
        GuestAddress(MAILBOXES + vcpu * self.unit)
    }

    /// The guest's tables.
    pub const fn tables(&self) -> &Tables {
        &self.tables
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::abi_of_every_mode as abi;

    #[test]
    fn the_region_lies_where_the_kernels_test_puts_it() {
        let at = |bits, size, align| {
            place_region(GuestAddress(1u64 << bits), Bytes::kib(4), size, align, None)
                .unwrap()
                .0
        };

        // Printed by kvm_page_table_test of Linux 6.1 as "Guest physical test memory offset".
        assert_eq!(at(48, Bytes::mib(64), Bytes::mib(2)), 0xffff_fbe0_0000);
        assert_eq!(at(48, Bytes::mib(64), Bytes::kib(4)), 0xffff_fbff_f000);
        assert_eq!(at(40, Bytes::gib(1), Bytes::gib(1)), 0xff_8000_0000);
    }

    #[test]
    fn an_offset_is_aligned_down() {
        let start = place_region(
            GuestAddress(1 << 40),
            Bytes::kib(4),
            Bytes::mib(64),
            Bytes::mib(2),
            Some(GuestAddress(0x4020_1234)),
        );

        assert_eq!(start, Ok(GuestAddress(0x4020_0000)));
    }

    #[test]
    fn a_region_beyond_the_last_address_is_refused() {
        let place = |size, offset| {
            let end = GuestAddress(1 << 36);
            place_region(end, Bytes::kib(4), size, Bytes::kib(4), offset).unwrap_err()
        };

        assert_eq!(place(Bytes(0), None), LayoutError::Empty);
        assert!(matches!(
            place(Bytes::gib(64), None),
            LayoutError::TooLarge { .. }
        ));
        assert!(matches!(
            place(Bytes::mib(4), Some(GuestAddress((1 << 36) - 0x1000))),
            LayoutError::TooLarge { .. }
        ));
    }

    #[test]
    fn pieces_of_low_memory_do_not_overlap() {
        for (name, map) in [
            ("P48V48_4K", GuestMap::Blocks),
            ("P48V48_16K", GuestMap::Blocks),
            ("P48V48_64K", GuestMap::Blocks),
            ("P48V48_4K", GuestMap::Pages),
            ("P48V48_16K", GuestMap::Pages),
        ] {
            let mode: GuestMode = name.parse().unwrap();
            let size = Bytes::mib(64);
            let region = GuestAddress(0xffff_f000_0000);

            let layout = Layout::new(abi(mode), Bytes::kib(4), 80, region, size, map).unwrap();

            assert!(layout.mailbox(0).0 >= layout.program().0 + layout.program_room().0);
            assert!(layout.mailbox(79).0 < layout.tables().base().0);
            assert_eq!(layout.tables().base().0 % mode.page_size().0, 0);
            let end = layout.tables().base().0 + layout.tables().size().0;
            assert!(LOW_MEMORY.0 + layout.low_size().0 >= end);
            let most = most_tables(size, mode.page_size(), map) * mode.page_size().0;
            assert!(layout.tables().size().0 <= most, "{name}");
        }
    }

    #[test]
    fn a_region_over_the_tests_own_memory_is_refused_with_the_first_free_address() {
        let size = Bytes::mib(64);
        let start = GuestAddress(0x20_0000 - 0x1000);
        let try_at = |start| {
            Layout::new(
                abi(GuestMode::P40V48_4K),
                Bytes::kib(4),
                1000,
                start,
                size,
                GuestMap::Blocks,
            )
        };

        let error = try_at(start).unwrap_err();

        let LayoutError::Covers { free, .. } = error else {
            panic!("{error}");
        };
        let layout = try_at(GuestAddress(free)).unwrap();
        assert!(LOW_MEMORY.0 + layout.low_size().0 <= free);
    }

    /// A guest of 52 bits of physical address and 48 of virtual.
    fn wide(region: u64, size: Bytes) -> Result<Layout, LayoutError> {
        let mode = "P52V48_64K".parse().unwrap();
        let (page, region) = (Bytes::kib(4), GuestAddress(region));
        Layout::new(abi(mode), page, 1, region, size, GuestMap::Blocks)
    }

    #[test]
    fn virtual_addresses_are_physical_ones_cut_to_their_width() {
        let region = 0xf_ffff_0000_0000;
        let layout = wide(region, Bytes::mib(64)).unwrap();

        assert_eq!(layout.virtual_of(GuestAddress(region)), 0xffff_0000_0000);
        let end = Bytes::mib(64).0;
        for (address, physical) in [
            (0xffff_0000_1000, region + 0x1000),
            (0xffff_0000_0000 + end - 8, region + end - 8),
            (0xffff_0000_0000 + end, 0xffff_0000_0000 + end),
            (0xfffe_ffff_fff8, 0xfffe_ffff_fff8),
            (LOW_MEMORY.0, LOW_MEMORY.0),
        ] {
            assert_eq!(layout.physical_of(address), GuestAddress(physical));
        }
    }

    #[test]
    fn a_region_whose_virtual_addresses_are_taken_or_end_too_soon_is_refused_with_those_that_do() {
        let size = Bytes::mib(64);
        let refused = |start: u64| match wide(start, size).unwrap_err() {
            LayoutError::Virtual { free, last, .. } => (free, last),
            other => panic!("{other}"),
        };

        let (free, last) = refused(1 << 48);
        assert_eq!(refused((1 << 48) - 0x1_0000), (free, last));

        assert!(wide((1 << 48) + free, size).is_ok());
        assert!(wide((1 << 48) + last, size).is_ok());
        assert!(wide((1 << 48) + last + 0x1_0000, size).is_err());
        let text = wide(1 << 48, size).unwrap_err().to_string();
        assert!(text.contains("at 0x0 for it") && text.contains("48 bits"));
    }
}
