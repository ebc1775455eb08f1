// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Benchmarks of the engine and of other crates in one thread, with tables in warm memory (`cargo
//! bench --bench tables`, `docs/benchmarks.md`).
//!
//! A figure is the minimum of all runs, as other load on the machine only adds time. The benchmarks
//! time only the work on the tables, without TLB invalidations and CMOs. Ratios within one run are
//! comparable; absolute figures are valid for one machine only.

#![allow(missing_docs, reason = "a benchmark")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "addresses are 64 bits wide here, as pointers are; counts are small"
)]

mod engine;
mod other_crates;
mod pages;

use std::{
    collections::BTreeMap,
    sync::Mutex,
    time::{Duration, Instant},
};

use criterion::Criterion;
use engine::Engine;
use other_crates::{Aarch64Paging, PageTableGeneric, PageTableMultiarch};
use rand_core::{Rng, SeedableRng};
use rand_xoshiro::SplitMix64;

const PAGE: u64 = 4096;
const BLOCK: u64 = 2 << 20;
const GIB: u64 = 1 << 30;
/// Host address of all mapped memory.
const PHYS: u64 = 0x8_0000_0000;
const PAGES: u64 = GIB / PAGE;
const BLOCKS: u64 = GIB / BLOCK;
/// Number of single 4K maps in a run: few, so that interrupts are rare.
const SINGLE_PAGES: u64 = PAGES / 4;
/// Number of single 2M maps in a run: many, so that the cost of reading the clock is negligible.
const SINGLE_BLOCKS: u64 = 64 * BLOCKS;

/// A table to benchmark. Optional operations are unsupported by default.
trait BenchTable: Sized {
    const NAME: &'static str;
    const CAN_SPLIT: bool = true;
    const CAN_COALESCE: bool = true;

    fn new() -> Self;
    /// Maps `size` bytes at `ipa` to the same offset from [`PHYS`], with pages or 2M blocks.
    fn map(&mut self, ipa: u64, size: u64, blocks: bool);
    /// Maps `count` pages or 2M blocks of `SIZE` bytes one by one, starting at address 0.
    fn map_each<const SIZE: u64>(&mut self, count: u64) {
        (0..count).for_each(|n| self.map(n * SIZE, SIZE, SIZE == BLOCK));
    }
    /// Maps `count` pages one by one, starting at address 0. Other threads may map concurrently.
    fn map_shared(&mut self, count: u64) {
        let table = Mutex::new(self);
        for n in 0..count {
            table.lock().expect("the lock is not poisoned").map(n * PAGE, PAGE, false);
        }
    }
    /// Translates an address. Each implementation is inlined into the benchmark's loop.
    fn translate(&self, ipa: u64) -> u64;
    /// Write-protects memory that is mapped with pages.
    fn protect(&mut self, ipa: u64, size: u64);
    /// Unmaps memory that is mapped with pages.
    fn unmap(&mut self, ipa: u64, size: u64);
    /// Splits the 2M block at `ipa` into pages with its attributes.
    fn split(&mut self, _ipa: u64) {
        unreachable!("{} cannot split", Self::NAME);
    }
    /// Coalesces `count` blocks one by one, starting at address 0.
    fn coalesce_each(&mut self, _count: u64) {
        unreachable!("{} cannot coalesce", Self::NAME);
    }
}

/// Minimum time of each operation in nanoseconds, by table.
#[derive(Default)]
struct Figures(BTreeMap<&'static str, BTreeMap<&'static str, f64>>);

type Step<T> = fn(&mut T);

impl Figures {
    /// Measures the time per operation of `act`, which performs `count` of them, after `prepare`.
    fn bench<T: BenchTable>(
        &mut self,
        c: &mut Criterion,
        operation: &'static str,
        count: u64,
        (prepare, act): (Step<T>, Step<T>),
    ) {
        let run = || {
            pages::reset_pool();
            let mut table = T::new();
            prepare(&mut table);
            let start = Instant::now();
            act(&mut table);
            start.elapsed()
        };
        let mut group = c.benchmark_group(operation);
        group.bench_function(T::NAME, |b| {
            b.iter_custom(|iterations| {
                let runs = iterations.div_ceil(count);
                let fastest = (0..runs).map(|_| run()).min().unwrap_or_default();
                let ns = fastest.as_nanos() as f64 / count as f64;
                let figure = self.0.entry(operation).or_default().entry(T::NAME).or_insert(ns);
                *figure = figure.min(ns);
                // Criterion divides by the iterations; one iteration is one page or block.
                Duration::from_secs_f64(ns * 1e-9 * iterations as f64)
            });
        });
        group.finish();
    }

    /// Benchmarks the operations that a table supports.
    fn bench_all<T: BenchTable>(&mut self, c: &mut Criterion) {
        let mut rows: Vec<(&'static str, u64, Step<T>, Step<T>)> = vec![
            ("range map, per 4K", PAGES, leave_empty, map_pages),
            ("map of 4K, each", SINGLE_PAGES, leave_empty, |t| t.map_each::<PAGE>(SINGLE_PAGES)),
            ("map of 2M, each", SINGLE_BLOCKS, leave_empty, |t| t.map_each::<BLOCK>(SINGLE_BLOCKS)),
            ("translate", SINGLE_PAGES, map_pages, translate),
            ("protect, per 4K", PAGES, map_pages, |t| t.protect(0, GIB)),
            ("unmap of 1G, per 4K", PAGES, map_pages, |t| t.unmap(0, GIB)),
            ("shared map of 4K, each", SINGLE_PAGES, leave_empty, |t| t.map_shared(SINGLE_PAGES)),
        ];
        if T::CAN_SPLIT {
            rows.push(("split of 2M, each", BLOCKS, map_blocks, split_each));
        }
        if T::CAN_COALESCE {
            rows.push(("coalesce to 2M, each", BLOCKS, split_all, |t| t.coalesce_each(BLOCKS)));
        }
        for (operation, count, prepare, act) in rows {
            self.bench(c, operation, count, (prepare, act));
        }
    }

    /// Prints all figures, and the rows of `docs/charts/benchmarks.csv`: the time of the fastest
    /// other crate as a multiple of the engine's.
    fn report(&self) {
        for (operation, figures) in &self.0 {
            for (table, ns) in figures {
                println!("{operation:24} {table:22} {ns:10.4} ns");
            }
        }
        println!("\ngroup,what,value,unit");
        for (operation, figures) in &self.0 {
            let others =
                figures.iter().filter(|(table, _)| !table.starts_with(Engine::<false>::NAME));
            let fastest = others.min_by(|a, b| a.1.total_cmp(b.1));
            if let (Some(own), Some((other, ns))) = (figures.get(Engine::<false>::NAME), fastest) {
                println!("time relative to granule,\"{operation}\",{:.2},× {other}", ns / own);
            }
        }
    }
}

fn leave_empty<T: BenchTable>(_: &mut T) {}

fn map_pages<T: BenchTable>(table: &mut T) {
    table.map(0, GIB, false);
}

fn map_blocks<T: BenchTable>(table: &mut T) {
    table.map(0, GIB, true);
}

fn split_each<T: BenchTable>(table: &mut T) {
    (0..BLOCKS).for_each(|n| table.split(n * BLOCK));
}

fn split_all<T: BenchTable>(table: &mut T) {
    map_blocks(table);
    split_each(table);
}

fn translate<T: BenchTable>(table: &mut T) {
    let mut random = SplitMix64::seed_from_u64(1);
    for _ in 0..SINGLE_PAGES {
        let ipa = random.next_u64() % GIB;
        assert_eq!(table.translate(ipa) & !0xfff, PHYS + (ipa & !0xfff));
    }
}

fn main() {
    let mut c = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(150))
        .measurement_time(Duration::from_millis(500))
        .without_plots()
        .configure_from_args();
    let mut figures = Figures::default();
    figures.bench_all::<Engine<false>>(&mut c);
    figures.bench_all::<Aarch64Paging>(&mut c);
    figures.bench_all::<PageTableMultiarch>(&mut c);
    figures.bench_all::<PageTableGeneric>(&mut c);
    let coalesce: Step<Engine<true>> = |table| table.coalesce_each(BLOCKS);
    figures.bench(&mut c, "coalesce to 2M, each", BLOCKS, (split_all, coalesce));
    figures.report();
}
