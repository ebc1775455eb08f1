// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results: reading and writing `granule.result/1`, and comparing two sets of records.

mod comparison;
pub mod input;
mod judge;
mod provenance;
pub mod render;
pub mod results;
mod sample;
mod side;
mod spread;
mod stats;

#[cfg(test)]
mod fixture;
#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;

pub use self::{
    comparison::{
        CompareError, Comparison, Configuration, Options, PhaseChange, Runs, SCHEMA, Together,
        command_line,
    },
    judge::{Tested, Verdict},
    provenance::Difference,
    sample::{Sample, Setup, Step, samples},
    side::{Side, series_line},
    spread::{Change, Spread},
};
