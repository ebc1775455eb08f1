// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Compares the engine with a reference map of pages, under the checker. After any sequence of
//! operations, every page translates as expected and pages outside the range are unchanged.
#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::sync::Mutex;

use granule_stage2::{
    Access, BbmLevel, CmoPlacement, Features, Ipa, MapError, MapRequest, Memcache, PhysAddr,
    Policy, Stage2,
    check::{Action, Checker, Recorder, Rule},
    descriptor::Attributes,
    epoch::EpochReclaim,
    geometry::{Geometry, Granule, Level},
    operations::{Dsb, Note, Operations},
};
use proptest::prelude::*;
use support::{MEMORY, PoolOps, pool, pool_ops, setup, stage2};

/// Read, write and execute permission.
type Permissions = [bool; 3];

type Translation = Option<(PhysAddr, Permissions)>;

#[derive(Debug, Clone, Copy)]
enum TableOp {
    Map {
        attributes: Attributes,
        has_blocks: bool,
    },
    /// Maps page by page with one mapper, or block by block if the range consists of whole blocks.
    MapEach {
        attributes: Attributes,
        has_blocks: bool,
    },
    Unmap,
    /// Restricts the permissions to those of the attributes.
    Protect(Attributes),
    Relax(Attributes),
    Split,
    Recover,
}

fn any_attributes() -> impl Strategy<Value = Attributes> {
    any::<[bool; 2]>().prop_map(|[write, execute]| Attributes {
        write,
        execute,
        ..Attributes::READ
    })
}

fn any_op() -> impl Strategy<Value = TableOp> {
    let map = || (any_attributes(), any::<bool>());
    prop_oneof![
        4 => map().prop_map(|(attributes, has_blocks)| TableOp::Map { attributes, has_blocks }),
        2 => map().prop_map(|(attributes, has_blocks)| TableOp::MapEach { attributes, has_blocks }),
        1 => Just(TableOp::Unmap),
        1 => any_attributes().prop_map(TableOp::Protect),
        2 => any_attributes().prop_map(TableOp::Relax),
        1 => Just(TableOp::Split),
        1 => Just(TableOp::Recover),
    ]
}

/// Returns the attributes of a page that [`TableOp::MapEach`] maps. Write permission alternates, so
/// that the mapper's cached leaf does not always match.
fn attributes_of_page(attributes: Attributes, has_blocks: bool, at: u64, page: u64) -> Attributes {
    Attributes { write: attributes.write && (has_blocks || at & page != 0), ..attributes }
}

struct TestTable<'a> {
    table: Stage2,
    ops: Recorder<'a, PoolOps<'a>, Checker>,
    memcache: Memcache,
    page_size: u64,
    page_count: u64,
}

impl TestTable<'_> {
    fn translations(&self) -> Vec<Translation> {
        (0..self.page_count)
            .map(|page| {
                let ipa = Ipa(page * self.page_size);
                let translate = |access| self.table.walker().translate(&self.ops, ipa, access).ok();
                let read = translate(Access::Read)?;
                let accesses = [Access::Read, Access::Write, Access::Fetch];
                Some((read.phys, accesses.map(|a| translate(a).is_some())))
            })
            .collect()
    }

    /// Applies an operation under the lock, after the CMOs of the fault path if the policy does
    /// them there.
    fn step(&mut self, op: TableOp, ipa: Ipa, size: u64) {
        self.memcache.top_up(&self.ops, 8, 12);
        self.ops.note(Note::Lock { is_exclusive: true });
        if self.table.policy().cmo_placement == CmoPlacement::FaultPath {
            if !self.table.features().fwb {
                self.ops.clean_invalidate(MEMORY, self.page_count * self.page_size);
                self.ops.dsb(Dsb::Ish);
            }
            self.ops.invalidate_icache(None);
            self.ops.dsb(Dsb::Ish);
        }
        let done = self.apply(op, ipa, size);
        self.ops.note(Note::Unlock);
        let valid = matches!(done, Ok(()) | Err(MapError::Again));
        assert!(valid, "{op:?}: {done:?}");
    }

    fn apply(&mut self, op: TableOp, ipa: Ipa, size: u64) -> Result<(), MapError> {
        let (table, ops, memcache) = (&mut self.table, &self.ops, &mut self.memcache);
        match op {
            TableOp::Map { attributes, has_blocks } => {
                let request = MapRequest {
                    max_leaf_size: if has_blocks { u64::MAX } else { self.page_size },
                    ..MapRequest::new(ipa, MEMORY + ipa.0, size, attributes)
                };
                table.map(ops, memcache, &request)
            }
            TableOp::MapEach { attributes, has_blocks } => {
                self.map_each(attributes, has_blocks, ipa.0, size)
            }
            TableOp::Unmap => table.unmap(ops, ipa, size),
            TableOp::Protect(keep) if !keep.write && keep.execute => {
                table.write_protect(ops, ipa, size)
            }
            TableOp::Protect(keep) => table.protect(ops, ipa, size, keep),
            TableOp::Relax(attributes) => {
                let (_, level) = table.look_up(ops, ipa);
                table.relax(ops, ipa, level, attributes)
            }
            TableOp::Split => table.split(ops, memcache, ipa, size),
            TableOp::Recover => table.recover_blocks(ops, ipa, size, Level::new(0).unwrap()),
        }
    }

    fn map_each(
        &mut self,
        attributes: Attributes,
        has_blocks: bool,
        ipa: u64,
        size: u64,
    ) -> Result<(), MapError> {
        let block = self.table.geometry().span(Level::new(2).unwrap());
        let whole = has_blocks && (ipa | size).is_multiple_of(block);
        let step = if whole { block } else { self.page_size };
        let mut mapper = self.table.mapper(&self.ops);
        let mut result = Ok(());
        for at in (ipa..ipa + size).step_by(usize::try_from(step).unwrap()) {
            let attributes = attributes_of_page(attributes, has_blocks, at, self.page_size);
            let request = MapRequest::new(Ipa(at), MEMORY + at, step, attributes);
            match mapper.map(&mut self.memcache, &request) {
                Ok(()) => {}
                Err(MapError::Again) => result = Err(MapError::Again),
                error => return error,
            }
        }
        result
    }
}

/// The effect of one operation on one page.
struct PageChange {
    op: TableOp,
    /// Indicates that the page is in the operation's range.
    is_in_range: bool,
    is_range_empty: bool,
    /// Indicates that the policy maps the other parts of a block that it splits.
    populates_on_split: bool,
    ipa: u64,
    page_size: u64,
    before: Translation,
    after: Translation,
}

fn is_subset(a: Permissions, b: Permissions) -> bool {
    a.iter().zip(b).all(|(a, b)| !a || b)
}

impl PageChange {
    fn is_allowed(&self) -> bool {
        let (before, after) = (self.before, self.after);
        let right = after.is_none_or(|(phys, _)| phys == MEMORY + self.ipa);
        // A relaxation is that of a leaf, not of a range.
        let may_change = !self.is_range_empty || matches!(self.op, TableOp::Relax(_));
        right
            && (may_change || before == after)
            && match self.op {
                TableOp::Map { attributes, .. } if self.is_in_range => self.is_mapped(attributes),
                TableOp::MapEach { attributes, has_blocks } if self.is_in_range => self.is_mapped(
                    attributes_of_page(attributes, has_blocks, self.ipa, self.page_size),
                ),
                TableOp::Map { .. } | TableOp::MapEach { .. } => {
                    before == after || !self.populates_on_split && after.is_none()
                }
                TableOp::Unmap if self.is_in_range => after.is_none(),
                TableOp::Protect(keep) if self.is_in_range => {
                    let allowed = [true, keep.write, keep.execute];
                    self.is_restricted()
                        && after.is_none() == before.is_none()
                        && after.is_none_or(|(_, has)| is_subset(has, allowed))
                }
                // Other pages of a block that the operation splits may be restricted too.
                TableOp::Unmap | TableOp::Protect(_) | TableOp::Recover => self.is_restricted(),
                TableOp::Relax(_) => match (before, after) {
                    (Some((_, old)), Some((_, new))) => is_subset(old, new),
                    (before, after) => before == after,
                },
                TableOp::Split => before == after,
            }
    }

    fn is_restricted(&self) -> bool {
        match (self.before, self.after) {
            (Some((_, old)), Some((_, new))) => is_subset(new, old),
            (_, after) => after.is_none(),
        }
    }

    /// Returns whether the page is mapped with the requested permissions. A page mapped before may
    /// also keep its permissions.
    fn is_mapped(&self, requested: Attributes) -> bool {
        let requested = [true, requested.write, requested.execute];
        let old = self.before.map_or([false; 3], |(_, old)| old);
        let either = [0, 1, 2].map(|at| requested[at] || old[at]);
        self.after.is_some_and(|(_, new)| {
            is_subset(new, either) && (is_subset(requested, new) || self.before.is_some())
        })
    }
}

/// Applies operations to an empty table. Compares all translations after each operation.
fn run(policy: Policy, granule: Granule, features: Features, ops: &[(TableOp, u16, u16)]) {
    let geometry = Geometry::new(granule, 40).unwrap();
    let pool = pool(&geometry, 64);
    let reclaim = EpochReclaim::new(1);
    let checker = Mutex::new(Checker::new(setup(geometry, features, &pool, 1)));
    let page = granule.size();
    let mut tested = TestTable {
        table: stage2(geometry, features, policy, &pool),
        ops: Recorder::new(pool_ops(&pool, &reclaim, 0), 0, &checker),
        memcache: Memcache::new(),
        page_size: page,
        page_count: 2 * granule.entries(),
    };
    tested.ops.record(Action::AddMemory {
        ipa: Ipa(0),
        phys: MEMORY,
        size: tested.page_count * page,
        is_device: false,
    });
    let mut before = tested.translations();
    for &(op, at, length) in ops {
        let (first, count) = operation_range(granule, at, length);
        tested.step(op, Ipa(first * page), count * page);
        let after = tested.translations();
        for (index, (old, new)) in (0..).zip(before.iter().zip(&after)) {
            let change = PageChange {
                op,
                is_in_range: (first..first + count).contains(&index),
                is_range_empty: count == 0,
                populates_on_split: policy.populates_on_split,
                ipa: index * page,
                page_size: page,
                before: *old,
                after: *new,
            };
            assert!(
                change.is_allowed(),
                "{op:?} of {count} pages from {first}: page {index} was {old:?}, is {new:?}"
            );
        }
        before = after;
    }
    tested.memcache.drain(&tested.ops);
    let checker = checker.lock().unwrap();
    let mut violations = checker.violations().iter();
    let found = violations.find(|v| policy.populates_on_split || v.rule != Rule::ReturnedUnclean);
    assert!(found.is_none(), "{}", found.unwrap());
}

/// Returns the first page and the number of pages of an operation; one operation in four covers a
/// whole block or both blocks, and one in eight no page.
fn operation_range(granule: Granule, at: u16, length: u16) -> (u64, u64) {
    let per_block = granule.entries();
    let pages = 2 * per_block;
    let first = u64::from(at) % pages;
    match length % 8 {
        0 => (0, pages),
        2 => (first, 0),
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
        ops in prop::collection::vec((any_op(), any::<u16>(), 0u16..700), 1..24),
        bbm in (0u8..4).prop_map(|number| BbmLevel::new(number).unwrap()),
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
