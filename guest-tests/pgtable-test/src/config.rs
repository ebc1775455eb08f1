// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Configuration of a run of the page-table test.
//!
//! A selected phase adds the phases that it depends on, which are run and reported like the others:
//! `update` and `rebuild` need the mappings of `create`; `update` needs dirty logging; `rebuild`
//! after `update` needs logging switched off again. Clean-up (switching logging off at the end,
//! dropping the backing between iterations) always happens and is reported only where selected.

use std::{fmt, str::FromStr, time::Duration};

use thiserror::Error;

use granule_types::phase::Phase;

/// Mapping of the region under test by the guest's stage-1 tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GuestMap {
    /// Maps the largest blocks that fit: few tables, and nearly all stage-2 faults in the region.
    #[default]
    Blocks,
    /// Maps pages, as the kernel's test does: each stage-1 table is a page that takes a stage-2
    /// fault when it is first walked, in `create`.
    Pages,
}

/// A migration workload: the vCPUs write continuously; the host collects the dirty bitmap in rounds
/// and copies its pages.
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

/// Error returned when a text is not a selection of phases.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "each message describes its variant")]
pub enum ParsePhasesError {
    #[error(
        "unknown phase '{0}'; expected one of {list}",
        list = Phase::ALL.map(Phase::name).join(", ")
    )]
    Unknown(String),
    #[error("no phase is named; omit the option to select all phases")]
    None,
}

/// Error returned for phases that write nothing under dirty logging.
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
    pub fn of(named: &[Phase]) -> Self {
        let mut selected = named.to_vec();
        let mut at = 0;
        while let Some(&phase) = selected.get(at) {
            selected.extend_from_slice(match phase {
                Phase::Create | Phase::Exec | Phase::Round | Phase::Stop | Phase::Whole => &[],
                Phase::LoggingOn | Phase::Unmap => &[Phase::Create],
                Phase::Update | Phase::LoggingOff => &[Phase::LoggingOn],
                Phase::Rebuild if named.contains(&Phase::Update) => &[Phase::LoggingOff],
                Phase::Rebuild => &[Phase::Create],
            });
            at += 1;
        }
        Self(Phase::ALL.into_iter().filter(|phase| selected.contains(phase)).collect())
    }

    /// Removes `create`, for a run whose dirty logging starts on untouched memory: the faults of
    /// `update` and `rebuild` then create the mappings.
    ///
    /// # Errors
    /// The selection does not contain `update`.
    pub fn logging_untouched(mut self) -> Result<Self, NothingLoggedError> {
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
            return Err(ParsePhasesError::None);
        }
        Ok(Self::of(&named))
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
        assert_eq!(PhaseSelection::of(&Phase::ALL), PhaseSelection::all());
    }

    #[test]
    fn logging_untouched_memory_removes_create_and_requires_update() {
        let rebuild = PhaseSelection::of(&[Phase::Update, Phase::Rebuild]);
        let create = PhaseSelection::of(&[Phase::Create]);

        assert_eq!(
            rebuild.logging_untouched().unwrap().to_string(),
            "logging-on,update,logging-off,rebuild"
        );
        assert_eq!(create.clone().logging_untouched(), Err(NothingLoggedError(create)));
    }

    #[test]
    fn unknown_and_empty_selections_are_refused() {
        assert_eq!(
            "create,destroy".parse::<PhaseSelection>(),
            Err(ParsePhasesError::Unknown("destroy".to_owned()))
        );
        assert_eq!(",".parse::<PhaseSelection>(), Err(ParsePhasesError::None));
    }
}
