// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results of stage-2 page-fault measurements: reading and writing `granule.result/1`, and
//! comparing two sides.
//!
//! ```text
//! results ─┐
//!          ├─ input ─ sample ─ judge ─ comparison ─ render
//! logs  ───┘           stats ───┘      provenance
//! ```
//!
//! [`results`] defines the format. [`input`] reads results, run directories, logs of the kernel's
//! tests and criterion's files into [`Sample`]s. [`Comparison::new`] pairs the samples of both
//! sides, checks their provenance, and computes a test and a verdict for each row. [`render`]
//! prints a [`Comparison`]; its module `columns` declares the columns of all tables.

mod comparison;
pub mod digest;
pub mod input;
mod judge;
mod metric;
mod provenance;
pub mod render;
pub mod results;
mod sample;
mod stats;

#[cfg(test)]
mod tests;

pub use self::{
    comparison::{
        CompareError, Comparison, ComparisonOptions, ComparisonSet, FailOn, LabelledSide,
        SetupField, command_line, set_command_line,
    },
    judge::Verdict,
    metric::{FUNCTION_COUNTS, Metric},
    provenance::{Difference, series_line},
    sample::Sample,
    stats::Spread,
};
