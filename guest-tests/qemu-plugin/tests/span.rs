// SPDX-License-Identifier: GPL-2.0-or-later
//! Test of a span in QEMU with a program whose counts are known, `span.S` beside this file.
//!
//! The test needs QEMU, the plugin's release build and a compiler for arm64, so it is ignored by
//! default. `GRANULE_QEMU` names the emulator, by default `qemu-system-aarch64`:
//!
//! ```text
//! cargo build --release --package granule-qemu-plugin
//! cargo test --package granule-qemu-plugin --test span -- --ignored
//! ```

#![allow(clippy::unwrap_used, reason = "a panic names the line of a failed test")]

mod bare_metal;

use std::{collections::BTreeMap, fs};

use bare_metal::{build, emulator, run_successfully};
use serde_json::Value;

const ARGUMENTS: &str = "span=measured:40080400,instructions=on,stores=on,barriers=on,blocks=on";
/// Executions of an instruction with the comment `//+ LOOPS`.
const LOOPS: u64 = 1000;

/// Returns the segments of a run.
fn segments(arguments: &str) -> Vec<Value> {
    let directory = tempfile::tempdir().unwrap();
    let program = build("span.S", &[], directory.path());
    let counts = directory.path().join("counts");
    let arguments = format!("out={}{arguments}", counts.display());
    run_successfully(&mut emulator(&program, 1, &arguments));
    let text = fs::read_to_string(counts).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the counts of the comments in the source.
fn expected_counts() -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    let code = include_str!("span.S").lines().filter(|line| line.starts_with("    "));
    for (_, comment) in code.filter_map(|line| line.split_once("//=")) {
        let (name, executions) = comment.split_once("//+").unwrap_or((comment, ""));
        let executions = if executions.is_empty() { 1 } else { LOOPS };
        for name in ["instructions", name.trim()].into_iter().filter(|name| !name.is_empty()) {
            *counts.entry(name.to_owned()).or_default() += executions;
        }
    }
    counts
}

#[test]
#[ignore = "runs QEMU"]
fn each_call_is_a_segment_with_the_counts_of_its_instructions() {
    let segments = segments(&format!(",{ARGUMENTS}"));

    let head = |segment: &Value| (segment["mark"].as_u64(), segment["span"].is_string());
    let heads: Vec<_> = segments.iter().take(7).map(head).collect();
    let (outside, phase) = (Some(0x60), Some(0x61));
    let expected = [
        (outside, false),
        (outside, true),
        (outside, false),
        (phase, false),
        (phase, true),
        (phase, false),
        (outside, false),
    ];
    assert_eq!(heads, expected, "{segments:#?}");
    for span in [&segments[1], &segments[4]] {
        let counts: BTreeMap<String, u64> = serde_json::from_value(span["counts"].clone()).unwrap();
        assert_eq!(counts, expected_counts());
        // All blocks have low addresses, which share a count: executions and instructions.
        assert_eq!(span["blocks"]["0"][1], counts["instructions"]);
    }
    // Stores are counted by blocks, and the mark is inside of one.
    let stores = |index: usize| segments[index]["counts"]["stores"].as_u64().unwrap_or(0);
    assert_eq!(stores(2) + stores(3), 2);
    assert_eq!(segments[5]["counts"]["ISB"], 1);
}

#[test]
#[ignore = "runs QEMU"]
fn without_the_arguments_only_maintenance_is_counted() {
    let segments = segments("");

    assert_eq!(segments[0]["counts"], serde_json::json!({"TLBI ALLE2": 1, "TLBI VALE2IS": 1}));
    assert!(segments.iter().all(|segment| segment["span"].is_null()));
}
