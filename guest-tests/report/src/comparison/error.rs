// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Why two sets of results do not compare.

use thiserror::Error;

use crate::provenance::Difference;

/// Why two sets of results do not compare.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CompareError {
    /// A side has no results.
    #[error("{0} holds no results: run the test again")]
    Empty(String),
    /// The provenance is unequal or not known.
    #[error(
        "the two sides do not compare, because these are unequal or unknown:{}\n\
         Run both on the same host, or give --force to compare all the same.",
        list(.0)
    )]
    Unequal(Vec<Difference>),
    /// Neither side ran what the other did.
    #[error(
        "{} of any configuration is on both sides. Before: {}. After: {}. Run the same on both.",
        if .phases.is_empty() { "no phase".to_owned() } else { format!("none of {}", .phases.join(", ")) },
        .before.join("; "),
        .after.join("; ")
    )]
    NothingInCommon {
        /// The configurations before.
        before: Vec<String>,
        /// The configurations after.
        after: Vec<String>,
        /// The phases asked for; empty for all.
        phases: Vec<String>,
    },
    /// What is to be judged was never counted.
    #[error(
        "'{name}' was counted nowhere on both sides: {}",
        if .known.is_empty() { "nothing was".to_owned() } else { format!("choose one of {}", .known.join(", ")) }
    )]
    Metric {
        /// What was asked for.
        name: String,
        /// What there is.
        known: Vec<String>,
    },
    /// Runs said to be taken in turns are not equally many.
    #[error(
        "the runs of {0} are not the same on both sides, so they cannot have been taken in turns: \
         leave --paired away"
    )]
    Unpaired(String),
}

fn list(differences: &[Difference]) -> String {
    differences
        .iter()
        .map(|difference| format!("\n  {difference}"))
        .collect()
}
