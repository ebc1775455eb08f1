// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results that different builds of the programs made.

use granule_types::record::{GRANULE, PLUGIN, Record};

use super::{compare, options, two_sides};
use crate::{ComparisonSet, SetupField, render, sample::samples};

/// Returns the records with these digests of programs.
fn made_by(mut records: Vec<Record>, programs: &[(&str, &str)]) -> Vec<Record> {
    for record in &mut records {
        let programs = programs.iter().map(|(name, hash)| ((*name).to_owned(), hash.repeat(32)));
        record.programs = programs.collect();
    }
    records
}

const NOTE: &str = "The two sides ran different builds of granule and plugin, which alone change \
                    counts and schedules.";

#[test]
fn other_builds_of_the_programs_are_noted_and_not_refused() {
    let [before, after] = two_sides();
    let before = made_by(before, &[(GRANULE, "0a"), (PLUGIN, "0b")]);

    let other = compare(&before, &made_by(after.clone(), &[(GRANULE, "1a"), (PLUGIN, "1b")]));
    let equal = compare(&before, &made_by(after.clone(), &[(GRANULE, "0a"), (PLUGIN, "0b")]));

    let (other, equal) = (other.unwrap(), equal.unwrap());
    assert_eq!((&other.notes, &equal.notes), (&vec![NOTE.to_owned()], &Vec::new()));
    let [text, html] = [render::text(&other), render::html(&other)];
    assert!(text.contains("different builds of granule"), "{text}");
    assert!(html.contains("granule 1a1a1a1a1a1a, plugin 1b1b1b1b1b1b"), "{html}");
    assert_eq!(other.configurations, equal.configurations, "the judgement is the same");
}

#[test]
fn unknown_programs_are_not_noted() {
    let [before, after] = two_sides();
    let known = |records: &[Record]| made_by(records.to_vec(), &[(GRANULE, "0a")]);
    let plugin = |records: &[Record]| made_by(records.to_vec(), &[(PLUGIN, "0b")]);

    for (before, after) in [
        (before.clone(), after.clone()),
        (known(&before), after.clone()),
        (before.clone(), known(&after)),
        (plugin(&before), known(&after)),
    ] {
        let comparison = compare(&before, &after).unwrap();

        assert_eq!(comparison.notes, Vec::<String>::new());
    }
}

#[test]
fn programs_are_compared_within_configurations_on_both_sides() {
    let [before, after] = two_sides();
    let [before, after] = [before, after].map(|records| made_by(records, &[(GRANULE, "0a")]));
    let mut alone = made_by(vec![before[0].clone()], &[(GRANULE, "1a")]);
    alone[0].config.vcpus = 4;
    let mut mixed = after.clone();
    mixed[0].programs = made_by(vec![after[0].clone()], &[(GRANULE, "1a")]).remove(0).programs;

    let on_one_side = compare(&[before.clone(), alone].concat(), &after).unwrap();
    let in_one_run = compare(&before, &mixed).unwrap();

    let is_noted = |notes: &[String]| notes.iter().any(|note| note.contains("different builds"));
    assert!(!is_noted(&on_one_side.notes) && is_noted(&in_one_run.notes));
}

#[test]
fn configurations_of_one_kernel_are_noted_too() {
    let [small, _] = two_sides();
    let mut large = made_by(small.clone(), &[(GRANULE, "1a")]);
    large.iter_mut().for_each(|record| record.config.vcpus = 32);
    let both = [made_by(small, &[(GRANULE, "0a")]), large].concat();

    let set = ComparisonSet::by(&samples(&both), SetupField::Vcpus, &options()).unwrap();

    assert!(set.comparisons()[0].notes[0].contains("different builds of granule"));
}
