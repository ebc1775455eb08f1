// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The engine against a map of pages, with the checker on: after any sequence of operations every
//! page translates as expected, and pages outside an operation's range keep their translation.
#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::sync::Mutex;

use granule_stage2::{
    Access, CmoPlacement, Features, Ipa, MapError, MapRequest, Memcache, NoMaintenance, PhysAddr,
    Policy, Stage2,
    check::{Action, Checker, Recorder, Rule},
    descriptor::{Attributes, Descriptor, MemoryType},
    epoch::EpochReclaim,
    geometry::{Geometry, Granule, Level},
    operations::{Dsb, Note, Operations},
};
use proptest::prelude::*;
use support::{ALL_FEATURES, Cpu, MEMORY, Pool, cpu, pool, setup, stage2};

/// The translation of a page: host address, and whether it is readable, writable, executable.
type Translation = Option<(u64, [bool; 3])>;

#[derive(Debug, Clone, Copy)]
enum Op {
    Map {
        write: bool,
        execute: bool,
        blocks: bool,
    },
    /// With one mapper, page by page, or block by block if the range consists of blocks.
    MapEach {
        write: bool,
        execute: bool,
        blocks: bool,
    },
    Unmap,
    /// Keeps these permissions.
    Protect {
        write: bool,
        execute: bool,
    },
    Relax {
        write: bool,
        execute: bool,
    },
    Split,
    Recover,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => any::<[bool; 3]>().prop_map(|[write, execute, blocks]| Op::Map { write, execute, blocks }),
        2 => any::<[bool; 3]>().prop_map(|[write, execute, blocks]| Op::MapEach { write, execute, blocks }),
        1 => Just(Op::Unmap),
        1 => any::<[bool; 2]>().prop_map(|[write, execute]| Op::Protect { write, execute }),
        2 => any::<[bool; 2]>().prop_map(|[write, execute]| Op::Relax { write, execute }),
        1 => Just(Op::Split),
        1 => Just(Op::Recover),
    ]
}

struct TestTable<'a> {
    table: Stage2,
    ops: Recorder<'a, Cpu<'a>, Checker>,
    memcache: Memcache,
    page: u64,
    pages: u64,
}

impl TestTable<'_> {
    fn translations(&self) -> Vec<Translation> {
        (0..self.pages)
            .map(|page| {
                let see = |access| {
                    self.table
                        .translate(&self.ops, Ipa(page * self.page), access)
                        .ok()
                };
                let read = see(Access::Read)?;
                let may = [Access::Read, Access::Write, Access::Fetch].map(|a| see(a).is_some());
                Some((read.phys.0, may))
            })
            .collect()
    }

    /// Applies an operation under the lock, after the maintenance of the fault path if the policy
    /// has it there.
    fn step(&mut self, op: Op, ipa: Ipa, size: u64) {
        self.memcache.top_up(&self.ops, 8, 12);
        self.ops.note(Note::Lock { exclusive: true });
        if self.table.policy().cmo == CmoPlacement::FaultPath {
            if !self.table.features().fwb {
                self.ops.clean_invalidate(MEMORY, self.pages * self.page);
                self.ops.dsb(Dsb::Ish);
            }
            self.ops.invalidate_instructions(None);
            self.ops.dsb(Dsb::Ish);
        }
        let done = self.apply(op, ipa, size);
        self.ops.note(Note::Unlock);
        let valid = matches!(done, Ok(()) | Err(MapError::Again));
        assert!(valid, "{op:?}: {done:?}");
    }

    fn apply(&mut self, op: Op, ipa: Ipa, size: u64) -> Result<(), MapError> {
        let Self {
            table,
            ops,
            memcache,
            page,
            ..
        } = self;
        match op {
            Op::Map {
                write,
                execute,
                blocks,
            } => {
                let attributes = Attributes {
                    write,
                    execute,
                    ..Attributes::READ
                };
                let largest = if blocks { u64::MAX } else { *page };
                let request = MapRequest {
                    largest,
                    ..MapRequest::new(ipa, MEMORY + ipa.0, size, attributes)
                };
                table.map(ops, memcache, &request)
            }
            Op::MapEach {
                write,
                execute,
                blocks,
            } => {
                let block = table.geometry().span(Level::new(2).unwrap());
                let whole = blocks && (ipa.0 | size).is_multiple_of(block);
                let step = if whole { block } else { *page };
                let mut mapper = table.mapper(ops);
                let mut result = Ok(());
                for at in (ipa.0..ipa.0 + size).step_by(usize::try_from(step).unwrap()) {
                    // Attributes alternate, so the remembered leaf does not always fit.
                    let attributes = Attributes {
                        write: write && (blocks || at & *page != 0),
                        execute,
                        ..Attributes::READ
                    };
                    let request = MapRequest::new(Ipa(at), MEMORY + at, step, attributes);
                    result = match mapper.map(memcache, &request) {
                        Ok(()) => result,
                        Err(MapError::Again) => Err(MapError::Again),
                        error => return error,
                    };
                }
                result
            }
            Op::Unmap => table.unmap(ops, ipa, size),
            Op::Protect {
                write: false,
                execute: true,
            } => table.write_protect(ops, ipa, size),
            Op::Protect { write, execute } => {
                let keep = Attributes {
                    write,
                    execute,
                    ..Attributes::READ
                };
                table.protect(ops, ipa, size, keep)
            }
            Op::Relax { write, execute } => table.relax(
                ops,
                ipa,
                Attributes {
                    write,
                    execute,
                    ..Attributes::READ
                },
            ),
            Op::Split => table.split(ops, memcache, ipa, size),
            Op::Recover => table.recover_blocks(ops, ipa, size, u64::MAX),
        }
    }
}

/// Returns whether an operation, with the page in its range or not, may change a page's translation
/// from `before` to `after`.
fn allowed(
    (op, in_range, populate): (Op, bool, bool),
    (page, granule): (u64, u64),
    before: Translation,
    after: Translation,
) -> bool {
    let fewer = |a: [bool; 3], b: [bool; 3]| a.iter().zip(b).all(|(a, b)| !a || b);
    let right = after.is_none_or(|(phys, _)| phys == page);
    // A page of a block that the operation splits may lose what the block loses.
    let lost = match (before, after) {
        (Some((_, old)), Some((_, new))) => fewer(new, old),
        (_, None) => true,
        (None, Some(_)) => false,
    };
    let mapped = |asked: [bool; 3]| {
        let had = before.map_or([false; 3], |(_, old)| old);
        let either = [0, 1, 2].map(|at| asked[at] || had[at]);
        after.is_some_and(|(_, new)| fewer(new, either) && (fewer(asked, new) || before.is_some()))
    };
    right
        && match op {
            Op::Map { write, execute, .. } if in_range => mapped([true, write, execute]),
            Op::MapEach {
                write,
                execute,
                blocks,
            } if in_range => mapped([true, write && (blocks || page & granule != 0), execute]),
            Op::Map { .. } | Op::MapEach { .. } if populate => before == after,
            Op::Map { .. } | Op::MapEach { .. } => before == after || after.is_none(),
            Op::Unmap if in_range => after.is_none(),
            Op::Protect { write, execute } if in_range => {
                let may = [true, write, execute];
                lost && after.is_none() == before.is_none()
                    && after.is_none_or(|(_, has)| fewer(has, may))
            }
            Op::Unmap | Op::Protect { .. } | Op::Recover => lost,
            Op::Relax { .. } => {
                before.is_none() == after.is_none()
                    && before.is_none_or(|(_, old)| fewer(old, after.unwrap().1))
            }
            Op::Split => before == after,
        }
}

/// Applies operations to an empty table and compares all translations after each.
fn run(policy: Policy, granule: Granule, features: Features, ops: &[(Op, u16, u16)]) {
    let geometry = Geometry::new(granule, 40).unwrap();
    let pool = pool(&geometry, 64);
    let reclaim = EpochReclaim::new(1);
    let checker = Mutex::new(Checker::new(setup(geometry, features, &pool, 1)));
    let page = granule.size();
    let mut tested = TestTable {
        table: stage2(geometry, features, policy, &pool),
        ops: Recorder::new(cpu(&pool, &reclaim, 0), 0, &checker),
        memcache: Memcache::new(),
        page,
        pages: 2 * granule.entries(),
    };
    tested.ops.record(Action::AddMemory {
        ipa: Ipa(0),
        phys: MEMORY,
        size: tested.pages * page,
        device: false,
    });
    let mut before = tested.translations();
    for &(op, at, length) in ops {
        let (first, count) = range(granule, at, length);
        tested.step(op, Ipa(first * page), count * page);
        let after = tested.translations();
        for (index, (old, new)) in (0..).zip(before.iter().zip(&after)) {
            let in_range = (first..first + count).contains(&index);
            let op_and_range = (op, in_range, policy.populate_on_split);
            assert!(
                allowed(op_and_range, ((MEMORY + index * page).0, page), *old, *new),
                "{op:?} of {count} pages from {first}: page {index} was {old:?}, is {new:?}"
            );
        }
        before = after;
    }
    tested.memcache.drain(&tested.ops);
    let checker = checker.lock().unwrap();
    let lazy = Rule::ReturnedUnclean;
    let found = checker
        .violations()
        .iter()
        .find(|v| policy.populate_on_split || v.rule != lazy);
    assert!(found.is_none(), "{}", found.unwrap());
}

/// Returns the first page and the number of pages of an operation: one in four is a whole block or
/// both blocks.
fn range(granule: Granule, at: u16, length: u16) -> (u64, u64) {
    let per_block = granule.entries();
    let pages = 2 * per_block;
    let first = u64::from(at) % pages;
    match length % 8 {
        0 => (0, pages),
        4 => (first / per_block * per_block, per_block),
        _ => (first, (1 + u64::from(length)).min(pages - first)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_page_translates_as_expected(
        ops in prop::collection::vec((op(), any::<u16>(), 0u16..700), 1..24),
        bbm in 0u8..4,
        tlb_range: bool,
        fwb: bool,
    ) {
        let features = Features { bbm, tlb_range, fwb, dic: fwb };
        for (_, policy) in Policy::PRESETS {
            run(policy, Granule::K4, features, &ops);
        }
        run(Policy::GRANULE, Granule::K16, features, &ops);
        run(Policy::GRANULE, Granule::K64, features, &ops);
    }
}

/// Returns an empty table and its pool.
fn fixture(granule: Granule, ipa_bits: u32, tables: usize) -> (Pool, Stage2) {
    let geometry = Geometry::new(granule, ipa_bits).unwrap();
    let pool = pool(&geometry, tables);
    let table = stage2(geometry, ALL_FEATURES, Policy::GRANULE, &pool);
    (pool, table)
}

#[test]
fn a_block_is_mapped_in_the_right_one_of_concatenated_root_tables() {
    // Arrange: 40 bits, two concatenated tables of level 1; 1G blocks in both.
    let (pool, mut table) = fixture(Granule::K4, 40, 8);
    let (ops, mut memcache) = (NoMaintenance(&pool), Memcache::new());
    assert_eq!(table.geometry().root_tables(), 2);
    let blocks = [0, 3 << 30, 512 << 30, 1023 << 30];
    let request = |ipa| {
        MapRequest::new(
            Ipa(ipa),
            PhysAddr(1 << 40 | ipa),
            1 << 30,
            Attributes::READ_WRITE,
        )
    };

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
    let (pool, mut table) = fixture(Granule::K4, 39, 8);
    let (ops, mut memcache) = (NoMaintenance(&pool), Memcache::new());
    memcache.top_up(&ops, 2, 4);
    let request = |ipa, size| MapRequest::new(Ipa(ipa), MEMORY + ipa, size, Attributes::READ_WRITE);

    let mut mapper = table.mapper(&ops);
    mapper.map(&mut memcache, &request(0, 4096)).unwrap();

    for size in [0x1040, 0x1001, 0x800, 1] {
        let wrong = mapper.map(&mut memcache, &request(0x5000, size));
        assert!(
            matches!(wrong, Err(MapError::Unaligned { .. })),
            "{size:#x}"
        );
    }
    let shifted = mapper.map(&mut memcache, &request(0x5800, 4096));
    assert!(matches!(shifted, Err(MapError::Unaligned { .. })));
    mapper.map(&mut memcache, &request(0x5000, 0x3000)).unwrap();
    drop(mapper);
    assert_eq!(
        table.look_up(&ops, Ipa(0x7000)).0.address(),
        MEMORY + 0x7000
    );
}

#[test]
fn a_mapper_applies_the_attributes_of_each_request() {
    let (pool, mut table) = fixture(Granule::K4, 39, 8);
    let (ops, mut memcache) = (NoMaintenance(&pool), Memcache::new());
    memcache.top_up(&ops, 4, 8);
    let types = [
        MemoryType::Normal,
        MemoryType::NonCacheable,
        MemoryType::Device,
    ];
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
        let attributes = Attributes {
            contiguous: false,
            ..request.attributes
        };
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
        let (pool, mut table) = fixture(granule, bits, tables);
        let (ops, mut memcache) = (NoMaintenance(&pool), Memcache::new());
        memcache.top_up(&ops, 8, 8);
        let block = geometry.span(Level::new(2).unwrap());
        let at = geometry.size() - 2 * block;
        let request =
            |ipa, size| MapRequest::new(Ipa(ipa), PhysAddr(ipa), size, Attributes::READ_WRITE);

        // Act: the last block but one, then two pages, one of them by a mapper.
        let (one, other) = (at + block, at + block + granule.size());
        table.map(&ops, &mut memcache, &request(at, block)).unwrap();
        table
            .map(&ops, &mut memcache, &request(one, granule.size()))
            .unwrap();
        table
            .mapper(&ops)
            .map(&mut memcache, &request(other, granule.size()))
            .unwrap();

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
