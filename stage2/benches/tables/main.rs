// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The engine's tables and those of other crates in one run, with pages from warm pools
//! (`cargo bench --bench tables`, `docs/benchmarks.md`).
//!
//! A sample is the fastest of its runs, as other work on the machine only adds time. No TLB is
//! invalidated and no cache maintained: the benchmarks time the work on the tables. Ratios within
//! one run are comparable; absolute figures hold for one machine.

#![allow(missing_docs, reason = "a benchmark")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "addresses are 64 bits wide here, as pointers are; counts are small"
)]

mod others;
mod own;
mod report;
mod table;

use std::{
    hint::black_box,
    path::Path,
    sync::{
        Barrier, Mutex, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use criterion::Criterion;
use others::{Aarch64Paging, PageTableGeneric, PageTableMultiarch};
use own::{Direct, ExclusiveTable, Pooled, SharedTable, ThreadMemcache};
use rand_core::{Rng, SeedableRng};
use rand_xoshiro::SplitMix64;
use table::{BLOCK, GIB, PAGE, PHYS, Table};

/// Measures the time per operation of `run`, which performs `count` operations each time.
fn bench(c: &mut Criterion, group: &str, name: &str, count: u64, run: impl Fn() -> Duration) {
    let mut group = c.benchmark_group(group);
    group.bench_function(name, |b| {
        b.iter_custom(|iterations| {
            let runs = iterations.div_ceil(count);
            let tidied = || {
                table::sort_pool();
                run()
            };
            let fastest = (0..runs).map(|_| tidied()).min().unwrap_or_default();
            // Criterion divides by the iterations: one of them is one page or block.
            fastest.mul_f64(iterations as f64 / count as f64)
        });
    });
    group.finish();
}

const PAGES: u64 = GIB / PAGE;
const BLOCKS: u64 = GIB / BLOCK;
/// Number of single maps in a run: few, so that a run is seldom interrupted.
const SINGLE: u64 = PAGES / 4;
/// Number of single 2M maps in a run: many, so that reading the clock is negligible.
const SINGLE_BLOCKS: u64 = 64 * BLOCKS;

/// Times `act` on a table after `prepare`.
fn timed<T: Table>(
    c: &mut Criterion,
    (group, name): (&str, &str),
    count: u64,
    new: impl Fn() -> T,
    prepare: impl Fn(&mut T, &mut T::ThreadState),
    act: impl Fn(&mut T, &mut T::ThreadState),
) {
    bench(c, group, name, count, || {
        let (mut table, mut state) = (new(), T::ThreadState::default());
        prepare(&mut table, &mut state);
        let start = Instant::now();
        act(&mut table, &mut state);
        start.elapsed()
    });
}

/// A step of a benchmark on a table.
type TableStep<T> = fn(&mut T, &mut <T as Table>::ThreadState);

fn nothing<T: Table>(_: &mut T, _: &mut T::ThreadState) {}

fn by_pages<T: Table>(table: &mut T, state: &mut T::ThreadState) {
    table.map(state, 0, GIB, false);
}

fn by_blocks<T: Table>(table: &mut T, state: &mut T::ThreadState) {
    table.map(state, 0, GIB, true);
}

fn split_each<T: Table>(table: &mut T, state: &mut T::ThreadState) {
    (0..BLOCKS).for_each(|n| table.split(state, n * BLOCK));
}

fn split_all<T: Table>(table: &mut T, state: &mut T::ThreadState) {
    by_blocks(table, state);
    split_each(table, state);
}

/// Translates random addresses of a table that is mapped by pages.
fn translate(seed: u64, mut translate: impl FnMut(u64) -> u64) {
    let mut random = SplitMix64::seed_from_u64(seed);
    for _ in 0..SINGLE {
        let ipa = random.next_u64() % GIB;
        assert_eq!(translate(ipa) & !0xfff, PHYS + (ipa & !0xfff));
    }
}

/// Benchmarks of the operations that every table has, in one thread.
fn alone<T: Table>(c: &mut Criterion) {
    let mut rows: Vec<(&str, u64, TableStep<T>, TableStep<T>)> = vec![
        ("range map, per 4K", PAGES, nothing, by_pages),
        ("map of 4K, each", SINGLE, nothing, |t, state| t.map_each::<PAGE>(state, SINGLE)),
        ("map of 2M, each", SINGLE_BLOCKS, nothing, |t, state| {
            t.map_each::<BLOCK>(state, SINGLE_BLOCKS);
        }),
        ("translate", SINGLE, by_pages, |t, _| translate(1, |ipa| t.translate(ipa))),
        ("protect, per 4K", PAGES, by_pages, |t, _| t.protect(0, GIB)),
        ("unmap of 1G, per 4K", PAGES, by_pages, |t, _| t.unmap(0, GIB)),
    ];
    if T::CAN_SPLIT {
        rows.push(("split of 2M, each", BLOCKS, by_blocks, split_each));
    }
    if T::CAN_COALESCE {
        let coalesce: TableStep<T> = |t, state| t.coalesce_each(state, BLOCKS);
        rows.push(("coalesce to 2M, each", BLOCKS, split_all, coalesce));
    }
    for (group, count, prepare, act) in rows {
        timed(c, (group, T::NAME), count, T::new, prepare, act);
    }
}

/// Benchmarks of the engine alone: each leaf in an exclusive walk of its own, and CPUs with
/// FEAT_BBM.
fn variants(c: &mut Criterion) {
    type OwnTable = ExclusiveTable<Direct>;
    let name = "granule, a walk each";
    timed(c, ("map of 4K, each", name), SINGLE, OwnTable::new, nothing, |table, state| {
        table.walk_each::<PAGE>(state, SINGLE);
    });
    timed(c, ("map of 2M, each", name), SINGLE_BLOCKS, OwnTable::new, nothing, |table, state| {
        table.walk_each::<BLOCK>(state, SINGLE_BLOCKS);
    });
    let group = "coalesce to 2M, each";
    timed(c, (group, name), BLOCKS, OwnTable::new, split_all, |table, state| {
        table.coalesce_in_walks(state, BLOCKS);
    });
    let name = "granule, FEAT_BBM";
    timed(c, (group, name), BLOCKS, OwnTable::with_bbm, split_all, |table, state| {
        table.coalesce_each(state, BLOCKS);
    });
}

/// Minimum work of a shared map.
fn swap(word: &AtomicU64, new: u64) {
    let _ = black_box(word).compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire);
}

const FLOOR: &str = "floor: compare-and-swap";

/// Benchmarks the minimum work of a map: one store, or one compare-and-swap, of adjacent words.
fn floors(c: &mut Criterion) {
    let words: Vec<AtomicU64> = (0..SINGLE).map(|_| AtomicU64::new(0)).collect();
    let clear = || words.iter().for_each(|w| w.store(0, Ordering::Relaxed));
    bench(c, "map of 4K, each", "floor: store", SINGLE, || {
        clear();
        let start = Instant::now();
        for (word, n) in words.iter().zip(1..) {
            black_box(word).store(n, Ordering::Release);
        }
        start.elapsed()
    });
    bench(c, "map of 4K, each", FLOOR, SINGLE, || {
        clear();
        let start = Instant::now();
        for (word, n) in words.iter().zip(1..) {
            swap(word, n);
        }
        start.elapsed()
    });
}

/// Runs the closures that `begin` returns in threads of their own, and returns the wall time.
fn in_threads<A: FnOnce()>(threads: u64, begin: impl Fn(u64) -> A + Sync) -> Duration {
    let barrier = Barrier::new(threads as usize);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|thread| {
                let (barrier, begin) = (&barrier, &begin);
                scope.spawn(move || {
                    let act = begin(thread);
                    barrier.wait();
                    let start = Instant::now();
                    act();
                    start.elapsed()
                })
            })
            .collect();
        let times = threads.into_iter().map(|thread| thread.join().expect("it does not panic"));
        times.max().unwrap_or_default()
    })
}

/// Benchmarks of shared maps: wall time per page of both threads together.
fn together(c: &mut Criterion) {
    const EACH: u64 = SINGLE / 2;
    let sequences: [(&str, u64, AddressSequence); 3] = [
        ("one thread", 1, |_, n| n * PAGE),
        ("two threads, disjoint", 2, |thread, n| thread * GIB + n * PAGE),
        ("two threads, interleaved", 2, |thread, n| (2 * n + thread) * PAGE),
    ];
    for (group, threads, sequence) in sequences {
        let group = &format!("shared map, {group}");
        let count = threads * EACH;
        let words: Vec<AtomicU64> = (0..2 * PAGES).map(|_| AtomicU64::new(0)).collect();
        bench(c, group, FLOOR, count, || {
            in_threads(threads, |thread| {
                let words = &words;
                let words =
                    move || (0..EACH).map(move |n| &words[(sequence(thread, n) / PAGE) as usize]);
                words().for_each(|w| w.store(0, Ordering::Relaxed));
                move || {
                    for (word, n) in words().zip(1..) {
                        swap(word, n);
                    }
                }
            })
        });
        bench(c, group, "granule, one walk", count, || {
            let table = SharedTable::new();
            in_threads(threads, |thread| {
                let (table, mut state) = (&table, ThreadMemcache::default());
                move || table.map_all(&mut state, (0..EACH).map(|n| sequence(thread, n)))
            })
        });
        bench(c, group, "granule, a walk each", count, || {
            let table = SharedTable::new();
            in_threads(threads, |thread| {
                let (table, mut state) = (&table, ThreadMemcache::default());
                move || table.map_each::<PAGE>(&mut state, (0..EACH).map(|n| sequence(thread, n)))
            })
        });
        let mut locked = |name, run: fn(u64, u64, AddressSequence) -> Duration| {
            bench(c, group, name, count, || run(threads, EACH, sequence));
        };
        locked("Mutex of aarch64-paging", map_locked::<Aarch64Paging>);
        locked("Mutex of page_table_multiarch", map_locked::<PageTableMultiarch>);
        locked("Mutex of page-table-generic", map_locked::<PageTableGeneric>);
    }
}

/// Address of the page that a thread maps next, by thread and number.
type AddressSequence = fn(u64, u64) -> u64;

/// A table shared by threads.
struct SendTable<T>(T);

// SAFETY: a table owns its pages and has no thread-local state.
unsafe impl<T> Send for SendTable<T> {}
// SAFETY: methods with `&self` write nothing.
unsafe impl<T> Sync for SendTable<T> {}

/// Maps pages in threads that lock the table for each page.
fn map_locked<T: Table<ThreadState = ()>>(
    threads: u64,
    each: u64,
    sequence: AddressSequence,
) -> Duration {
    let table = Mutex::new(SendTable(T::new()));
    in_threads(threads, |thread| {
        let table = &table;
        move || {
            for n in 0..each {
                let mut table = table.lock().expect("the lock is not poisoned");
                table.0.map(&mut (), sequence(thread, n), PAGE, false);
            }
        }
    })
}

/// An operation on one block of a table.
type BlockOperation<T> = fn(&mut T, &mut <T as Table>::ThreadState, u64);

/// A benchmark of two threads: group, count, preparation, tables that an operation needs,
/// operation.
type BenchmarkRow<T> = (&'static str, u64, TableStep<T>, usize, BlockOperation<T>);

/// Benchmarks of two threads that lock one table in turns, block by block. Pages for tables are
/// taken before the table is locked.
fn in_turns<T: Table>(c: &mut Criterion) {
    let mut rows: Vec<BenchmarkRow<T>> = vec![
        ("range map, per 4K", PAGES, nothing, 2, |t, state, ipa| t.map(state, ipa, BLOCK, false)),
        ("protect, per 4K", PAGES, by_pages, 0, |t, _, ipa| t.protect(ipa, BLOCK)),
        ("unmap of 1G, per 4K", PAGES, by_pages, 0, |t, _, ipa| t.unmap(ipa, BLOCK)),
    ];
    if !T::CONCURRENT_WALKS {
        let map: BlockOperation<T> = |t, state, ipa| t.map(state, ipa, BLOCK, true);
        rows.push(("map of 2M, each", BLOCKS, nothing, 2, map));
    }
    if T::CAN_SPLIT {
        rows.push(("split of 2M, each", BLOCKS, by_blocks, 1, T::split));
    }
    if T::CAN_COALESCE {
        rows.push(("coalesce to 2M, each", BLOCKS, split_all, 1, T::coalesce));
    }
    for (group, count, prepare, tables, act) in rows {
        bench(c, &format!("{group}, two threads"), T::NAME, count, || {
            let mut table = T::new();
            prepare(&mut table, &mut T::ThreadState::default());
            let table = Mutex::new(SendTable(table));
            in_threads(2, |thread| {
                let (table, mut state) = (&table, T::ThreadState::default());
                move || {
                    for block in (thread..BLOCKS).step_by(2) {
                        T::ready(&mut state, tables);
                        let mut table = table.lock().expect("the lock is not poisoned");
                        act(&mut table.0, &mut state, block * BLOCK);
                    }
                }
            })
        });
    }
    translate_in_two_threads::<T>(c);
}

/// Benchmarks translations of two threads. A table that allows walks during maps is looked up
/// without the lock.
fn translate_in_two_threads<T: Table>(c: &mut Criterion) {
    bench(c, "translate, two threads", T::NAME, 2 * SINGLE, || {
        let mut table = T::new();
        by_pages(&mut table, &mut T::ThreadState::default());
        let table = RwLock::new(SendTable(table));
        in_threads(2, |thread| {
            let table = &table;
            move || {
                let lock = || table.read().expect("the lock is not poisoned");
                if T::CONCURRENT_WALKS {
                    let table = lock();
                    translate(1 + thread, |ipa| table.0.translate(ipa));
                } else {
                    translate(1 + thread, |ipa| lock().0.translate(ipa));
                }
            }
        })
    });
}

/// Benchmarks shared maps of blocks in two threads.
fn blocks_in_two_threads(c: &mut Criterion) {
    bench(c, "map of 2M, each, two threads", ExclusiveTable::<Direct>::NAME, BLOCKS, || {
        let table = SharedTable::new();
        in_threads(2, |thread| {
            let (table, mut state) = (&table, ThreadMemcache::default());
            let blocks = (thread..BLOCKS).step_by(2).map(|n| n * BLOCK);
            move || table.map_each::<BLOCK>(&mut state, blocks)
        })
    });
}

fn main() {
    table::fill_pool();
    let at = Path::new(env!("CARGO_TARGET_TMPDIR")).join("criterion");
    let mut c = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(150))
        .measurement_time(Duration::from_millis(500))
        .without_plots()
        .output_directory(&at)
        .configure_from_args();
    floors(&mut c);
    variants(&mut c);
    alone::<ExclusiveTable<Direct>>(&mut c);
    alone::<ExclusiveTable<Pooled>>(&mut c);
    alone::<Aarch64Paging>(&mut c);
    alone::<PageTableMultiarch>(&mut c);
    alone::<PageTableGeneric>(&mut c);
    together(&mut c);
    blocks_in_two_threads(&mut c);
    in_turns::<ExclusiveTable<Direct>>(&mut c);
    in_turns::<Aarch64Paging>(&mut c);
    in_turns::<PageTableMultiarch>(&mut c);
    in_turns::<PageTableGeneric>(&mut c);
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/benchmarks.svg");
    report::report(&at, &chart).expect("docs/ can be written");
}
