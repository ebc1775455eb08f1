// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The engine against a plain map of pages, with the checker on: whatever the sequence of
//! operations, every page translates as it should and those that were not meant stay as they were.
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod support;

use std::sync::Mutex;

use granule_stage2::{
    Access, Features, Ipa, Maintenance, MapError, MapRequest, Memcache, Offline, PhysAddr, Policy,
    Stage2,
    check::{Action, Checker, Recorder, Rule},
    descriptor::{Attributes, Descriptor, MemoryType},
    geometry::{Geometry, Granule, Level},
    grace::Grace,
    operations::{Dsb, Note, Operations},
    pool::words,
};
use proptest::prelude::*;
use support::{Cpu, MEMORY, Pool, TABLES, VMID, setup};

/// What a page translates to: host address and whether it may be read, written and executed.
type Seen = Option<(u64, [bool; 3])>;

#[derive(Debug, Clone, Copy)]
enum Op {
    Map {
        write: bool,
        execute: bool,
        blocks: bool,
    },
    /// In one walk, page by page; or block by block, where there are whole ones.
    MapEach {
        write: bool,
        execute: bool,
        blocks: bool,
    },
    Unmap,
    /// What is left of the permissions.
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

struct Under<'a> {
    table: Stage2,
    ops: Recorder<'a, Cpu<'a>, Checker>,
    memcache: Memcache,
    page: u64,
    pages: u64,
}

impl Under<'_> {
    fn seen(&self) -> Vec<Seen> {
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

    fn apply(&mut self, op: Op, ipa: u64, size: u64) -> Result<(), MapError> {
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
                    ..MapRequest::new(Ipa(ipa), MEMORY + ipa, size, attributes)
                };
                table.map(ops, memcache, &request)
            }
            Op::MapEach {
                write,
                execute,
                blocks,
            } => {
                let block = table.geometry().span(Level::new(2).unwrap());
                let whole = blocks && (ipa | size).is_multiple_of(block);
                let step = if whole { block } else { *page };
                let mut mapper = table.mapper(ops);
                let mut result = Ok(());
                for at in (ipa..ipa + size).step_by(usize::try_from(step).unwrap()) {
                    // Attributes that alternate, so that what is remembered is not always right.
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
            Op::Unmap => table.unmap(ops, Ipa(ipa), size),
            Op::Protect {
                write: false,
                execute: true,
            } => table.write_protect(ops, Ipa(ipa), size),
            Op::Protect { write, execute } => {
                let keep = Attributes {
                    write,
                    execute,
                    ..Attributes::READ
                };
                table.protect(ops, Ipa(ipa), size, keep)
            }
            Op::Relax { write, execute } => table.relax(
                ops,
                Ipa(ipa),
                Attributes {
                    write,
                    execute,
                    ..Attributes::READ
                },
            ),
            Op::Split => table.split(ops, memcache, Ipa(ipa), size),
            Op::Recover => table.recover_blocks(ops, Ipa(ipa), size, u64::MAX),
        }
    }
}

/// Whether a page may have become `after` by an operation that was about it, or not.
fn allowed(
    (op, meant, populate): (Op, bool, bool),
    (page, granule): (u64, u64),
    before: Seen,
    after: Seen,
) -> bool {
    let fewer = |a: [bool; 3], b: [bool; 3]| a.iter().zip(b).all(|(a, b)| !a || b);
    let right = after.is_none_or(|(phys, _)| phys == page);
    // A page of a block that an operation cuts: it may lose what the block loses.
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
            Op::Map { write, execute, .. } if meant => mapped([true, write, execute]),
            Op::MapEach {
                write,
                execute,
                blocks,
            } if meant => mapped([true, write && (blocks || page & granule != 0), execute]),
            Op::Map { .. } | Op::MapEach { .. } if populate => before == after,
            Op::Map { .. } | Op::MapEach { .. } => before == after || after.is_none(),
            Op::Unmap if meant => after.is_none(),
            Op::Protect { write, execute } if meant => {
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

fn run(policy: Policy, granule: Granule, features: Features, ops: &[(Op, u16, u16)]) {
    let geometry = Geometry::new(granule, 40).unwrap();
    let per_table = usize::try_from(granule.entries()).unwrap();
    let pool = Pool::new(TABLES, &geometry, words(64 * per_table), words(128)).unwrap();
    let grace = Grace::new(1);
    let checker = Mutex::new(Checker::new(setup(geometry, features, &pool, 1)));
    let cpu = Cpu::new(&pool, &grace, 0);
    let page = granule.size();
    let mut under = Under {
        table: Stage2::new(geometry, features, policy, VMID, pool.root()),
        ops: Recorder::new(cpu, 0, &checker),
        memcache: Memcache::new(),
        page,
        pages: 2 * granule.entries(),
    };
    let block = geometry.span(Level::new(2).unwrap());
    let give = Action::Give {
        ipa: Ipa(0),
        phys: MEMORY,
        size: 2 * block,
        device: false,
    };
    under.ops.tell(give);
    let mut before = under.seen();
    for &(op, at, length) in ops {
        let first = u64::from(at) % under.pages;
        let count = (1 + u64::from(length)).min(under.pages - first);
        // Now and then a whole block, or both.
        let (first, count) = match length % 8 {
            0 => (0, under.pages),
            4 => (
                first / granule.entries() * granule.entries(),
                granule.entries(),
            ),
            _ => (first, count),
        };
        under.memcache.top_up(&under.ops, 8, 12);
        under.ops.note(Note::Lock { exclusive: true });
        if policy.maintenance == Maintenance::FaultPath {
            if !features.fwb {
                under.ops.clean_invalidate(MEMORY, 2 * block);
                under.ops.dsb(Dsb::Ish);
            }
            under.ops.invalidate_instructions(None);
            under.ops.dsb(Dsb::Ish);
        }
        let done = under.apply(op, first * page, count * page);
        under.ops.note(Note::Unlock);
        assert!(
            matches!(done, Ok(()) | Err(MapError::Again)),
            "{op:?}: {done:?}"
        );
        let after = under.seen();
        for (index, (old, new)) in (0..).zip(before.iter().zip(&after)) {
            let meant = (first..first + count).contains(&index);
            assert!(
                allowed(
                    (op, meant, policy.populate_on_split),
                    ((MEMORY + index * page).0, page),
                    *old,
                    *new
                ),
                "{op:?} of {count} pages from {first}: page {index} was {old:?}, is {new:?}"
            );
        }
        before = after;
    }
    under.memcache.drain(&under.ops);
    let checker = checker.lock().unwrap();
    let lazy = Rule::ReturnedUnclean;
    let found = checker
        .violations()
        .iter()
        .find(|v| policy.populate_on_split || v.rule != lazy);
    assert!(found.is_none(), "{}", found.unwrap());
}

/// CPUs that need no maintenance.
const FWB: Features = Features {
    fwb: true,
    dic: true,
    tlb_range: false,
    bbm: 0,
};

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_page_translates_as_it_should(
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

#[test]
fn a_block_goes_into_whichever_of_the_roots_tables_it_belongs_in() {
    // Arrange: 40 bits, two tables of level 1 side by side; 1G blocks in both.
    let geometry = Geometry::new(Granule::K4, 40).unwrap();
    assert_eq!(geometry.root_tables(), 2);
    let pool = Pool::new(TABLES, &geometry, words(8 * 512), words(16)).unwrap();
    let (ops, mut memcache) = (Offline(&pool), Memcache::new());
    let mut table = Stage2::new(geometry, FWB, Policy::GRANULE, VMID, pool.root());
    let blocks = [0, 3 << 30, 512 << 30, 1023 << 30];
    let request = |ipa| {
        MapRequest::new(
            Ipa(ipa),
            PhysAddr(1 << 40 | ipa),
            1 << 30,
            Attributes::READ_WRITE,
        )
    };

    // Act: half of them each in a walk, half in one.
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
fn a_mapper_does_not_take_an_odd_size_for_another_with_other_attributes() {
    let geometry = Geometry::new(Granule::K4, 39).unwrap();
    let pool = Pool::new(TABLES, &geometry, words(8 * 512), words(16)).unwrap();
    let (ops, mut memcache) = (Offline(&pool), Memcache::new());
    let mut table = Stage2::new(geometry, FWB, Policy::GRANULE, VMID, pool.root());
    memcache.top_up(&ops, 2, 4);
    let request = |ipa, size| MapRequest::new(ipa, MEMORY + ipa.0, size, Attributes::READ_WRITE);

    let mut mapper = table.mapper(&ops);
    mapper.map(&mut memcache, &request(Ipa(0), 4096)).unwrap();

    for size in [0x1040, 0x1001, 0x800, 1] {
        let wrong = mapper.map(&mut memcache, &request(Ipa(0x5000), size));
        assert!(
            matches!(wrong, Err(MapError::Unaligned { .. })),
            "{size:#x}"
        );
    }
    let shifted = mapper.map(&mut memcache, &request(Ipa(0x5800), 4096));
    assert!(matches!(shifted, Err(MapError::Unaligned { .. })));
    mapper
        .map(&mut memcache, &request(Ipa(0x5000), 0x3000))
        .unwrap();
    drop(mapper);
    assert_eq!(
        table.look_up(&ops, Ipa(0x7000)).0.address(),
        MEMORY + 0x7000
    );
}

#[test]
fn a_mapper_gives_every_leaf_its_own_attributes() {
    let geometry = Geometry::new(Granule::K4, 39).unwrap();
    let pool = Pool::new(TABLES, &geometry, words(8 * 512), words(16)).unwrap();
    let (ops, mut memcache) = (Offline(&pool), Memcache::new());
    let mut table = Stage2::new(geometry, FWB, Policy::GRANULE, VMID, pool.root());
    memcache.top_up(&ops, 4, 8);
    let types = [
        MemoryType::Normal,
        MemoryType::NonCacheable,
        MemoryType::Device,
    ];
    // From one to the next a single bit changes, and then the memory type.
    let all = types.into_iter().flat_map(|memory| {
        (0..256_u16).map(move |n| {
            let bits = n ^ (n >> 1);
            Attributes {
                memory,
                read: bits & 1 != 0,
                write: bits & 2 != 0,
                execute: bits & 4 != 0,
                accessed: bits & 8 != 0,
                // The engine alone knows what is a run.
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
fn every_shape_is_walked_alike() {
    let shapes = [Granule::K4, Granule::K16, Granule::K64]
        .into_iter()
        .flat_map(|granule| [32, 36, 39, 40, 43, 48].map(|bits| (granule, bits)));
    for (granule, bits) in shapes {
        // Arrange
        let geometry = Geometry::new(granule, bits).unwrap();
        let tables = usize::try_from(geometry.root_tables()).unwrap() + 8;
        let entries = usize::try_from(granule.entries()).unwrap();
        let pool = Pool::new(
            TABLES,
            &geometry,
            words(tables * entries),
            words(2 * tables),
        );
        let pool = pool.unwrap();
        let (ops, mut memcache) = (Offline(&pool), Memcache::new());
        let mut table = Stage2::new(
            geometry,
            Features::default(),
            Policy::GRANULE,
            VMID,
            pool.root(),
        );
        memcache.top_up(&ops, 8, 8);
        let block = geometry.span(Level::new(2).unwrap());
        let at = geometry.size() - 2 * block;
        let request =
            |ipa: u64, size| MapRequest::new(Ipa(ipa), PhysAddr(ipa), size, Attributes::READ_WRITE);

        // Act: the last block but one, two pages behind it, one of them in a walk for many.
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
        // With 64K and 32 bits there are pages alone.
        let highest = geometry.start().max(Level::new(2).unwrap());
        assert_eq!(table.look_up(&ops, Ipa(at)).1, highest);
        assert_eq!(table.look_up(&ops, Ipa(one)).1, Level::PAGE);
    }
}
