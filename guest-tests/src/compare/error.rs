// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Why two sets of results do not compare.

use thiserror::Error;

use super::Difference;

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
        "no phase of any configuration is on both sides. Before: {}. After: {}. \
         Run the same on both.",
        .before.join("; "),
        .after.join("; ")
    )]
    NothingInCommon {
        /// The configurations before.
        before: Vec<String>,
        /// The configurations after.
        after: Vec<String>,
    },
}

fn list(differences: &[Difference]) -> String {
    differences
        .iter()
        .map(|difference| format!("\n  {difference}"))
        .collect()
}
