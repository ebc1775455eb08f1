// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Configuration of a run of the page-table test.
//!
//! A selected phase adds the phases that it depends on, which run and are reported like the others:
//! `update` and `rebuild` need the mappings of `create`, `update` needs dirty logging, and
//! `rebuild` after `update` needs dirty logging off. Clean-up (dirty logging off at the end,
//! backing dropped between iterations) always runs, and is reported only if selected.

use std::{fmt, str::FromStr, time::Duration};

use thiserror::Error;

use granule_types::phase::Phase;

/// Mapping of the region under test by the guest's stage-1 tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GuestMap {
    /// Maps the largest blocks that fit, so few stage-2 faults are on stage-1 tables.
    #[default]
    Blocks,
    /// Maps pages, as the kernel's test does: the first walk through each stage-1 table, in
    /// `create`, takes a stage-2 fault on it.
    Pages,
}

/// A migration workload: the vCPUs write continuously, and in each round the host collects the
/// dirty bitmap and copies its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Migration {
    /// Number of rounds before the vCPUs are stopped, at least one.
    pub rounds: u32,
    /// Minimum time from the start of a round to the collection of its bitmap.
    pub round_time: Duration,
}

/// A set of phases with all their dependencies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PhaseSelection(Vec<Phase>);

/// Error returned when a text does not select phases.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "each message describes its variant")]
pub enum ParsePhasesError {
    #[error(
        "unknown phase '{0}'; expected one of {list}",
        list = Phase::ALL.map(Phase::name).join(", ")
    )]
    Unknown(String),
    #[error("no phase is named; omit the option to select all phases")]
    Empty,
}

/// Error returned when the selected phases write nothing under dirty logging.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "--log-untouched needs a phase that writes under dirty logging, but the phases are {0}; \
     add update or omit --log-untouched"
)]
pub struct NothingLoggedError(PhaseSelection);

impl PhaseSelection {
    /// Returns all phases of an iteration.
    pub fn all() -> Self {
        Self(Phase::ALL.to_vec())
    }

    /// Returns the named phases and their dependencies.
    pub fn with_dependencies(named: &[Phase]) -> Self {
        let mut selected = named.to_vec();
        let mut index = 0;
        while let Some(&phase) = selected.get(index) {
            selected.extend_from_slice(match phase {
                Phase::Create
                | Phase::Exec
                | Phase::Round
                | Phase::Stop
                | Phase::WholeRun
                | Phase::Step => &[],
                Phase::LoggingOn | Phase::Unmap => &[Phase::Create],
                Phase::Update | Phase::LoggingOff => &[Phase::LoggingOn],
                Phase::Rebuild if named.contains(&Phase::Update) => &[Phase::LoggingOff],
                Phase::Rebuild => &[Phase::Create],
            });
            index += 1;
        }
        Self(Phase::ALL.into_iter().filter(|phase| selected.contains(phase)).collect())
    }

    /// Removes `create`, so that dirty logging starts on untouched memory and the faults of
    /// `update` and `rebuild` create the mappings.
    ///
    /// # Errors
    /// The selection does not contain `update`.
    pub fn without_create(mut self) -> Result<Self, NothingLoggedError> {
        if !self.contains(Phase::Update) {
            return Err(NothingLoggedError(self));
        }
        self.0.retain(|&phase| phase != Phase::Create);
        Ok(self)
    }

    /// Returns whether a phase is selected.
    pub fn contains(&self, phase: Phase) -> bool {
        self.0.contains(&phase)
    }
}

impl FromStr for PhaseSelection {
    type Err = ParsePhasesError;

    /// Reads phase names separated by commas.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let named = text
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty())
            .map(|name| {
                Phase::ALL
                    .into_iter()
                    .find(|phase| phase.name() == name)
                    .ok_or_else(|| ParsePhasesError::Unknown(name.to_owned()))
            })
            .collect::<Result<Vec<_>, _>>()?;
        if named.is_empty() {
            return Err(ParsePhasesError::Empty);
        }
        Ok(Self::with_dependencies(&named))
    }
}

impl fmt::Display for PhaseSelection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.0.iter().map(|phase| phase.name()).collect();
        f.write_str(&names.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_adds_its_dependencies_and_no_others() {
        for (text, expected) in [
            ("create", "create"),
            ("update", "create,logging-on,update"),
            ("rebuild", "create,rebuild"),
            ("rebuild, update", "create,logging-on,update,logging-off,rebuild"),
            ("logging-off", "create,logging-on,logging-off"),
            ("exec", "exec"),
            ("unmap,create", "create,unmap"),
        ] {
            assert_eq!(text.parse::<PhaseSelection>().unwrap().to_string(), expected, "{text}");
        }
    }

    #[test]
    fn all_phases_contain_their_dependencies() {
        assert_eq!(PhaseSelection::with_dependencies(&Phase::ALL), PhaseSelection::all());
    }

    #[test]
    fn logging_untouched_memory_removes_create_and_requires_update() {
        let rebuild = PhaseSelection::with_dependencies(&[Phase::Update, Phase::Rebuild]);
        let create = PhaseSelection::with_dependencies(&[Phase::Create]);

        assert_eq!(
            rebuild.without_create().unwrap().to_string(),
            "logging-on,update,logging-off,rebuild"
        );
        assert_eq!(create.clone().without_create(), Err(NothingLoggedError(create)));
    }

    #[test]
    fn unknown_and_empty_selections_are_refused() {
        assert_eq!(
            "create,destroy".parse::<PhaseSelection>(),
            Err(ParsePhasesError::Unknown("destroy".to_owned()))
        );
        assert_eq!(",".parse::<PhaseSelection>(), Err(ParsePhasesError::Empty));
    }
}
