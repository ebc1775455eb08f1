// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The mapper beside single maps: concatenated roots, sizes, attributes, every granule and IPA
//! width.
#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use granule_stage2::{
    Access, Ipa, MapError, MapRequest, NoMaintenance, PhysAddr,
    descriptor::{Attributes, Descriptor, MemoryType},
    epoch::EpochReclaim,
    geometry::{Geometry, Granule, Level},
};
use support::{BLOCK, MEMORY, PAGE, cpu, fixture};

#[test]
fn a_block_is_mapped_in_the_right_one_of_concatenated_root_tables() {
    // Arrange: 40 bits, two concatenated tables of level 1; 1G blocks in both.
    let (pool, mut table, mut memcache) = fixture(Granule::K4, 40, 8);
    let ops = NoMaintenance(&pool);
    assert_eq!(table.geometry().root_tables(), 2);
    let blocks = [0, 3 << 30, 512 << 30, 1023 << 30];
    let request =
        |ipa| MapRequest::new(Ipa(ipa), PhysAddr(1 << 40 | ipa), 1 << 30, Attributes::READ_WRITE);

    // Act: half of them by single maps, half by one mapper.
    for ipa in [blocks[0], blocks[2]] {
        table.map(&ops, &mut memcache, &request(ipa)).unwrap();
    }
    let mut mapper = table.mapper(&ops);
    for ipa in [blocks[1], blocks[3]] {
        mapper.map(&mut memcache, &request(ipa)).unwrap();
    }
    drop(mapper);

    // Assert
    for ipa in (0..1024).map(|n| n << 30) {
        let seen = table.translate(&ops, Ipa(ipa + 0x123), Access::Write);
        let phys = blocks.contains(&ipa).then_some(1 << 40 | (ipa + 0x123));
        assert_eq!(seen.ok().map(|seen| seen.phys.0), phys, "{ipa:#x}");
    }
}

#[test]
fn a_mapper_refuses_unaligned_sizes_after_a_page() {
    let (pool, mut table, mut memcache) = fixture(Granule::K4, 39, 8);
    let ops = NoMaintenance(&pool);
    let request = |ipa, size| MapRequest::new(Ipa(ipa), MEMORY + ipa, size, Attributes::READ_WRITE);

    let mut mapper = table.mapper(&ops);
    mapper.map(&mut memcache, &request(0, 4096)).unwrap();

    for size in [0x1040, 0x1001, 0x800, 1] {
        let wrong = mapper.map(&mut memcache, &request(0x5000, size));
        assert!(matches!(wrong, Err(MapError::Unaligned { .. })), "{size:#x}");
    }
    let shifted = mapper.map(&mut memcache, &request(0x5800, 4096));
    assert!(matches!(shifted, Err(MapError::Unaligned { .. })));
    mapper.map(&mut memcache, &request(0x5000, 0x3000)).unwrap();
    drop(mapper);
    assert_eq!(table.look_up(&ops, Ipa(0x7000)).0.address(), MEMORY + 0x7000);
}

#[test]
fn a_mapper_applies_the_attributes_of_each_request() {
    let (pool, mut table, mut memcache) = fixture(Granule::K4, 39, 8);
    let ops = NoMaintenance(&pool);
    let types = [MemoryType::Normal, MemoryType::NonCacheable, MemoryType::Device];
    // Gray code: one attribute changes from page to page, and the memory type after 256.
    let all = types.into_iter().flat_map(|memory| {
        (0..256_u16).map(move |n| {
            let bits = n ^ (n >> 1);
            Attributes {
                memory,
                read: bits & 1 != 0,
                write: bits & 2 != 0,
                execute: bits & 4 != 0,
                accessed: bits & 8 != 0,
                // The engine ignores it: it alone decides what a run is.
                contiguous: bits & 16 != 0,
                software: u8::try_from(bits >> 5).unwrap(),
            }
        })
    });
    let requests: Vec<_> = (0..)
        .map(|n| n * 4096)
        .zip(all)
        .map(|(ipa, attributes)| MapRequest::new(Ipa(ipa), MEMORY + ipa, 4096, attributes))
        .collect();

    let mut mapper = table.mapper(&ops);
    for request in &requests {
        mapper.map(&mut memcache, request).unwrap();
    }
    drop(mapper);

    for request in requests {
        let attributes = Attributes { contiguous: false, ..request.attributes };
        let leaf = Descriptor::leaf(request.phys, Level::PAGE, attributes, true);
        assert_eq!(table.look_up(&ops, request.ipa), (leaf, Level::PAGE));
    }
}

#[test]
fn every_granule_and_ipa_width_is_walked_alike() {
    let shapes = [Granule::K4, Granule::K16, Granule::K64]
        .into_iter()
        .flat_map(|granule| [32, 36, 39, 40, 43, 48].map(|bits| (granule, bits)));
    for (granule, bits) in shapes {
        // Arrange
        let geometry = Geometry::new(granule, bits).unwrap();
        let tables = usize::try_from(geometry.root_tables()).unwrap() + 8;
        let (pool, mut table, mut memcache) = fixture(granule, bits, tables);
        let ops = NoMaintenance(&pool);
        let block = geometry.span(Level::new(2).unwrap());
        let at = geometry.size() - 2 * block;
        let request =
            |ipa, size| MapRequest::new(Ipa(ipa), PhysAddr(ipa), size, Attributes::READ_WRITE);

        // Act: the last block but one, then two pages, one of them by a mapper.
        let (one, other) = (at + block, at + block + granule.size());
        table.map(&ops, &mut memcache, &request(at, block)).unwrap();
        table.map(&ops, &mut memcache, &request(one, granule.size())).unwrap();
        table.mapper(&ops).map(&mut memcache, &request(other, granule.size())).unwrap();

        // Assert
        let seen = |ipa| table.translate(&ops, Ipa(ipa), Access::Write).ok();
        for ipa in [at, at + block - 1, one, other + 5] {
            assert_eq!(seen(ipa).map(|s| s.phys.0), Some(ipa), "{granule:?} {bits}");
        }
        let ends = [at.wrapping_sub(1), other + granule.size(), geometry.size()];
        assert!(ends.into_iter().all(|ipa| seen(ipa).is_none()));
        // 64K pages and 32 bits allow no block.
        let highest = geometry.start().max(Level::new(2).unwrap());
        assert_eq!(table.look_up(&ops, Ipa(at)).1, highest);
        assert_eq!(table.look_up(&ops, Ipa(one)).1, Level::PAGE);
    }
}

#[test]
fn a_replaced_table_is_not_freed_during_a_mappers_walk() {
    let (pool, table, mut memcache) = fixture(Granule::K4, 39, 32);
    let reclaim = EpochReclaim::new(1);
    let ops = cpu(&pool, &reclaim, 0);
    let request = |ipa, size| MapRequest::new(Ipa(ipa), MEMORY + ipa, size, Attributes::READ_WRITE);

    let mut mapper = table.mapper_shared(&ops);
    mapper.map(&mut memcache, &request(0, PAGE)).unwrap();
    // The same CPU maps a block there in a walk of its own.
    let block = table.map_shared(&ops, &mut memcache, &request(0, BLOCK));
    let early = reclaim.take();
    mapper.map(&mut memcache, &request(PAGE, PAGE)).unwrap();
    drop(mapper);

    assert_eq!((block, early), (Ok(()), None));
    assert!(reclaim.take().is_some());
}

#[test]
fn addresses_beyond_48_bits_are_refused() {
    let (pool, mut table, mut memcache) = fixture(Granule::K4, 39, 8);
    let ops = NoMaintenance(&pool);
    let request = |ipa, phys| MapRequest::new(ipa, phys, 4096, Attributes::READ_WRITE);
    table.map(&ops, &mut memcache, &request(Ipa(0), MEMORY)).unwrap();

    for (page, bit) in (48..64).map(|bit| (bit * 4096, 1 << bit)) {
        let far = request(Ipa(0x5000 | bit), MEMORY);
        let high = request(Ipa(0x5000), PhysAddr(MEMORY.0 | bit));
        let alone = [far, high].map(|r| table.map(&ops, &mut memcache, &r));
        let mut mapper = table.mapper(&ops);
        // The mapper remembers the table that the refused addresses would truncate to.
        mapper.map(&mut memcache, &request(Ipa(page), MEMORY + page)).unwrap();
        let in_one_walk = [far, high].map(|r| mapper.map(&mut memcache, &r));

        for [far, high] in [alone, in_one_walk] {
            assert!(matches!(far, Err(MapError::OutOfRange { .. })), "{far:?}");
            assert!(matches!(high, Err(MapError::TooHigh { .. })), "{high:?}");
        }
    }
    assert_eq!(table.look_up(&ops, Ipa(0x5000)).0, Descriptor::EMPTY);
}
