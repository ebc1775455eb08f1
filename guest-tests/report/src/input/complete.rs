// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Completeness of results whose lines do not record how many follow: a file that is cut off between
//! two lines is recognised by the phases that its runs lack.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;

use crate::sample::{Sample, Setup};
use granule_types::{phase::Phase, record::Record};

/// Error returned when a run lacks phases of other runs.
#[derive(Debug, Error)]
#[error(
    "seed {seed}, iteration {iteration} of {configuration} lacks {}, which other runs have: the file \
     is cut off; run the test again, or delete the run",
    .missing.iter().map(|phase| phase.name()).collect::<Vec<_>>().join(", ")
)]
pub struct Incomplete {
    configuration: String,
    seed: u64,
    iteration: u32,
    missing: Vec<Phase>,
}

/// Checks that every run has the phases of the other runs of its configuration, and that the last
/// run does not end where runs of its engine go on.
pub fn check(records: &[Record]) -> Result<(), Incomplete> {
    /// Phases of each run, by seed and iteration.
    type Phases = BTreeMap<(u64, u32), BTreeSet<Phase>>;
    let mut configurations: Vec<((Setup, &str), Phases)> = Vec::new();
    for record in records {
        let key = (Sample::from(record).setup, record.engine.as_str());
        let known = configurations.iter().position(|(other, _)| *other == key);
        let at = known.unwrap_or_else(|| {
            configurations.push((key, Phases::new()));
            configurations.len() - 1
        });
        let run = (record.config.seed, record.config.iteration);
        configurations[at].1.entry(run).or_default().insert(record.phase);
    }
    check_last(records)?;
    for ((setup, _), runs) in configurations {
        let all: BTreeSet<Phase> = runs.values().flatten().copied().collect();
        let mut runs = runs.into_iter();
        if let Some(((seed, iteration), present)) = runs.find(|(_, phases)| *phases != all) {
            return Err(Incomplete {
                configuration: setup.name(),
                seed,
                iteration,
                missing: all.difference(&present).copied().collect(),
            });
        }
    }
    Ok(())
}

/// Checks that the last run does not have only the first phases of its engine's runs.
fn check_last(records: &[Record]) -> Result<(), Incomplete> {
    let Some(last) = records.last() else {
        return Ok(());
    };
    let of_engine = || records.iter().filter(|record| record.engine == last.engine);
    let all: BTreeSet<Phase> = of_engine().map(|record| record.phase).collect();
    let of_run = of_engine().filter(|record| record.config == last.config);
    let present: BTreeSet<Phase> = of_run.map(|record| record.phase).collect();
    if present == all || !all.iter().take(present.len()).eq(&present) {
        return Ok(());
    }
    Err(Incomplete {
        configuration: Sample::from(last).setup.name(),
        seed: last.config.seed,
        iteration: last.config.iteration,
        missing: all.difference(&present).copied().collect(),
    })
}
