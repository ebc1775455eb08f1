// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Benchmark of a comparison with 27 rows and 20 runs a side, as large as the lab's default matrix.
#![allow(clippy::unwrap_used, missing_docs)]

use std::fs;

use criterion::{Criterion, criterion_group, criterion_main};
use granule_report::{Comparison, ComparisonOptions, input, render};

/// Returns a log with 20 runs for each of nine vCPU counts; times vary by a few percent.
fn test_log(factor: u64) -> String {
    let mut log = String::new();
    for (run, vcpus) in (0..20).flat_map(|run| (1..=9).map(move |vcpus| (run, vcpus))) {
        log += &format!(
            "Testing guest mode: PA-bits:48,  VA-bits:48,  4K pages\n\
             Testing memory backing src type: anonymous\n\
             Testing memory size(aligned): 0x4000000\n\
             Number of testing vCPUs: {vcpus}\n"
        );
        for (at, word) in (1..).zip(["CREATE", "UPDATE", "ADJUST"]) {
            let ns = at * 10_000 * (factor + (run * 7 + at * 3) % 11);
            log += &format!("KVM_{word}_MAPPINGS: total execution time: 0.{ns:09}s\n");
        }
    }
    log
}

fn compare(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["before", "after"].map(|name| [folder.path().join(name)]);
    fs::write(&paths[0][0], test_log(1000)).unwrap();
    fs::write(&paths[1][0], test_log(1010)).unwrap();
    let [before, after] = paths.each_ref().map(|paths| input::read_side(paths).unwrap());
    let options = ComparisonOptions::default();
    let compared = || Comparison::new(&before, &after, &options).unwrap();
    let comparison = compared();
    criterion.bench_function("read a log", |b| b.iter(|| input::read_side(&paths[0]).unwrap()));
    criterion.bench_function("compare", |b| b.iter(compared));
    criterion.bench_function("render text", |b| b.iter(|| render::text(&comparison)));
    criterion.bench_function("render html", |b| b.iter(|| render::html(&comparison)));
}

criterion_group!(benches, compare);
criterion_main!(benches);
