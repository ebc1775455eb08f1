// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Limits of the figures of a comparison, for its reader.

use std::collections::BTreeSet;

use super::{group::Group, table::Comparison};
use crate::sample::Step;

const ONE_EMULATED_RUN: &str = "One run shows one schedule of the vCPUs: its virtual times and \
    counts are exact for that one. Compare several seeds.";
const ONE_RUN: &str = "One run proves nothing for times: repeat it. (From an emulator, times and \
    counts are exact for one schedule.)";
const RAW: &str =
    "Logs do not name kernel, CPU or emulator: check that the two sides may be compared.";
const NOT_OBTAINED: &str = "Neither side recorded the page sizes that back the memory.";
const SAME_IMAGE: &str = "Both sides ran the same kernel image.";
const SAME_RELEASE: &str =
    "The results do not distinguish the two kernels: check that they differ.";
const OTHER_SEEDS: &str = "The two sides ran with different seeds.";

/// Returns the notes on a comparison of these groups; `raw` if all of them are from inputs without
/// a host.
pub fn notes(comparison: &Comparison, before: &[Group], after: &[Group], raw: bool) -> Vec<String> {
    let (one, two) = (&comparison.before, &comparison.after);
    let image = one.image_sha256.as_ref();
    let unknown = image.is_none() && two.image_sha256.is_none();
    let times = comparison.rows().map(|(_, phase)| phase.time);
    let mut spreads = times.flat_map(|time| [time.before, time.after]).flatten();
    let single = spreads.any(|spread| spread.runs == 1);
    let mut samples = before.iter().chain(after).flat_map(|group| &group.samples);
    let is_obtained = samples.any(|sample| sample.obtained.is_some());
    let notes = [
        (raw, RAW),
        (!raw && unknown && one.kernel == two.kernel, SAME_RELEASE),
        (image.is_some() && image == two.image_sha256.as_ref(), SAME_IMAGE),
        (!raw && !is_obtained, NOT_OBTAINED),
        (single && comparison.is_emulated(), ONE_EMULATED_RUN),
        (single && !comparison.is_emulated(), ONE_RUN),
        (seeds(before) != seeds(after), OTHER_SEEDS),
    ];
    let notes = notes.into_iter().filter(|(holds, _)| *holds);
    let mut notes: Vec<String> = notes.map(|(_, note)| note.to_owned()).collect();
    for (label, here, there) in [(&one.label, before, after), (&two.label, after, before)] {
        let alone = only_in(here, there);
        if !alone.is_empty() {
            notes.push(format!("Only in {label}, not compared: {}.", alone.join("; ")));
        }
    }
    notes
}

fn seeds(groups: &[Group]) -> BTreeSet<u64> {
    let samples = groups.iter().flat_map(|group| &group.samples);
    samples.map(|sample| sample.seed).collect()
}

/// Names the configurations, and the steps of common ones, that only the first side has.
fn only_in(here: &[Group], there: &[Group]) -> Vec<String> {
    let mut alone = Vec::new();
    for group in here {
        let name = group.key.setup.name();
        let Some(other) = there.iter().find(|other| other.key == group.key) else {
            alone.push(name);
            continue;
        };
        let (steps, known) = (group.steps(), other.steps());
        let missing: Vec<_> = steps.difference(&known).map(|step| Step::name(step)).collect();
        if !missing.is_empty() {
            alone.push(format!("{} of {name}", missing.join(", ")));
        }
    }
    alone
}
