// SPDX-License-Identifier: GPL-2.0-or-later
//! Test of the trace in QEMU with a program whose events are known, `trace.S` beside this file.
//!
//! The test needs QEMU 10, the plugin's release build and a compiler for arm64, so it is ignored by
//! default. `GRANULE_QEMU` names the emulator, by default `qemu-system-aarch64`:
//!
//! ```text
//! cargo build --release --package granule-qemu-plugin
//! cargo test --package granule-qemu-plugin --test trace -- --ignored
//! ```

#![allow(clippy::unwrap_used, reason = "a panic names the line of a failed test")]

mod bare_metal;

use std::fs;

use bare_metal::{build, emulator, run_successfully};

/// Arguments for the functions of the program.
const ARGUMENTS: &str =
    "stacks=off,verify=on,function=7:40080400:40080440,lock=7:c,free=40081000:10";

/// Returns the lines of a run.
fn trace() -> Vec<String> {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let program = build("trace.S", &[], directory.path());
    let (counts, trace) = (path("counts"), path("trace"));
    let arguments = format!("out={},trace={},{ARGUMENTS}", counts.display(), trace.display());
    run_successfully(&mut emulator(&program, 1, &arguments));
    fs::read_to_string(trace).unwrap().lines().map(str::to_owned).collect()
}

#[test]
#[ignore = "runs QEMU 10"]
fn every_instruction_has_the_events_of_its_comment() {
    let lines = trace();

    let source = include_str!("trace.S");
    let comments = source.lines().filter_map(|line| line.split_once("//= ")).map(|(_, text)| text);
    let expected: Vec<_> = comments.flat_map(|text| text.split("; ")).collect();
    // The identification registers of `-cpu max` differ between versions of QEMU.
    let events = lines.iter().filter(|line| line.starts_with("0 "));
    let (identification, events): (Vec<_>, Vec<_>) = events.partition(|line| line.contains(" id "));
    assert_eq!(events, expected);
    assert_eq!(identification.len(), 3);
    let comments: Vec<_> = lines.iter().filter(|line| line.starts_with('#')).collect();
    let end = format!("# end events={} skipped=tlbi-vae2is:1", expected.len() + 3);
    assert_eq!(comments, [&"# verify tables=0 different=0".to_owned(), &end]);
}

#[test]
#[ignore = "runs QEMU 10"]
fn a_run_repeats_exactly() {
    assert_eq!(trace(), trace());
}
