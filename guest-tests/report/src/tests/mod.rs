// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Comparisons as a whole: verdicts, provenance, formats.

mod formats;
mod provenance;
mod verdicts;

use crate::{
    CompareError, Comparison, Options,
    fixture::{patched, runs},
    samples,
};
use granule_types::record::Record;

/// Returns options with a minimum effect of 3%.
fn options() -> Options {
    Options { min_effect: Some(0.03), ..Options::default() }
}

fn compare_by(
    before: &[Record],
    after: &[Record],
    options: &Options,
) -> Result<Comparison, CompareError> {
    Comparison::of(&samples(before), &samples(after), options)
}

fn compare(before: &[Record], after: &[Record]) -> Result<Comparison, CompareError> {
    compare_by(before, after, &options())
}

/// Returns two sides of three seeds: create improves, update regresses.
fn pair() -> [Vec<Record>; 2] {
    let after = runs(&[12_613, 11_900, 13_000], &[560_000, 559_000, 571_500]);
    [runs(&[42_209, 40_100, 43_000], &[522_255, 519_000, 530_000]), patched(after)]
}
