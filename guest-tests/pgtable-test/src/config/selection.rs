// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which phases a run goes through.
//!
//! A phase brings those without which it would not be itself, and these are run and reported like
//! the others: `update` and `rebuild` need mappings made by `create`; `update` happens under dirty
//! logging; `rebuild` behind an update needs logging off again. What only tidies up (logging off at
//! the end, dropping the backing between iterations) is done in any case and reported only where it
//! was asked for.

use std::{fmt, str::FromStr};

use thiserror::Error;

use granule_types::phase::Phase;

/// A choice of phases, closed under what each needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PhaseSelection(Vec<Phase>);

/// Why a text chooses no phases.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ParsePhasesError {
    /// There is no phase of that name.
    #[error("'{0}' is no phase: use {list}", list = Phase::ALL.map(Phase::name).join(", "))]
    Unknown(String),
    /// No phase is chosen.
    #[error("no phase is chosen: leave the option out for all of them")]
    None,
}

/// Phases in none of which anything is written under dirty logging.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "nothing is written under dirty logging in {0}: choose update too, or leave --log-untouched out"
)]
pub struct NothingLogged(PhaseSelection);

impl PhaseSelection {
    /// Every phase.
    pub fn all() -> Self {
        Self(Phase::ALL.to_vec())
    }

    /// The phases named, and those they need.
    pub fn of(named: &[Phase]) -> Self {
        let mut wanted = named.to_vec();
        let mut at = 0;
        while let Some(&phase) = wanted.get(at) {
            wanted.extend_from_slice(match phase {
                Phase::Create | Phase::Exec | Phase::Round | Phase::Stop | Phase::Whole => &[],
                Phase::LoggingOn | Phase::Unmap => &[Phase::Create],
                Phase::Update | Phase::LoggingOff => &[Phase::LoggingOn],
                Phase::Rebuild if named.contains(&Phase::Update) => &[Phase::LoggingOff],
                Phase::Rebuild => &[Phase::Create],
            });
            at += 1;
        }
        Self(
            Phase::ALL
                .into_iter()
                .filter(|phase| wanted.contains(phase))
                .collect(),
        )
    }

    /// These but for `create`, for a run that logs from untouched memory: what `update` and
    /// `rebuild` need mapped, their own faults map.
    ///
    /// # Errors
    /// Nothing is written under logging.
    pub fn logging_untouched(mut self) -> Result<Self, NothingLogged> {
        if !self.contains(Phase::Update) {
            return Err(NothingLogged(self));
        }
        self.0.retain(|&phase| phase != Phase::Create);
        Ok(self)
    }

    /// Whether a phase is chosen.
    pub fn contains(&self, phase: Phase) -> bool {
        self.0.contains(&phase)
    }
}

impl FromStr for PhaseSelection {
    type Err = ParsePhasesError;

    /// Reads names with commas between them.
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
    fn a_phase_brings_what_it_needs_and_no_more() {
        for (text, chosen) in [
            ("create", "create"),
            ("update", "create,logging-on,update"),
            ("rebuild", "create,rebuild"),
            (
                "rebuild, update",
                "create,logging-on,update,logging-off,rebuild",
            ),
            ("logging-off", "create,logging-on,logging-off"),
            ("exec", "exec"),
            ("unmap,create", "create,unmap"),
        ] {
            assert_eq!(
                text.parse::<PhaseSelection>().unwrap().to_string(),
                chosen,
                "{text}"
            );
        }
    }

    #[test]
    fn all_phases_need_nothing_else() {
        assert_eq!(PhaseSelection::of(&Phase::ALL), PhaseSelection::all());
    }

    #[test]
    fn logging_from_untouched_memory_leaves_out_the_first_touch_and_needs_logging() {
        let rebuild = PhaseSelection::of(&[Phase::Update, Phase::Rebuild]);
        let create = PhaseSelection::of(&[Phase::Create]);

        assert_eq!(
            rebuild.logging_untouched().unwrap().to_string(),
            "logging-on,update,logging-off,rebuild"
        );
        assert_eq!(
            create.clone().logging_untouched(),
            Err(NothingLogged(create))
        );
    }

    #[test]
    fn unknown_and_empty_choices_are_refused() {
        assert_eq!(
            "create,destroy".parse::<PhaseSelection>(),
            Err(ParsePhasesError::Unknown("destroy".to_owned()))
        );
        assert_eq!(",".parse::<PhaseSelection>(), Err(ParsePhasesError::None));
    }
}
