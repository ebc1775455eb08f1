// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What criterion has noted, as one table: of each benchmark the fastest sample.

use std::{collections::BTreeMap, path::Path};

use serde_json::Value;

type Figures = BTreeMap<String, BTreeMap<String, f64>>;

fn json(path: &Path) -> Option<Value> {
    serde_json::from_str(&std::fs::read_to_string(path).ok()?).ok()
}

fn one(at: &Path) -> Option<(String, String, f64)> {
    let what = json(&at.join("new/benchmark.json"))?;
    let samples = json(&at.join("new/sample.json"))?;
    let numbers = |key: &str| Some(samples[key].as_array()?.iter().filter_map(Value::as_f64));
    let fastest = numbers("times")?
        .zip(numbers("iters")?)
        .map(|(time, iterations)| time / iterations)
        .min_by(f64::total_cmp)?;
    let part = |key: &str| Some(what[key].as_str()?.to_owned());
    Some((part("group_id")?, part("function_id")?, fastest))
}

/// By group and name, in nanoseconds.
fn figures(at: &Path, found: &mut Figures) {
    if let Some((group, name, ns)) = one(at) {
        found.entry(group).or_default().insert(name, ns);
    }
    for entry in std::fs::read_dir(at).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            figures(&entry.path(), found);
        }
    }
}

/// Prints every figure, how many times this crate's it is, and what follows for walkers side by
/// side.
pub fn print(at: &Path) {
    let mut found = BTreeMap::new();
    figures(at, &mut found);
    println!("\n| | | ns | × granule |\n|---|---|---|---|");
    for (group, names) in &found {
        let own = names.get("granule").or(names.get("granule, one walk"));
        for (name, ns) in names {
            let ratio = own.map_or(String::new(), |own| format!("{:.2}", ns / own));
            // Where whole tables are dropped a page takes picoseconds.
            let digits = if *ns < 0.1 { 4 } else { 2 };
            println!("| {group} | {name} | {ns:.digits$} | {ratio} |");
        }
    }
    let ns = |group: &str, name: &str| found.get(group)?.get(name).copied();
    let floor = ns("shared map, one thread", "floor: compare-and-swap");
    println!();
    for walks in ["granule, one walk", "granule, a walk each"] {
        let shared = |group: &str| ns(&format!("shared map, {group}"), walks);
        let (alone, disjoint) = (shared("one thread"), shared("two threads, disjoint"));
        let interleaved = shared("two threads, interleaved");
        let mutex = ns(
            "shared map, two threads, interleaved",
            "Mutex of aarch64-paging",
        );
        let ratio = |over: Option<f64>, under: Option<f64>| match (over, under) {
            (Some(over), Some(under)) => format!("{:.2}", over / under),
            _ => String::from("?"),
        };
        println!(
            "{walks}: {} times a compare-and-swap; two threads {} times one; interleaved {} times \
             a Mutex of aarch64-paging",
            ratio(alone, floor),
            ratio(alone, disjoint),
            ratio(mutex, interleaved)
        );
    }
}
