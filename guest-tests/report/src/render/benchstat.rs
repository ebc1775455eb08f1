// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The Go benchmark format, which `benchstat` reads: a line for each run. Both sides stand in one
//! text and are told apart by a configuration line, so the command is `benchstat -col side FILE`.
//! It is the only such line: any other that differs would make two tables of them.

use std::fmt::Write;

use crate::comparison::{Comparison, Configuration, PhaseChange};

/// The comparison as benchmark lines: the time of each run, or the count that is judged.
pub fn benchstat(comparison: &Comparison) -> String {
    let mut out = String::new();
    let time = comparison.metric == "time";
    // A unit is one word; benchstat takes any, and of an unknown one less is better.
    let counts = comparison.metric.split_whitespace().collect::<Vec<_>>();
    let counts = format!("{}/op", counts.join("-"));
    for name in ["before", "after"] {
        // Writing into a String cannot fail.
        let _ = writeln!(out, "side: {name}\n");
        for (configuration, phase) in comparison.rows() {
            let benchmark = benchmark(configuration, phase);
            let (runs, unit) = if time {
                (&phase.runs, "ns/op")
            } else if let Some(counted) = &phase.counted {
                (counted, counts.as_str())
            } else {
                continue;
            };
            let runs = if name == "before" {
                &runs.before
            } else {
                &runs.after
            };
            for figure in runs {
                let _ = writeln!(out, "{benchmark} 1 {figure} {unit}");
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Options,
        fixture::{patched, runs},
        samples,
    };

    fn printed(
        metric: Option<&str>,
        change: impl Fn(&mut granule_types::record::Record),
    ) -> String {
        let side = |create: &[u64], update: &[u64]| {
            let mut records = runs(create, update);
            records.iter_mut().for_each(&change);
            records
        };
        let (before, after) = (
            side(&[10, 12], &[30, 31]),
            patched(side(&[8, 9], &[30, 33])),
        );
        let options = Options {
            metric: metric.map(str::to_owned),
            ..Options::default()
        };
        benchstat(&Comparison::of(&samples(&before), &samples(&after), &options).unwrap())
    }

    #[test]
    fn a_count_that_is_judged_is_what_is_printed() {
        let text = printed(Some("DC CIVAC"), |record| {
            if record.phase == granule_types::phase::Phase::Update {
                record.counters.insert("DC CIVAC".to_owned(), 0);
            }
        });

        let lines = text.lines().filter(|line| line.starts_with("Benchmark"));
        let ends: Vec<&str> = lines.map(|line| line.split_once(' ').unwrap().1).collect();
        assert_eq!(
            ends,
            [
                "1 8000 DC-CIVAC/op",
                "1 9600 DC-CIVAC/op",
                "1 6400 DC-CIVAC/op",
                "1 7200 DC-CIVAC/op"
            ],
            "not of a step that never has it: {text}"
        );
    }

    #[test]
    fn every_run_is_a_line_below_its_side() {
        let name = |phase| {
            format!(
                "BenchmarkStage2/phase={phase}/engine=kvm/mode=PA_bits:48,_VA_bits:48,_4K_pages/\
                 backing=anonymous_hugetlb_2mb/size=64M/vcpus=16"
            )
        };
        let (create, update) = (name("create"), name("update"));

        assert_eq!(
            printed(None, |_| ()),
            format!(
                "side: before\n\n\
                 {create} 1 10000 ns/op\n{create} 1 12000 ns/op\n\
                 {update} 1 30000 ns/op\n{update} 1 31000 ns/op\n\n\
                 side: after\n\n\
                 {create} 1 8000 ns/op\n{create} 1 9000 ns/op\n\
                 {update} 1 30000 ns/op\n{update} 1 33000 ns/op\n\n"
            )
        );
    }

    #[test]
    fn a_name_is_one_word_whatever_the_options_are() {
        let text = printed(None, |record| {
            let options = [("dirty-log", "manual"), ("pin", "0-3 8/9"), ("empty", "")];
            let options = options.map(|(name, value)| (name.to_owned(), value.to_owned()));
            record.config.options = options.into();
            record.config.prefault = true;
        });

        for line in text.lines().filter(|line| line.starts_with("Benchmark")) {
            let words: Vec<&str> = line.split(' ').collect();
            assert_eq!(
                (words.len(), words[1], words[3]),
                (4, "1", "ns/op"),
                "{line}"
            );
            // What ends in a dash and a number would be taken for a count of processors.
            assert!(!words[0].contains('-'), "{line}");
            assert!(
                line.contains("/dirty_log=manual/pin=0_3_8_9/prefault=on/"),
                "{line}"
            );
        }
        assert_eq!(
            text.matches("side:").count(),
            2,
            "another line would make another table"
        );
    }
}
