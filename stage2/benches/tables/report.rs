// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Criterion's samples as one table and one chart; each figure is the fastest sample.

use std::{collections::BTreeMap, fmt::Write, path::Path};

use serde_json::Value;

/// Nanoseconds by group and name.
type Figures = BTreeMap<String, BTreeMap<String, f64>>;

fn json(path: &Path) -> Option<Value> {
    serde_json::from_str(&std::fs::read_to_string(path).ok()?).ok()
}

fn one(dir: &Path) -> Option<(String, String, f64)> {
    let benchmark = json(&dir.join("new/benchmark.json"))?;
    let samples = json(&dir.join("new/sample.json"))?;
    let numbers = |key: &str| Some(samples[key].as_array()?.iter().filter_map(Value::as_f64));
    let fastest = numbers("times")?
        .zip(numbers("iters")?)
        .map(|(time, iterations)| time / iterations)
        .min_by(f64::total_cmp)?;
    let part = |key: &str| Some(benchmark[key].as_str()?.to_owned());
    Some((part("group_id")?, part("function_id")?, fastest))
}

fn collect(dir: &Path, found: &mut Figures) {
    if let Some((group, name, ns)) = one(dir) {
        found.entry(group).or_default().insert(name, ns);
    }
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            collect(&entry.path(), found);
        }
    }
}

/// Returns the engine's figure of a group.
fn engine(names: &BTreeMap<String, f64>) -> Option<f64> {
    names.get("granule").or(names.get("granule, one walk")).copied()
}

/// Returns the name and figure of the fastest other crate of a group.
fn best_other(names: &BTreeMap<String, f64>) -> Option<(&str, f64)> {
    let is_other = |name: &str| !name.starts_with("granule") && !name.starts_with("floor");
    names
        .iter()
        .filter(|(name, _)| is_other(name))
        .map(|(name, ns)| (name.as_str(), *ns))
        .min_by(|a, b| a.1.total_cmp(&b.1))
}

/// Prints every figure with its ratio to the engine's, and writes the chart.
pub fn report(samples: &Path, chart: &Path) -> std::io::Result<()> {
    let mut found = BTreeMap::new();
    collect(samples, &mut found);
    println!("\n| operation | table | ns | × granule |\n|---|---|---|---|");
    for (group, names) in &found {
        for (name, ns) in names {
            let ratio = engine(names).map_or(String::new(), |own| format!("{:.2}", ns / own));
            // A page takes picoseconds if whole tables are unmapped.
            let digits = if *ns < 0.1 { 4 } else { 2 };
            println!("| {group} | {name} | {ns:.digits$} | {ratio} |");
        }
    }
    std::fs::write(chart, svg(&found))
}

const ROW: f64 = 22.0;
const LABELS: f64 = 260.0;
/// Width of a factor of ten.
const DECADE: f64 = 150.0;

/// Draws for each operation how many times the engine's time the fastest other crate takes.
fn svg(found: &Figures) -> String {
    let rows: Vec<_> = found
        .iter()
        .filter_map(|(group, names)| Some((group, best_other(names)?, engine(names)?)))
        .collect();
    let height = ROW * (rows.len() as f64 + 2.5);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"900\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <!-- SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause -->\n\
         <rect width=\"900\" height=\"{height}\" fill=\"white\"/>\n\
         <text x=\"{LABELS}\" y=\"16\">time of the fastest other crate, relative to granule</text>\n"
    );
    for ((group, (other, ns), own), at) in rows.iter().zip(1u32..) {
        let ratio = ns / own;
        let (y, width) = (ROW * f64::from(at) + 4.0, DECADE * ratio.log10());
        let (x, width) = (LABELS + width.min(0.0), width.abs());
        let colour = if ratio >= 1.0 { "#2a7" } else { "#c44" };
        let _ = writeln!(
            out,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{group}</text>\
             <rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"16\" fill=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"{}\">{ratio:.2}× {other}</text>",
            LABELS - 8.0,
            y + 12.0,
            LABELS + DECADE * ratio.log10().max(0.0) + 6.0,
            y + 12.0,
        );
    }
    out.push_str("</svg>\n");
    out
}
