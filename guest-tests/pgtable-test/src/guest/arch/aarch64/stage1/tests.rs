// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The tables against an independent walker, written from the Arm manual.

use std::sync::Arc;

use super::{MAIR, Stage1};
use crate::{
    config::GuestMap,
    guest::tables::{MemoryType, TableError, Tables},
};
use granule_types::units::{Bytes, GuestAddress};

const BASE: GuestAddress = GuestAddress(0x10_0000);

fn tables(page_shift: u8, va_bits: u8) -> Tables {
    Tables::new(
        BASE,
        Arc::new(Stage1 {
            page_shift,
            va_bits,
        }),
    )
}

/// Returns the output address, the attributes and the size of the leaf that a walk reaches.
fn walk(tables: &Tables, shift: u32, bits: u32, address: u64) -> Option<(u64, u64, u64)> {
    let mut physical = BASE.0;
    let mut low = shift;
    while low + (shift - 3) < bits {
        low += shift - 3;
    }
    loop {
        let index = (address >> low) % (1 << (shift - 3));
        let word = usize::try_from((physical - BASE.0) / 8 + index).unwrap();
        let entry = tables.words()[word];
        let mut output = entry & 0x0000_ffff_ffff_0000;
        match shift {
            12 => output |= entry & 0xf000,
            14 => output |= entry & 0xc000,
            _ => output |= ((entry >> 12) & 0xf) << 48,
        }
        match (entry & 3, low == shift) {
            (3, true) | (1, false) => {
                let span = 1 << low;
                let attributes = entry & 0xfff0_0000_0000_0ffc;
                return Some((output | (address & (span - 1)), attributes, span));
            }
            (3, false) => {
                physical = output;
                low -= shift - 3;
            }
            _ => return None,
        }
    }
}

fn widths() -> impl Iterator<Item = (u8, u8)> {
    [(12, 48), (14, 48), (14, 47), (16, 48)].into_iter()
}

#[test]
fn every_granule_of_the_range_is_mapped_and_none_outside() {
    for (shift, bits) in widths() {
        let granule = 1u64 << shift;
        let start = (1 << bits) - 40 * granule;
        let physical = 0x40_0000_0000 - 40 * granule;
        let mut tables = tables(shift, bits);

        tables
            .map(
                start,
                GuestAddress(physical),
                Bytes(39 * granule),
                MemoryType::Normal,
            )
            .unwrap();

        let (s, b) = (u32::from(shift), u32::from(bits));
        for offset in (0..39 * granule).step_by(1 << shift) {
            let (output, ..) = walk(&tables, s, b, start + offset + 8).unwrap();
            assert_eq!(output, physical + offset + 8);
        }
        assert_eq!(walk(&tables, s, b, start - 8), None);
        assert_eq!(walk(&tables, s, b, start + 39 * granule), None);
    }
}

#[test]
fn mapping_by_pages_uses_the_last_level_only() {
    for shift in [12, 14, 16] {
        let mut tables = tables(shift, 48);
        tables.map_by(GuestMap::Pages);
        let size = Bytes(1 << (shift + 10));

        tables
            .map(
                0x4000_0000,
                GuestAddress(0x4000_0000),
                size,
                MemoryType::Normal,
            )
            .unwrap();

        let (output, _, span) = walk(&tables, u32::from(shift), 48, 0x4000_2348).unwrap();
        assert_eq!((output, span), (0x4000_2348, 1 << shift));
    }
}

#[test]
fn aligned_ranges_are_mapped_by_blocks() {
    for (shift, block) in [
        (12, 1 << 30),
        (12, 2 << 20),
        (14, 32 << 20),
        (16, 512 << 20),
    ] {
        let mut tables = tables(shift, 48);

        tables
            .map(block, GuestAddress(block), Bytes(block), MemoryType::Normal)
            .unwrap();

        let (output, _, span) = walk(&tables, u32::from(shift), 48, block + 0x12_3458).unwrap();
        assert_eq!((output, span), (block + 0x12_3458, block));
    }
}

#[test]
fn an_unaligned_range_uses_pages_at_its_ends_and_blocks_between() {
    let mut tables = tables(12, 48);
    let start = (2 << 20) - 0x1000;

    tables
        .map(
            start,
            GuestAddress(start),
            Bytes((2 << 20) + 0x2000),
            MemoryType::Normal,
        )
        .unwrap();

    let span = |address| walk(&tables, 12, 48, address).unwrap().2;
    assert_eq!(span(start), 0x1000);
    assert_eq!(span(2 << 20), 2 << 20);
    assert_eq!(span(4 << 20), 0x1000);
}

#[test]
fn attributes_differ_between_normal_and_device_memory() {
    let mut tables = tables(12, 48);
    tables
        .map(0, GuestAddress(0), Bytes::kib(4), MemoryType::Device)
        .unwrap();
    tables
        .map(
            0x1000,
            GuestAddress(0x1000),
            Bytes::kib(4),
            MemoryType::Normal,
        )
        .unwrap();

    let (_, device, _) = walk(&tables, 12, 48, 0).unwrap();
    let (_, normal, _) = walk(&tables, 12, 48, 0x1000).unwrap();

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
}

#[test]
fn entries_with_64k_granules_hold_52_bit_addresses() {
    let mut tables = tables(16, 48);
    let physical = 0xf_fff0_0000_0000;

    tables
        .map(
            0x10_0000,
            GuestAddress(physical),
            Bytes::kib(64),
            MemoryType::Normal,
        )
        .unwrap();

    assert_eq!(walk(&tables, 16, 48, 0x10_0000).unwrap().0, physical);
}

#[test]
fn unaligned_unreachable_and_mapped_ranges_are_refused() {
    let mut tables = tables(12, 48);
    let normal = MemoryType::Normal;
    tables
        .map(2 << 20, GuestAddress(2 << 20), Bytes::mib(2), normal)
        .unwrap();

    let unaligned = tables.map(0x10, GuestAddress(0), Bytes::kib(4), normal);
    let outside = tables.map(1 << 48, GuestAddress(0), Bytes::kib(4), normal);
    let twice = tables.map((2 << 20) + 0x1000, GuestAddress(0), Bytes::kib(4), normal);

    assert!(matches!(unaligned, Err(TableError::Unaligned { .. })));
    assert!(matches!(outside, Err(TableError::OutOfRange { .. })));
    assert!(matches!(twice, Err(TableError::Mapped { .. })));
}
