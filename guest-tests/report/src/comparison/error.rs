// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Errors of a comparison.

use thiserror::Error;

use crate::provenance::Difference;

/// Error returned when two sides cannot be compared.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CompareError {
    /// A side has no results.
    #[error("{0} holds no results: run the test again")]
    Empty(String),
    /// The provenance differs or is unknown.
    #[error(
        "the two sides do not compare: these differ or are unknown:{}\n\
         Run both on the same host, or add --force to compare anyway.",
        .0.iter().map(|difference| format!("\n  {difference}")).collect::<String>()
    )]
    Unequal(Vec<Difference>),
    /// The sides have no step of a configuration in common.
    #[error(
        "{} of any configuration is on both sides. Before: {}. After: {}. Run the same test on both.",
        if .phases.is_empty() { "no phase".to_owned() } else { format!("none of {}", .phases.join(", ")) },
        .before.join("; "),
        .after.join("; ")
    )]
    NothingInCommon {
        /// Configurations before.
        before: Vec<String>,
        /// Configurations after.
        after: Vec<String>,
        /// Phases asked for; empty for all.
        phases: Vec<String>,
    },
    /// The count to judge is not on both sides.
    #[error(
        "--metric '{name}' is not counted on both sides: {}",
        if .known.is_empty() { "no count is".to_owned() } else { format!("expected one of {}", .known.join(", ")) }
    )]
    Metric {
        /// Name asked for.
        name: String,
        /// Counts that both sides have.
        known: Vec<String>,
    },
    /// Paired sides have different runs.
    #[error("--paired needs the same runs on both sides, but those of {0} differ: omit --paired")]
    Unpaired(String),
}
