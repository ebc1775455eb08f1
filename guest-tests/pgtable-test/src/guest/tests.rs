// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The layout of guests of every mode.

use super::{
    arch::aarch64::abi,
    layout::{LOW_MEMORY, Layout, LayoutError, most_tables, place_region},
};
use crate::config::GuestMap;
use granule_types::{
    guest_mode::GuestMode,
    units::{Bytes, GuestAddress},
};

#[test]
fn the_default_region_equals_that_of_the_kernels_test() {
    let at = |bits, size, align| {
        place_region(GuestAddress(1u64 << bits), Bytes::kib(4), size, align, None).unwrap().0
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
    assert!(matches!(place(Bytes::gib(64), None), LayoutError::TooLarge { .. }));
    assert!(matches!(
        place(Bytes::mib(4), Some(GuestAddress((1 << 36) - 0x1000))),
        LayoutError::TooLarge { .. }
    ));
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
fn an_overlap_with_low_memory_is_refused_with_the_first_free_address() {
    let size = Bytes::mib(64);
    let start = GuestAddress(0x20_0000 - 0x1000);
    let try_at = |start| {
        Layout::new(abi(GuestMode::P40V48_4K), Bytes::kib(4), 1000, start, size, GuestMap::Blocks)
    };

    let error = try_at(start).unwrap_err();

    let LayoutError::Covers { free, .. } = error else {
        panic!("{error}");
    };
    let layout = try_at(GuestAddress(free)).unwrap();
    assert!(LOW_MEMORY.0 + layout.low_size().0 <= free);
}

/// Lays out a guest with 52 bits of physical and 48 bits of virtual address.
fn wide(region: u64, size: Bytes) -> Result<Layout, LayoutError> {
    let mode = "P52V48_64K".parse().unwrap();
    let (page, region) = (Bytes::kib(4), GuestAddress(region));
    Layout::new(abi(mode), page, 1, region, size, GuestMap::Blocks)
}

#[test]
fn virtual_addresses_are_truncated_physical_addresses() {
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
fn unusable_virtual_addresses_are_refused_with_the_usable_range() {
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
    assert!(text.contains("virtual address 0x0,") && text.contains("48 bits"));
}
