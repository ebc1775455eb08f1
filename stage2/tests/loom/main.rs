// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Every pair of operations of two CPUs on one small table, in every order that the memory model
//! allows. `cargo test --release -p granule-stage2 --features loom --test loom`
//!
//! In every order, a concurrent walk finds the expected memory or a fault, no entry remains locked
//! or break-pending, reference counts are right, no table is lost or freed twice, and at least one
//! CPU succeeds.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod cpu;

use cpu::{LoomCpu, LoomMemory};
use granule_stage2::{
    Access, BbmLevel, Features, Ipa, MapError, MapRequest, Memcache, Operations, PhysAddr, Policy,
    Stage2, TableAddress,
    descriptor::{Attributes, EntryKind},
    epoch::EpochReclaim,
    geometry::{Geometry, Granule, Level},
    operations::{UnlinkedTable, Vmid},
    pool::{TablePool, zeroed_words},
};
use loom::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

const PAGE: u64 = 4096;
const BLOCK: u64 = 2 << 20;
const MEMORY: u64 = 1 << 32;
/// The offset of the memory that [`Op::MapOtherMemory`] maps.
const MOVED_OFFSET: u64 = 1 << 30;
const ROOT: u64 = 0x8000_0000;
/// Tables below the four root tables: one for each CPU, one for the initial mapping.
const TABLES: u64 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Op {
    MapReadable(u64),
    MapWritable(u64),
    MapExecutable(u64),
    MapBlock,
    /// Maps a block to other memory.
    MapOtherMemory,
    Relax(u64),
    Walk(u64),
    Unmap,
    Protect,
    Age,
    Split,
    Recover,
}

#[derive(Debug, Clone, Copy)]
enum InitialMapping {
    Empty,
    Block,
    Pages,
}

const SHARED_OPS: [Op; 8] = [
    Op::MapReadable(0),
    Op::MapWritable(0),
    Op::MapWritable(1),
    Op::MapExecutable(0),
    Op::MapBlock,
    Op::MapOtherMemory,
    Op::Relax(0),
    Op::Walk(0),
];
const EXCLUSIVE_OPS: [Op; 5] = [Op::Unmap, Op::Protect, Op::Age, Op::Split, Op::Recover];

fn request(op: Op) -> MapRequest {
    let all = Attributes { execute: true, ..Attributes::READ_WRITE };
    let (at, size, attributes) = match op {
        Op::MapBlock | Op::MapOtherMemory => (0, BLOCK, Attributes::READ_WRITE),
        Op::MapReadable(page) => (page, PAGE, Attributes::READ),
        Op::MapExecutable(page) => (page, PAGE, all),
        Op::MapWritable(page) | Op::Relax(page) | Op::Walk(page) => {
            (page, PAGE, Attributes::READ_WRITE)
        }
        _ => (0, BLOCK, Attributes::READ),
    };
    let offset = if op == Op::MapOtherMemory { MOVED_OFFSET } else { 0 };
    MapRequest::new(Ipa(at * PAGE), PhysAddr(MEMORY + offset + at * PAGE), size, attributes)
}

/// Performs an operation in a shared walk, or in an exclusive walk during hardware walks.
fn perform(
    table: &Stage2,
    exclusive: Option<&mut Stage2>,
    cpu: &LoomCpu,
    op: Op,
) -> Result<(), MapError> {
    let mut memcache = Memcache::new();
    memcache.top_up(cpu, 1, 1);
    let r = request(op);
    let done = match (op, exclusive) {
        (Op::Walk(_), _) => {
            if let Ok(seen) = table.walker().translate(cpu, r.ipa + 5, Access::Read) {
                assert_eq!(seen.phys.0 & !MOVED_OFFSET, r.phys.0 + 5);
            }
            Ok(())
        }
        (Op::Relax(_), _) => {
            let (_, level) = table.look_up(cpu, r.ipa);
            table.relax_shared(cpu, r.ipa, level, r.attributes)
        }
        (Op::Unmap, Some(table)) => table.unmap(cpu, Ipa(0), BLOCK),
        (Op::Protect, Some(table)) => table.write_protect(cpu, Ipa(0), BLOCK),
        (Op::Age, Some(table)) => table.age(cpu, Ipa(0), BLOCK).map(drop),
        (Op::Split, Some(table)) => table.split(cpu, &mut memcache, Ipa(0), BLOCK),
        (Op::Recover, Some(table)) => {
            table.recover_blocks(cpu, Ipa(0), BLOCK, Level::new(2).unwrap())
        }
        _ => table.map_shared(cpu, &mut memcache, &r),
    };
    memcache.drain(cpu);
    assert!(matches!(done, Ok(()) | Err(MapError::Again)), "{op:?}: {done:?}");
    done
}

fn table(policy: Policy, features: Features) -> Stage2 {
    let geometry = Geometry::new(Granule::K4, 32).unwrap();
    // Shared walkers cannot change a contiguous run.
    let policy = Policy { sets_contiguous: false, ..policy };
    Stage2::new(geometry, features, policy, Vmid(1), TableAddress(ROOT)).unwrap()
}

fn map_initial(
    memory: &Arc<LoomMemory>,
    policy: Policy,
    features: Features,
    before: InitialMapping,
) {
    let cpu = LoomCpu::new(memory, 2);
    let mut table = table(policy, features);
    let mut memcache = Memcache::new();
    memcache.top_up(&cpu, 1, 1);
    let block = MapRequest::new(Ipa(0), PhysAddr(MEMORY), BLOCK, Attributes::READ);
    match before {
        InitialMapping::Empty => {}
        InitialMapping::Block => table.map(&cpu, &mut memcache, &block).unwrap(),
        InitialMapping::Pages => {
            let max_leaf_size = PAGE;
            let pages = MapRequest { max_leaf_size, ..block };
            table.map(&cpu, &mut memcache, &pages).unwrap();
        }
    }
}

/// Checks the final entries and counts below a table. Returns the number of tables in use.
fn check_tables(
    cpu: &LoomCpu,
    table: TableAddress,
    (level, ipa): (Level, u64),
    counts: bool,
    case: &str,
) -> u64 {
    let (mut valid, mut tables) = (0, 1);
    for index in 0..512 {
        let entry = cpu.load(table.entry(index));
        let at = ipa + (index << level.shift(Granule::K4));
        assert!(!entry.is_locked() && !entry.is_break_pending(), "{case}: {at:#x}: {entry:?}");
        valid += u32::from(entry.is_valid());
        match entry.kind(level) {
            EntryKind::Table(child) => {
                let below = (Level::PAGE, at);
                tables += check_tables(cpu, child, below, counts, case);
            }
            EntryKind::Leaf(phys) => assert_eq!(phys.0 & !MOVED_OFFSET, MEMORY + at, "{case}"),
            EntryKind::Invalid | EntryKind::Locked => {}
        }
    }
    let counted = if counts { valid + 1 } else { 1 };
    assert_eq!(cpu.references(table), counted, "{case}: table {table:?}");
    tables
}

/// Explores all orders of two operations. Returns their number.
fn explore_pair(policy: Policy, features: Features, before: InitialMapping, ops: [Op; 2]) -> u64 {
    let case = format!("{before:?}, {ops:?}, {features:?}");
    // Both CPUs may fail if they relax a missing leaf, or if a leaf exists that a map does not
    // relax.
    let must_succeed =
        matches!(before, InitialMapping::Empty) && !ops.iter().all(|op| matches!(op, Op::Relax(_)));
    let orders = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let counted = std::sync::Arc::clone(&orders);
    let mut model = loom::model::Builder::new();
    model.max_branches = 50_000;
    model.check(move || {
        counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let memory = Arc::new(LoomMemory::new());
        map_initial(&memory, policy, features, before);
        let thread = {
            let memory = Arc::clone(&memory);
            loom::thread::spawn(move || {
                let cpu = LoomCpu::new(&memory, 1);
                let done = perform(&table(policy, features), None, &cpu, ops[1]);
                (done, cpu.own_tables.into_inner(), cpu.deferred_tables.into_inner())
            })
        };
        let cpu = LoomCpu::new(&memory, 0);
        let mut exclusive = table(policy, features);
        let first = perform(&table(policy, features), Some(&mut exclusive), &cpu, ops[0]);
        let (second, own, deferred) = thread.join().unwrap();
        let all = [cpu.own_tables.take(), own].concat();
        let waiting: Vec<_> = [cpu.deferred_tables.take(), deferred].concat();
        assert!(first.is_ok() || second.is_ok() || !must_succeed, "{case}: no CPU succeeds");
        for unlinked in &waiting {
            exclusive.free_unlinked(&cpu, *unlinked);
        }
        let mut free = [all, cpu.own_tables.take()].concat();
        free.sort();
        let count = free.len();
        free.dedup();
        assert_eq!(free.len(), count, "{case}: a table is free twice");
        let root = (Level::new(2).unwrap(), 0);
        let counts = policy.counts_references;
        let used = check_tables(&cpu, TableAddress(ROOT), root, counts, &case) - 1;
        let spare = u64::from(!matches!(before, InitialMapping::Pages));
        let lost = TABLES - spare - used - count as u64;
        assert_eq!(lost, 0, "{case}: {used} used, {count} free");
    });
    orders.load(std::sync::atomic::Ordering::Relaxed)
}

/// `granule` without waits for locked entries, which only repeat a load.
const GRANULE: Policy = Policy { locked_entry_reads: 0, ..Policy::GRANULE };

fn explore_all_pairs(policy: Policy, bbm: BbmLevel) {
    let features = Features { bbm, ..Features::default() };
    let (mut pairs, mut orders) = (0, 0);
    for before in [InitialMapping::Empty, InitialMapping::Block, InitialMapping::Pages] {
        for (index, first) in SHARED_OPS.into_iter().enumerate() {
            for second in SHARED_OPS.into_iter().skip(index) {
                pairs += 1;
                orders += explore_pair(policy, features, before, [first, second]);
            }
        }
        for first in EXCLUSIVE_OPS {
            pairs += 1;
            orders += explore_pair(policy, features, before, [first, Op::Walk(0)]);
        }
    }
    println!("{pairs} pairs, {orders} orders");
}

#[test]
fn every_pair_leaves_a_consistent_table_under_granule() {
    explore_all_pairs(GRANULE, BbmLevel::L0);
}

#[test]
fn every_pair_leaves_a_consistent_table_under_granule_with_bbm_1() {
    explore_all_pairs(GRANULE, BbmLevel::L1);
}

#[test]
fn every_pair_leaves_a_consistent_table_under_granule_with_bbm_3() {
    explore_all_pairs(GRANULE, BbmLevel::L3);
}

#[test]
fn every_pair_leaves_a_consistent_table_under_linux_6_12() {
    explore_all_pairs(Policy::LINUX_6_12, BbmLevel::L0);
}

#[test]
fn a_pool_allocates_no_table_twice() {
    let mut model = loom::model::Builder::new();
    model.max_branches = 100_000;
    model.check(|| {
        let geometry = Geometry::new(Granule::K4, 32).unwrap();
        // Four root tables, and the free tables.
        const FREE: usize = 4;
        let tables = zeroed_words((4 + FREE) * 512);
        let pool = TablePool::new(PhysAddr(ROOT), &geometry, tables, zeroed_words(2 * (4 + FREE)));
        let pool = Arc::new(pool.unwrap());
        let other = {
            let pool = Arc::clone(&pool);
            loom::thread::spawn(move || {
                // One `free_all` frees both tables, in either order of their addresses.
                let tables = [pool.allocate().unwrap(), pool.allocate().unwrap()];
                pool.free_all(&tables);
                pool.allocate()
            })
        };
        let first = pool.allocate();
        let second = other.join().unwrap();
        assert!(first.is_some() && second.is_some() && first != second, "{first:?} {second:?}");
        assert_eq!(pool.free_tables(), FREE - 2);
    });
}

#[test]
fn a_table_outlives_every_walk_below_it() {
    loom::model(|| {
        let reclaim = Arc::new(EpochReclaim::new(2));
        let link = Arc::new(AtomicU64::new(1));
        let freed = Arc::new(AtomicU64::new(0));
        let walker = {
            let (reclaim, link, freed) =
                (Arc::clone(&reclaim), Arc::clone(&link), Arc::clone(&freed));
            loom::thread::spawn(move || {
                reclaim.begin_walk(1);
                if link.load(Ordering::Acquire) == 1 {
                    assert_eq!(freed.load(Ordering::Acquire), 0, "freed below a walker");
                }
                reclaim.end_walk(1);
            })
        };
        link.store(0, Ordering::Release);
        reclaim.defer_free(UnlinkedTable { table: TableAddress(ROOT), level: Level::PAGE });
        if reclaim.take_unreachable_table().is_some() {
            freed.store(1, Ordering::Release);
        }
        walker.join().unwrap();
    });
}
