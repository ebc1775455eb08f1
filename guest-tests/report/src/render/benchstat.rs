// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The Go benchmark format, which `benchstat` reads: a line for each run. Both sides are in one text
//! below a configuration line each, so the command is `benchstat -col side FILE`. Any further
//! configuration line that differs would split the table.

use std::fmt::Write;

use crate::comparison::{Comparison, Configuration, PhaseChange};

/// Renders the time of each run, or the judged count, as benchmark lines.
pub fn benchstat(comparison: &Comparison) -> String {
    let mut out = String::new();
    // A unit is one word; of an unknown unit, benchstat takes less as better.
    let unit = if comparison.judges_time() {
        "ns/op".to_owned()
    } else {
        let words: Vec<&str> = comparison.metric.split_whitespace().collect();
        format!("{}/op", words.join("-"))
    };
    for side in ["before", "after"] {
        // Writing into a String cannot fail.
        let _ = writeln!(out, "side: {side}\n");
        for (configuration, phase) in comparison.rows() {
            let times = Some(&phase.runs).filter(|_| comparison.judges_time());
            let Some(runs) = times.or(phase.counted.as_ref()) else {
                continue;
            };
            let runs = if side == "before" { &runs.before } else { &runs.after };
            let benchmark = benchmark(configuration, phase);
            for figure in runs {
                let _ = writeln!(out, "{benchmark} 1 {figure} {unit}");
            }
        }
        out.push('\n');
    }
    out
}

/// Returns the name `BenchmarkStage2/phase=create/backing=anonymous/...`: without spaces, and
/// without a final dash and number, which would be taken for a count of processors.
fn benchmark(configuration: &Configuration, phase: &PhaseChange) -> String {
    let setup = &configuration.setup;
    let subject = Some(setup.subject.clone()).filter(|s| *s != configuration.engine);
    let mut parts = vec![
        ("engine", Some(configuration.engine.clone())),
        ("subject", subject),
        ("mode", Some(setup.mode.clone())),
    ];
    parts.extend(setup.options.iter().map(|(key, value)| (key.as_str(), Some(value.clone()))));
    parts.extend([
        ("prefault", setup.prefault.then(|| "on".to_owned())),
        ("backing", setup.backing.map(|backing| backing.to_string())),
        ("size", setup.memory.map(|memory| memory.to_string())),
        ("vcpus", setup.vcpus.map(|vcpus| vcpus.to_string())),
    ]);
    let mut name = format!("BenchmarkStage2/phase={}", phase.phase);
    for (key, value) in parts {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            let _ = write!(name, "/{}={}", word(key), word(&value));
        }
    }
    name
}

fn word(text: &str) -> String {
    text.replace(|c: char| c.is_whitespace() || c == '/' || c == '-', "_")
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
        let (before, after) = (side(&[10, 12], &[30, 31]), patched(side(&[8, 9], &[30, 33])));
        let options = Options { metric: metric.map(str::to_owned), ..Options::default() };
        benchstat(&Comparison::of(&samples(&before), &samples(&after), &options).unwrap())
    }

    #[test]
    fn a_judged_count_is_printed_where_a_step_has_it() {
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
            "{text}"
        );
    }

    #[test]
    fn every_run_has_a_line_below_its_side() {
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
    fn a_name_is_one_word_for_any_options() {
        let text = printed(None, |record| {
            let options = [("dirty-log", "manual"), ("pin", "0-3 8/9"), ("empty", "")];
            let options = options.map(|(name, value)| (name.to_owned(), value.to_owned()));
            record.config.options = options.into();
            record.config.prefault = true;
        });

        for line in text.lines().filter(|line| line.starts_with("Benchmark")) {
            let words: Vec<&str> = line.split(' ').collect();
            assert_eq!((words.len(), words[1], words[3]), (4, "1", "ns/op"), "{line}");
            assert!(!words[0].contains('-'), "{line}");
            assert!(line.contains("/dirty_log=manual/pin=0_3_8_9/prefault=on/"), "{line}");
        }
        assert_eq!(text.matches("side:").count(), 2, "a further line would split the table");
    }
}
