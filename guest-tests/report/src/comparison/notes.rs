// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a reader must know to judge the figures of a comparison.

use super::{Comparison, group, group::Group};

/// One run a side, under an emulator.
const ONE_EMULATED_RUN: &str = "One run proves nothing for times: it is one interleaving of the \
    vCPUs. Its virtual times and counts are exact for that one; compare over several seeds.";
/// One run a side, of anything else.
const ONE_RUN: &str = "One run proves nothing for times: repeat it. (From an emulator, times and \
    counts are exact for the one interleaving that ran.)";
const RAW: &str = "Logs say nothing of kernel, CPU or emulator: whether the two may be \
    compared is for you to know.";
const NOT_OBTAINED: &str =
    "That the memory was really backed as asked was checked on neither side.";
const SAME_IMAGE: &str = "Both sides ran the same kernel image.";
const SAME_RELEASE: &str = "Nothing recorded tells the two kernels apart: that they differ is for \
    you to know.";

/// The notes on a comparison of these groups; `raw` where all of them were read from logs.
pub fn notes(comparison: &Comparison, before: &[Group], after: &[Group], raw: bool) -> Vec<String> {
    let mut notes = Vec::new();
    let mut note = |holds: bool, text: &str| {
        if holds {
            notes.push(text.to_owned());
        }
    };
    let (one, two) = (&comparison.before, &comparison.after);
    let image = one.image_sha256.as_ref();
    let unknown = image.is_none() && two.image_sha256.is_none();
    let mut groups = before.iter().chain(after);
    let single = comparison
        .configurations
        .iter()
        .flat_map(|configuration| &configuration.phases)
        .flat_map(|phase| [phase.time.before, phase.time.after])
        .flatten()
        .any(|spread| spread.runs == 1);
    note(raw, RAW);
    note(!raw && unknown && one.kernel == two.kernel, SAME_RELEASE);
    note(
        image.is_some() && image == two.image_sha256.as_ref(),
        SAME_IMAGE,
    );
    note(!raw && !groups.any(Group::has_obtained), NOT_OBTAINED);
    note(single && comparison.is_emulated(), ONE_EMULATED_RUN);
    note(single && !comparison.is_emulated(), ONE_RUN);
    note(
        group::seeds(before) != group::seeds(after),
        "The two sides ran with different seeds.",
    );
    for (label, here, there) in [(&one.label, before, after), (&two.label, after, before)] {
        let alone = group::only_in(here, there);
        if !alone.is_empty() {
            notes.push(format!(
                "Only in {label}, not compared: {}.",
                alone.join("; ")
            ));
        }
    }
    notes
}
