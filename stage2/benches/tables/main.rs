// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The engine's tables and those of other crates in one run, with pages from warm pools
//! (`scripts/bench-engine`, `docs/benchmarks.md`).
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

mod peers;
mod report;

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
use peers::{
    BLOCK, GIB, PAGE, PHYS, Table,
    aarch64::Aarch64Paging,
    generic::Generic,
    multiarch::Multiarch,
    own::{Direct, Exclusive, Hand, Pooled, Shared},
};

/// Times `run`, which does `count` things each time, per thing.
fn bench(c: &mut Criterion, group: &str, name: &str, count: u64, run: impl Fn() -> Duration) {
    let mut group = c.benchmark_group(group);
    group.bench_function(name, |b| {
        b.iter_custom(|iterations| {
            let runs = iterations.div_ceil(count);
            let tidied = || {
                peers::tidy();
                run()
            };
            let fastest = (0..runs).map(|_| tidied()).min().unwrap_or_default();
            // Criterion divides by the iterations: one of them is one page or block.
            fastest.mul_f64(iterations as f64 / count as f64)
        });
    });
    group.finish();
}

/// Times `act` on a table after `prepare`.
fn timed<T: Table>(
    c: &mut Criterion,
    group: &str,
    count: u64,
    prepare: impl Fn(&mut T),
    act: impl Fn(&mut T),
) {
    bench(c, group, T::NAME, count, || {
        let mut table = T::new();
        prepare(&mut table);
        let start = Instant::now();
        act(&mut table);
        start.elapsed()
    });
}

const PAGES: u64 = GIB / PAGE;
const BLOCKS: u64 = GIB / BLOCK;
/// Single maps of a run: so few that it is seldom interrupted.
const SINGLE: u64 = PAGES / 4;
/// Single maps of 2M of a run: so many that reading the clock does not count.
const SINGLE_BLOCKS: u64 = 64 * BLOCKS;

/// Maps each leaf in an exclusive walk of its own.
fn walk_each<const SIZE: u64>(c: &mut Criterion, group: &str, count: u64) {
    bench(c, group, "granule, a walk each", count, || {
        let mut table = Exclusive::<Direct>::new();
        let start = Instant::now();
        table.walk_each::<SIZE>(count);
        start.elapsed()
    });
}

/// Coalesces each block in an exclusive walk of its own, and on CPUs with FEAT_BBM in one walk.
fn coalesce_variants(c: &mut Criterion) {
    let group = "coalesce to 2M, each";
    let time = |mut table: Exclusive<Direct>, act: fn(&mut Exclusive<Direct>, u64)| {
        table.map(0, GIB, true);
        (0..BLOCKS).for_each(|n| table.split(n * BLOCK));
        let start = Instant::now();
        act(&mut table, BLOCKS);
        start.elapsed()
    };
    bench(c, group, "granule, a walk each", BLOCKS, || {
        time(Exclusive::new(), Exclusive::coalesce_in_walks)
    });
    bench(c, group, "granule, FEAT_BBM", BLOCKS, || {
        time(Exclusive::with_bbm(), Exclusive::coalesce_each)
    });
}

/// Benchmarks of the operations that every table has, in one thread.
fn alone<T: Table>(c: &mut Criterion) {
    let nothing = |_: &mut T| {};
    let by_pages = |table: &mut T| table.map(0, GIB, false);
    let by_blocks = |table: &mut T| table.map(0, GIB, true);
    let each_block =
        |act: fn(&mut T, u64)| move |table: &mut T| (0..BLOCKS).for_each(|n| act(table, n * BLOCK));
    timed(c, "range map, per 4K", PAGES, nothing, by_pages);
    timed(c, "map of 4K, each", SINGLE, nothing, |table: &mut T| {
        table.map_each::<PAGE>(SINGLE);
    });
    let blocks = SINGLE_BLOCKS;
    timed(c, "map of 2M, each", blocks, nothing, |table: &mut T| {
        table.map_each::<BLOCK>(blocks);
    });
    timed(c, "translate", SINGLE, by_pages, |table: &mut T| {
        let mut at: u64 = 1;
        for _ in 0..SINGLE {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let ipa = (at >> 34) % GIB;
            assert_eq!(table.translate(ipa) & !0xfff, PHYS + (ipa & !0xfff));
        }
    });
    timed(c, "protect, per 4K", PAGES, by_pages, |table: &mut T| {
        table.protect(0, GIB);
    });
    if T::SPLITS {
        timed(c, "split of 2M, each", BLOCKS, by_blocks, each_block(T::split));
    }
    if T::COALESCES {
        let split = each_block(T::split);
        timed(
            c,
            "coalesce to 2M, each",
            BLOCKS,
            |table: &mut T| {
                by_blocks(table);
                split(table);
            },
            |table: &mut T| table.coalesce_each(BLOCKS),
        );
    }
    timed(c, "unmap of 1G, per 4K", PAGES, by_pages, |table: &mut T| table.unmap(0, GIB));
}

/// The least that a shared map does.
fn swap(word: &AtomicU64, new: u64) {
    let _ = black_box(word).compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire);
}

const FLOOR: &str = "floor: compare-and-swap";

/// The least that a map does: one store, or one compare-and-swap, of adjacent words.
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
    let places: [(&str, u64, Place); 3] = [
        ("one thread", 1, |_, n| n * PAGE),
        ("two threads, disjoint", 2, |thread, n| thread * GIB + n * PAGE),
        ("two threads, interleaved", 2, |thread, n| (2 * n + thread) * PAGE),
    ];
    for (group, threads, place) in places {
        let group = &format!("shared map, {group}");
        let count = threads * EACH;
        let words: Vec<AtomicU64> = (0..2 * PAGES).map(|_| AtomicU64::new(0)).collect();
        bench(c, group, FLOOR, count, || {
            in_threads(threads, |thread| {
                let words = &words;
                let words =
                    move || (0..EACH).map(move |n| &words[(place(thread, n) / PAGE) as usize]);
                words().for_each(|w| w.store(0, Ordering::Relaxed));
                move || {
                    for (word, n) in words().zip(1..) {
                        swap(word, n);
                    }
                }
            })
        });
        bench(c, group, "granule, one walk", count, || {
            let table = Shared::new();
            in_threads(threads, |thread| {
                let mut walker = table.walker();
                move || walker.map_all((0..EACH).map(|n| place(thread, n)))
            })
        });
        bench(c, group, "granule, a walk each", count, || {
            let table = Shared::new();
            in_threads(threads, |thread| {
                let mut walker = table.walker();
                move || walker.map_each::<PAGE>((0..EACH).map(|n| place(thread, n)))
            })
        });
        let mut locked = |name, run: fn(u64, u64, Place) -> Duration| {
            bench(c, group, name, count, || run(threads, EACH, place));
        };
        locked("Mutex of aarch64-paging", map_locked::<Aarch64Paging>);
        locked("Mutex of page_table_multiarch", map_locked::<Multiarch>);
        locked("Mutex of page-table-generic", map_locked::<Generic>);
    }
}

/// Address of the page that a thread maps next, by thread and number.
type Place = fn(u64, u64) -> u64;

/// A table shared by threads.
struct Sent<T>(T);

// SAFETY: a table owns its pages and has no thread-local state.
unsafe impl<T> Send for Sent<T> {}
// SAFETY: methods with `&self` write nothing.
unsafe impl<T> Sync for Sent<T> {}

/// Maps pages in threads that lock the table for each page.
fn map_locked<T: Table>(threads: u64, each: u64, place: Place) -> Duration {
    let table = Mutex::new(Sent(T::new()));
    in_threads(threads, |thread| {
        let table = &table;
        move || {
            for n in 0..each {
                let mut table = table.lock().expect("the lock is not poisoned");
                table.0.map(place(thread, n), PAGE, false);
            }
        }
    })
}

/// A table that two threads lock in turns.
type Locked<T> = Mutex<Sent<T>>;

/// Benchmarks an operation of two threads on one table, block by block.
fn in_turns<T: Table, H>(
    c: &mut Criterion,
    group: &str,
    count: u64,
    prepare: impl Fn(&mut T),
    hand: impl Fn() -> H + Sync,
    act: impl Fn(&Locked<T>, &mut H, u64) + Sync,
) {
    let group = &format!("{group}, two threads");
    bench(c, group, T::NAME, count, || {
        let mut table = T::new();
        prepare(&mut table);
        let table = Mutex::new(Sent(table));
        in_threads(2, |thread| {
            let (table, act, mut hand) = (&table, &act, hand());
            move || {
                for block in (thread..BLOCKS).step_by(2) {
                    act(table, &mut hand, block * BLOCK);
                }
            }
        })
    });
}

/// Benchmarks an operation under the lock.
fn locked<T: Table>(
    c: &mut Criterion,
    group: &str,
    count: u64,
    prepare: impl Fn(&mut T),
    act: impl Fn(&mut T, u64) + Sync,
) {
    let nothing = || ();
    in_turns(c, group, count, prepare, nothing, |table, (), ipa| {
        act(&mut table.lock().expect("the lock is not poisoned").0, ipa);
    });
}

type Own = Exclusive<Direct>;

fn by_pages<T: Table>(table: &mut T) {
    table.map(0, GIB, false);
}

fn by_blocks<T: Table>(table: &mut T) {
    table.map(0, GIB, true);
}

fn split_all<T: Table>(table: &mut T) {
    by_blocks(table);
    (0..BLOCKS).for_each(|n| table.split(n * BLOCK));
}

/// Benchmarks of the engine in two threads: memcaches are topped up before the lock is taken.
fn two_own(c: &mut Criterion) {
    let nothing = |_: &mut Own| {};
    let range = |table: &Locked<Own>, hand: &mut Hand<Direct>, ipa| {
        hand.ready(2);
        table.lock().expect("the lock is not poisoned").0.map_with(hand, ipa);
    };
    in_turns(c, "range map, per 4K", PAGES, nothing, Hand::new, range);
    let split = |table: &Locked<Own>, hand: &mut Hand<Direct>, ipa| {
        hand.ready(1);
        table.lock().expect("the lock is not poisoned").0.split_with(hand, ipa);
    };
    in_turns(c, "split of 2M, each", BLOCKS, by_blocks, Hand::new, split);
    let coalesce = |table: &Locked<Own>, hand: &mut Hand<Direct>, ipa| {
        hand.ready(1);
        table.lock().expect("the lock is not poisoned").0.coalesce_with(hand, ipa);
    };
    let group = "coalesce to 2M, each";
    in_turns(c, group, BLOCKS, split_all, Hand::new, coalesce);
    bench(c, "map of 2M, each, two threads", Own::NAME, BLOCKS, || {
        let table = Shared::new();
        in_threads(2, |thread| {
            let mut walker = table.walker();
            let own = (thread..BLOCKS).step_by(2).map(|n| n * BLOCK);
            move || walker.map_each::<BLOCK>(own)
        })
    });
}

/// Benchmarks of another crate in two threads.
fn two_other<T: Table>(c: &mut Criterion) {
    let nothing = |_: &mut T| {};
    locked(c, "range map, per 4K", PAGES, nothing, |t: &mut T, ipa| {
        t.map(ipa, BLOCK, false);
    });
    locked(c, "map of 2M, each", BLOCKS, nothing, |t: &mut T, ipa| {
        t.map(ipa, BLOCK, true);
    });
    if T::SPLITS {
        locked(c, "split of 2M, each", BLOCKS, by_blocks, T::split);
    }
    if T::COALESCES {
        locked(c, "coalesce to 2M, each", BLOCKS, split_all, T::coalesce);
    }
    two::<T>(c);
}

/// Benchmarks that need no table pages. A table that allows walks beside maps is looked up without
/// the lock.
fn two<T: Table>(c: &mut Criterion) {
    locked(c, "protect, per 4K", PAGES, by_pages, |t: &mut T, ipa| {
        t.protect(ipa, BLOCK);
    });
    let group = "unmap of 1G, per 4K";
    locked(c, group, PAGES, by_pages, |t: &mut T, ipa| {
        t.unmap(ipa, BLOCK);
    });
    bench(c, "translate, two threads", T::NAME, 2 * SINGLE, || {
        let mut table = T::new();
        by_pages(&mut table);
        let table = RwLock::new(Sent(table));
        in_threads(2, |thread| {
            let table = &table;
            move || {
                let look = |table: &T, at: u64| {
                    let ipa = (at >> 34) % GIB;
                    assert_eq!(table.translate(ipa) & !0xfff, PHYS + (ipa & !0xfff));
                };
                let addresses = (0..SINGLE).scan(1 + thread, |at, _| {
                    *at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    Some(*at)
                });
                if T::WALKS_BESIDE {
                    let table = table.read().expect("the lock is not poisoned");
                    addresses.for_each(|at| look(&table.0, at));
                } else {
                    addresses.for_each(|at| {
                        look(&table.read().expect("the lock is not poisoned").0, at)
                    });
                }
            }
        })
    });
}

fn main() {
    peers::warm();
    let at = Path::new(env!("CARGO_TARGET_TMPDIR")).join("criterion");
    let mut c = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(150))
        .measurement_time(Duration::from_millis(500))
        .without_plots()
        .output_directory(&at)
        .configure_from_args();
    floors(&mut c);
    walk_each::<PAGE>(&mut c, "map of 4K, each", SINGLE);
    walk_each::<BLOCK>(&mut c, "map of 2M, each", SINGLE_BLOCKS);
    coalesce_variants(&mut c);
    alone::<Exclusive<Direct>>(&mut c);
    alone::<Exclusive<Pooled>>(&mut c);
    alone::<Aarch64Paging>(&mut c);
    alone::<Multiarch>(&mut c);
    alone::<Generic>(&mut c);
    together(&mut c);
    two_own(&mut c);
    two::<Own>(&mut c);
    two_other::<Aarch64Paging>(&mut c);
    two_other::<Multiarch>(&mut c);
    two_other::<Generic>(&mut c);
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/benchmarks.svg");
    report::report(&at, &chart).expect("docs/ can be written");
}
