// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use super::{compare, compare_by, options, pair};
use crate::{Comparison, Options, input::page_table_log, render};
use granule_types::{phase::Phase, record::Record};

/// Compares a text with a golden file; `GOLDEN=write` writes the file instead.
fn golden(name: &str, text: &str) {
    let path = format!("{}/golden/{name}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("GOLDEN").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    assert_eq!(text, std::fs::read_to_string(&path).unwrap(), "{name}");
}

#[test]
fn text_markdown_and_json_match_the_golden_files() {
    let [before, after] = pair();
    let options =
        Options { labels: ["base".to_owned(), "stage2-fault-path".to_owned()], ..options() };
    let comparison = compare_by(&before, &after, &options).unwrap();

    golden("pair.txt", &render::text(&comparison));
    golden("pair.md", &render::markdown(&comparison));
    golden("pair.json", &render::json(&comparison).unwrap());
}

#[test]
fn one_run_of_a_log_prints_with_its_notes() {
    let log = include_str!("../../golden/console.log");
    let faster = log.replace("0.003193280s", "0.001000000s");
    let [before, after] =
        [log, &faster].map(|log| page_table_log::records(&page_table_log::read(log).unwrap()));

    let comparison = compare(&before, &after).unwrap();

    golden("raw.txt", &render::text(&comparison));
}

fn assert_fits_into_a_mail(text: &str) {
    for line in text.lines() {
        assert!(line.len() <= 75, "{line}");
    }
}

#[test]
fn text_with_long_names_fits_into_a_mail() {
    let mut sides = pair();
    for record in sides.iter_mut().flatten() {
        record.counters.insert("TLBI RVAALE1ISNXS and then some".to_owned(), 7);
        record.host.emulator = Some("QEMU 7.2.22 ".to_owned() + &"-option value ".repeat(20));
    }
    let [before, after] = sides;
    assert_fits_into_a_mail(&render::text(&compare(&before, &after).unwrap()));
}

/// Returns nine rounds for two numbers of vCPUs, with options and counts of long names.
fn rounds(records: &[Record]) -> Vec<Record> {
    let mut rounds = Vec::new();
    for (round, vcpus) in (1..=9).flat_map(|round| [(round, 4), (round, 8)]) {
        for mut record in records.iter().filter(|r| r.phase == Phase::Create).cloned() {
            record.phase = Phase::Round;
            record.round = Some(round);
            record.config.vcpus = vcpus;
            let options = [("migrate", "4"), ("a-long-option", "and-a-long-value")];
            let options = options.map(|(name, value)| (name.to_owned(), value.repeat(3)));
            record.config.options = options.into();
            record.counters.insert("long_name_".repeat(9), 7);
            rounds.push(record);
        }
    }
    rounds
}

#[test]
fn text_with_many_steps_fits_into_a_mail() {
    let [before, after] = pair().map(|records| rounds(&records));
    let options =
        Options { labels: ["/a/path/of/one/word".repeat(9), "b".to_owned()], ..Options::default() };
    let text = render::text(&compare_by(&before, &after, &options).unwrap());

    assert_fits_into_a_mail(&text);
    let (_, overview) = text.split_once("Ratio of virtual times, after to before:").unwrap();
    for round in 1..=9 {
        let ends = ["\n", " "].map(|end| format!(" round-{round}{end}"));
        let found: usize = ends.iter().map(|end| overview.matches(end).count()).sum();
        assert_eq!(found, 1, "{text}");
    }
}

/// Returns the two sides with a text in every field that holds one.
fn with_text(text: &str) -> Comparison {
    let mut sides = pair();
    for record in sides.iter_mut().flatten() {
        let host = &mut record.host;
        for field in [&mut host.cpu, &mut host.emulator] {
            *field = Some(text.to_owned());
        }
        host.kernel += text;
        host.arch = text.to_owned();
        host.features = [(text.to_owned(), 1)].into();
        record.engine = text.to_owned();
        record.config.mode = text.to_owned();
        record.config.options = [(text.to_owned(), text.to_owned())].into();
        for counts in [&mut record.counters, &mut record.events, &mut record.gauges] {
            counts.insert(text.to_owned(), 7);
        }
    }
    let options = Options { labels: [text.to_owned(), text.to_owned()], ..Options::default() };
    let [before, after] = sides;
    compare_by(&before, &after, &options).unwrap()
}

#[test]
fn text_in_results_does_not_control_terminals_tables_or_test_runners() {
    let hostile = "x\u{1b}[31m\r\nnot ok 7 forged\n| a | b &lt; ~~c~~ \u{202e}\u{85}\0";
    let comparison = with_text(hostile);

    let markdown = render::markdown(&comparison);
    for text in [
        render::text(&comparison),
        markdown.clone(),
        render::html(&comparison),
        render::csv(&comparison),
        render::json(&comparison).unwrap(),
        render::ktap(&comparison),
        render::benchstat(&comparison),
    ] {
        let bad = |c: char| c != '\n' && c.is_control() || c == '\u{202e}';
        assert!(!text.contains(bad), "{text:?}");
        assert!(!text.contains("\nnot ok 7") && !text.contains("\n| a"), "{text}");
    }
    assert!(markdown.contains("\\&lt; \\~\\~c"), "{markdown}");
}

#[test]
fn csv_ktap_and_benchstat_agree() {
    let [before, after] = pair();
    let comparison = compare(&before, &after).unwrap();

    let csv = render::csv(&comparison);
    let ktap = render::ktap(&comparison);
    let benchstat = render::benchstat(&comparison);

    let columns: Vec<usize> = csv.lines().map(|line| line.split(',').count()).collect();
    let is_whole = |&count: &usize| count == columns[0] + 2;
    assert!(columns[1..].iter().all(is_whole), "the mode has two commas");
    assert!(csv.contains("create,time,42209000,"), "{csv}");
    let mut lines = csv.lines();
    assert!(lines.any(|line| line.contains("update,time") && line.contains(",regression")));
    for wanted in [
        "KTAP version 1\n1..2\n",
        "\nok 1 anonymous_hugetlb_2mb 64M 16 vCPUs create\n",
        "\nnot ok 2 anonymous_hugetlb_2mb 64M 16 vCPUs update\n",
    ] {
        assert!(ktap.contains(wanted), "{ktap}");
    }
    assert_eq!(benchstat.lines().filter(|line| line.starts_with("Benchmark")).count(), 12);
    for wanted in ["/phase=create/", "/vcpus=16 1 42209000 ns/op"] {
        assert!(benchstat.contains(wanted), "{benchstat}");
    }
}
