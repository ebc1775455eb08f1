// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of layout and stage-1 tables. A walker, written from the manuals, checks the tables.

use super::{
    arch::{
        aarch64::{MAIR, guest_arch},
        x86_64,
    },
    layout::{LOW_MEMORY, Layout, LayoutError, PROGRAM_AREA_SIZE, max_tables, place_region},
    tables::{GuestArch, GuestVirtAddr, Stage1Tables},
};
use crate::config::GuestMap;
use granule_types::{
    guest_mode::GuestMode,
    units::{Bytes, GuestAddress},
};

fn place(
    bits: u8,
    size: Bytes,
    align: Bytes,
    offset: Option<u64>,
) -> Result<GuestAddress, LayoutError> {
    let end = GuestAddress(1 << bits);
    place_region(end, Bytes::kib(4), size, align, offset.map(GuestAddress))
}

#[test]
fn the_region_starts_as_in_the_kernels_test_or_at_an_offset_aligned_down() {
    // kvm_page_table_test of Linux 6.1 prints these starts as "Guest physical test memory offset".
    for (bits, size, align, offset, start) in [
        (48, Bytes::mib(64), Bytes::mib(2), None, 0xffff_fbe0_0000),
        (48, Bytes::mib(64), Bytes::kib(4), None, 0xffff_fbff_f000),
        (40, Bytes::gib(1), Bytes::gib(1), None, 0xff_8000_0000),
        (40, Bytes::mib(64), Bytes::mib(2), Some(0x4020_1234), 0x4020_0000),
    ] {
        assert_eq!(place(bits, size, align, offset), Ok(GuestAddress(start)));
    }
}

#[test]
fn a_region_that_is_empty_or_exceeds_the_last_address_is_refused() {
    let place = |size, offset| place(36, size, Bytes::kib(4), offset).unwrap_err();

    assert_eq!(place(Bytes(0), None), LayoutError::Empty);
    let end = Some((1 << 36) - 0x1000);
    for error in [place(Bytes::gib(64), None), place(Bytes::mib(4), end)] {
        assert!(matches!(error, LayoutError::TooLarge { .. }));
    }
}

#[test]
fn parts_of_low_memory_do_not_overlap() {
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

        let layout = Layout::new(guest_arch(mode), Bytes::kib(4), 80, region, size, map).unwrap();

        assert!(layout.mailbox(0).0 >= LOW_MEMORY.0 + PROGRAM_AREA_SIZE);
        assert!(layout.mailbox(79).0 < layout.tables().root().0);
        assert_eq!(layout.tables().root().0 % mode.page_size().0, 0);
        let end = layout.tables().root().0 + layout.tables().size().0;
        assert!(LOW_MEMORY.0 + layout.low_memory_size().0 >= end);
        let most = max_tables(size, mode.page_size(), map) * mode.page_size().0;
        assert!(layout.tables().size().0 <= most, "{name}");
    }
}

#[test]
fn an_overlap_with_low_memory_is_refused_with_the_first_free_address() {
    let size = Bytes::mib(64);
    let start = GuestAddress(0x20_0000 - 0x1000);
    let lay_out = |start| {
        let arch = guest_arch(GuestMode::P40V48_4K);
        Layout::new(arch, Bytes::kib(4), 1000, start, size, GuestMap::Blocks)
    };

    let error = lay_out(start).unwrap_err();

    let LayoutError::OverlapsLowMemory { first_free, .. } = error else {
        panic!("{error}");
    };
    let layout = lay_out(GuestAddress(first_free)).unwrap();
    assert!(LOW_MEMORY.0 + layout.low_memory_size().0 <= first_free);
}

/// Lays out a guest with 52 bits of physical and 48 bits of virtual address.
fn lay_out_52_bit(region: u64, size: Bytes) -> Result<Layout, LayoutError> {
    let mode = "P52V48_64K".parse().unwrap();
    let (page, region) = (Bytes::kib(4), GuestAddress(region));
    Layout::new(guest_arch(mode), page, 1, region, size, GuestMap::Blocks)
}

#[test]
fn virtual_addresses_are_truncated_physical_addresses() {
    let region = 0xf_ffff_0000_0000;
    let layout = lay_out_52_bit(region, Bytes::mib(64)).unwrap();

    assert_eq!(layout.virtual_address(GuestAddress(region)), GuestVirtAddr(0xffff_0000_0000));
    let end = Bytes::mib(64).0;
    for (address, physical) in [
        (0xffff_0000_1000, region + 0x1000),
        (0xffff_0000_0000 + end - 8, region + end - 8),
        (0xffff_0000_0000 + end, 0xffff_0000_0000 + end),
        (0xfffe_ffff_fff8, 0xfffe_ffff_fff8),
        (LOW_MEMORY.0, LOW_MEMORY.0),
    ] {
        assert_eq!(layout.physical_address(GuestVirtAddr(address)), GuestAddress(physical));
    }
}

#[test]
fn unusable_virtual_addresses_are_refused_with_the_usable_range() {
    let size = Bytes::mib(64);
    let refused = |start: u64| match lay_out_52_bit(start, size).unwrap_err() {
        LayoutError::VirtualAddress { first_free, last_address: last, .. } => (first_free, last),
        other => panic!("{other}"),
    };

    let (first_free, last) = refused(1 << 48);
    assert_eq!(refused((1 << 48) - 0x1_0000), (first_free, last));

    assert!(lay_out_52_bit((1 << 48) + first_free, size).is_ok());
    assert!(lay_out_52_bit((1 << 48) + last, size).is_ok());
    assert!(lay_out_52_bit((1 << 48) + last + 0x1_0000, size).is_err());
    let text = lay_out_52_bit(1 << 48, size).unwrap_err().to_string();
    assert!(text.contains("virtual address 0x0,") && text.contains("48 bits"));
}

const TABLES_ROOT: GuestAddress = GuestAddress(0x10_0000);

/// Stage-1 tables of one mode.
struct TestTables {
    tables: Stage1Tables,
    arch: GuestArch,
    /// Base-2 logarithm of the granule.
    granule_shift: u32,
}

/// The guest mode of x86_64; all other modes are arm64's.
const X86_64_MODE: &str = "PXXV48_4K";

impl TestTables {
    fn new(mode: &str) -> Self {
        let new_arch = if mode == X86_64_MODE { x86_64::guest_arch } else { guest_arch };
        let arch = new_arch(mode.parse().unwrap());
        let (tables, granule_shift) = (Stage1Tables::new(TABLES_ROOT, arch), arch.mode.page_shift);
        Self { tables, arch, granule_shift: granule_shift.into() }
    }

    fn map(&mut self, address: u64, physical: u64, size: u64, map: GuestMap) {
        let (address, physical) = (GuestVirtAddr(address), GuestAddress(physical));
        self.tables.map(address, physical, Bytes(size), self.arch.normal_memory, map);
    }

    /// Walks the tables and returns the leaf's output address, attributes and size.
    fn walk(&self, address: u64) -> Option<(u64, u64, u64)> {
        let Self { tables, arch, granule_shift: shift } = self;
        let index_bits = shift - 3;
        let bits = u32::from(arch.mode.va_bits);
        let mut physical = TABLES_ROOT.0;
        let mut low = shift + (bits - shift - 1) / index_bits * index_bits;
        loop {
            let index = (address >> low) % (1 << index_bits);
            let word = usize::try_from((physical - TABLES_ROOT.0) / 8 + index).unwrap();
            let entry = tables.entries()[word];
            let output = match shift {
                12 => entry & 0xffff_ffff_f000,
                14 => entry & 0xffff_ffff_c000,
                _ => entry & 0xffff_ffff_0000 | ((entry >> 12) & 0xf) << 48,
            };
            let is_last = low == *shift;
            let is_leaf = match (entry & 3, arch.mode.name) {
                (0, _) => return None,
                // P, R/W, and PS except at the last level.
                (3, X86_64_MODE) => is_last || entry & 1 << 7 != 0,
                (3, _) => is_last,
                (1, _) if !is_last => true,
                _ => return None,
            };
            if is_leaf {
                let span = 1 << low;
                return Some((output | address & (span - 1), entry & !output, span));
            }
            physical = output;
            low -= index_bits;
        }
    }

    /// Returns the output address and size of the leaf that maps an address.
    fn leaf(&self, address: u64) -> (u64, u64) {
        let (output, _, span) = self.walk(address).unwrap();
        (output, span)
    }
}

#[test]
fn every_granule_of_the_range_is_mapped_and_none_outside() {
    for mode in ["P48V48_4K", "P48V48_16K", "P36V47_16K", "P48V48_64K", X86_64_MODE] {
        let mut tables = TestTables::new(mode);
        let granule = 1 << tables.granule_shift;
        let start = (1 << tables.arch.address_bits) - 40 * granule;
        let physical = 0x40_0000_0000 - 40 * granule;

        tables.map(start, physical, 39 * granule, GuestMap::Blocks);

        for offset in (0..39).map(|n| n * granule) {
            assert_eq!(tables.leaf(start + offset + 8).0, physical + offset + 8);
        }
        assert_eq!(tables.walk(start - 8), None);
        assert_eq!(tables.walk(start + 39 * granule), None);
    }
}

#[test]
fn leaves_are_the_largest_that_fit_or_pages() {
    let (mib, gib) = (1 << 20, 1 << 30);
    let (ends, blocks) = ((2 * mib - 0x1000, 2 * mib + 0x2000), GuestMap::Blocks);
    for (mode, map, (start, size), address, span) in [
        ("P48V48_4K", GuestMap::Pages, (gib, 4 * mib), gib + 0x2348, 4 << 10),
        ("P48V48_16K", GuestMap::Pages, (gib, 16 * mib), gib + 0x2348, 16 << 10),
        ("P48V48_64K", GuestMap::Pages, (gib, 64 * mib), gib + 0x2348, 64 << 10),
        (X86_64_MODE, GuestMap::Pages, (gib, 4 * mib), gib + 0x2348, 4 << 10),
        (X86_64_MODE, blocks, (gib, gib), gib + 0x12_3458, 2 * mib),
        ("P48V48_4K", blocks, (gib, gib), gib + 0x12_3458, gib),
        ("P48V48_4K", blocks, (2 * mib, 2 * mib), 2 * mib + 0x12_3458, 2 * mib),
        ("P48V48_16K", blocks, (32 * mib, 32 * mib), 33 * mib + 8, 32 * mib),
        ("P48V48_64K", blocks, (512 * mib, 512 * mib), 513 * mib + 8, 512 * mib),
        ("P48V48_4K", blocks, ends, 2 * mib - 0x1000, 0x1000),
        ("P48V48_4K", blocks, ends, 2 * mib, 2 * mib),
        ("P48V48_4K", blocks, ends, 4 * mib, 0x1000),
    ] {
        let mut tables = TestTables::new(mode);

        tables.map(start, start, size, map);

        assert_eq!(tables.leaf(address), (address, span), "{mode} {address:#x}");
    }
}

#[test]
fn attributes_differ_between_normal_and_device_memory() {
    let mut tables = TestTables::new("P48V48_4K");
    let (zero, size, device) = (GuestVirtAddr(0), Bytes::kib(4), tables.arch.device_memory);
    tables.tables.map(zero, GuestAddress(0), size, device, GuestMap::Blocks);
    tables.map(0x1000, 0x1000, 0x1000, GuestMap::Blocks);
    let mut x86_64 = TestTables::new(X86_64_MODE);
    x86_64.map(2 << 20, 2 << 20, 2 << 20, GuestMap::Blocks);

    let (_, device, _) = tables.walk(0).unwrap();
    let (_, normal, _) = tables.walk(0x1000).unwrap();
    let (_, x86_64, _) = x86_64.walk(3 << 20).unwrap();

    // AttrIndx[4:2], AP[7:6], SH[9:8], AF[10], PXN[53] of Arm manual D8.3.
    assert_eq!((device >> 2) & 7, 0);
    assert_eq!(MAIR & 0xff, 0x00);
    assert_eq!((device >> 53) & 1, 1);
    assert_eq!((normal >> 2) & 7, 1);
    assert_eq!((MAIR >> 8) & 0xff, 0xff);
    assert_eq!((normal >> 8) & 3, 3);
    assert_eq!((normal >> 53) & 1, 0);
    for entry in [device, normal] {
        assert_eq!((entry >> 10) & 1, 1);
        assert_eq!((entry >> 6) & 3, 0);
    }
    // P, R/W, A, D, PS; not PWT, PCD, XD.
    assert_eq!(x86_64 & (1 << 63 | 0xff), 0b1110_0011);
}

#[test]
fn entries_with_64k_granules_hold_52_bit_addresses() {
    let mut tables = TestTables::new("P52V48_64K");
    let physical = 0xf_fff0_0000_0000;

    tables.map(0x10_0000, physical, 0x1_0000, GuestMap::Blocks);

    assert_eq!(tables.leaf(0x10_0000).0, physical);
}

#[test]
fn unaligned_unreachable_and_mapped_ranges_are_refused() {
    for address in [0x10, 1 << 48, (2 << 20) + 0x1000] {
        let refused = std::panic::catch_unwind(|| {
            let mut tables = TestTables::new("P48V48_4K");
            tables.map(2 << 20, 2 << 20, 2 << 20, GuestMap::Blocks);
            tables.map(address, 0, 0x1000, GuestMap::Blocks);
        });
        assert!(refused.is_err(), "{address:#x}");
    }
}
