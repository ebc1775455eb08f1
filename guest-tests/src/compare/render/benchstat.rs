// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The Go benchmark format, which `benchstat` reads: a line for each run. Both sides stand in one
//! text and are told apart by a configuration line, so the command is `benchstat -col side FILE`.
//! It is the only such line: any other that differs would make two tables of them.

use std::fmt::Write;

use super::super::{Comparison, Configuration, PhaseChange};

/// The comparison as benchmark lines.
pub fn benchstat(comparison: &Comparison) -> String {
    let mut out = String::new();
    for name in ["before", "after"] {
        // Writing into a String cannot fail.
        let _ = writeln!(out, "side: {name}\n");
        for (configuration, phase) in comparison.rows() {
            let benchmark = benchmark(configuration, phase);
            let runs = if name == "before" {
                &phase.runs.before
            } else {
                &phase.runs.after
            };
            for ns in runs {
                let _ = writeln!(out, "{benchmark} 1 {ns} ns/op");
            }
        }
        out.push('\n');
    }
    out
}

/// `BenchmarkStage2/phase=create/backing=anonymous/...`: without spaces, and never ending in a dash
/// and a number, which would be taken for a count of processors.
fn benchmark(configuration: &Configuration, phase: &PhaseChange) -> String {
    let setup = &configuration.setup;
    let mut name = format!("BenchmarkStage2/phase={}", phase.phase);
    let mut part = |key: &str, value: Option<String>| {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            name += &format!("/{key}={}", word(&value));
        }
    };
    part("engine", Some(configuration.engine.clone()));
    part(
        "subject",
        Some(setup.subject.clone()).filter(|s| *s != configuration.engine),
    );
    part("mode", Some(setup.mode.clone()));
    for (key, value) in &setup.options {
        part(&word(key), Some(value.clone()));
    }
    part("prefault", setup.prefault.then(|| "on".to_owned()));
    part("backing", setup.backing.map(|backing| backing.to_string()));
    part("size", setup.memory.map(|memory| memory.to_string()));
    part("vcpus", setup.vcpus.map(|vcpus| vcpus.to_string()));
    name
}

fn word(text: &str) -> String {
    let plain = |c: char| {
        if c.is_whitespace() || c == '/' || c == '-' {
            '_'
        } else {
            c
        }
    };
    text.chars().map(plain).collect()
}
