// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Comparisons of several sides with the first: of the patches of a series with their base, or of
//! the configurations of one kernel.

use super::{
    CompareError, Comparison, ComparisonOptions, LabelledSide, SetupField,
    build::{Subject, separates_engines},
    configuration::Configuration,
    labelled_side::{GroupsOfSides, groups_of_sides},
};
use crate::sample::{AnyPhase, Sample};

/// Comparisons of each further side with the first side.
#[derive(Debug, Clone)]
pub struct ComparisonSet {
    /// Two or more sides; the first is the reference.
    sides: Vec<LabelledSide>,
    /// Comparisons of the further sides with the first, in the order of the sides.
    comparisons: Vec<Comparison>,
    /// Phases that the caller selected; empty for all.
    selected_phases: Vec<String>,
    /// Indicates that each engine has its own configurations.
    separates_engines: bool,
}

/// Configuration on the sides of a set.
#[derive(Debug)]
pub struct ConfigurationInSet<'a> {
    /// Group of each side.
    pub groups: GroupsOfSides<'a>,
    /// Configuration in each comparison; `None` if a further side lacks it.
    pub changes: Vec<Option<&'a Configuration>>,
}

impl ComparisonSet {
    /// Compares each further side with the first. The sides have their own labels, in place of
    /// those of `options`.
    ///
    /// # Errors
    /// There are fewer than two sides, or a comparison fails as [`Comparison::new`] does.
    pub fn new(
        sides: Vec<LabelledSide>,
        options: &ComparisonOptions,
    ) -> Result<Self, CompareError> {
        Self::of_subject(sides, options, Subject::Kernels)
    }

    /// Compares the configurations of one kernel that differ in `field` with the first of them.
    /// The value of the field is the label of its side.
    ///
    /// # Errors
    /// A sample lacks the value, all samples have the same, or a comparison fails as
    /// [`Comparison::new`] does.
    pub fn by(
        samples: &[Sample],
        field: SetupField,
        options: &ComparisonOptions,
    ) -> Result<Self, CompareError> {
        Self::of_subject(field.sides(samples)?, options, Subject::Configurations)
    }

    fn of_subject(
        sides: Vec<LabelledSide>,
        options: &ComparisonOptions,
        subject: Subject,
    ) -> Result<Self, CompareError> {
        let [reference, further @ ..] = sides.as_slice() else {
            return Err(CompareError::SingleSide);
        };
        if further.is_empty() {
            return Err(CompareError::SingleSide);
        }
        let compare = |side: &LabelledSide| {
            let labels = Some([reference.label.clone(), side.label.clone()]);
            let options = ComparisonOptions { labels, ..options.clone() };
            Comparison::of_subject(&reference.samples, &side.samples, &options, subject)
        };
        let comparisons = further.iter().map(compare).collect::<Result<_, _>>()?;
        let samples: Vec<&[Sample]> = sides.iter().map(|side| side.samples.as_slice()).collect();
        Ok(Self {
            comparisons,
            selected_phases: options.phases.clone(),
            separates_engines: separates_engines(&samples),
            sides,
        })
    }

    /// Returns the comparisons of the further sides with the first, in the order of the sides.
    pub fn comparisons(&self) -> &[Comparison] {
        &self.comparisons
    }

    /// Reports whether all comparisons are of elapsed times.
    pub(crate) fn has_elapsed_times(&self) -> bool {
        self.comparisons.iter().all(|comparison| comparison.has_elapsed_times)
    }

    /// Reports whether the caller selected the phases.
    pub(crate) const fn has_selected_phases(&self) -> bool {
        !self.selected_phases.is_empty()
    }

    /// Returns the configurations of the comparisons, with the samples that these compare.
    pub(crate) fn configurations(&self) -> Vec<ConfigurationInSet<'_>> {
        let all = groups_of_sides(&self.sides, self.separates_engines).into_iter();
        let configurations = all.filter_map(|groups| {
            let key = groups.iter().flatten().next()?.key.clone();
            let changes: Vec<_> = self.comparisons.iter().map(|one| one.of_key(&key)).collect();
            let is_selected = |phase: &AnyPhase| {
                !self.has_selected_phases()
                    || self.selected_phases.iter().any(|one| phase.is_named(one))
            };
            let compared = groups.into_iter().map(|group| {
                let mut group = group?.of_phases(is_selected);
                group.keep_one_iteration_of_schedules(self.has_elapsed_times());
                Some(group)
            });
            let groups = compared.collect();
            changes.iter().any(Option::is_some).then_some(ConfigurationInSet { groups, changes })
        });
        configurations.collect()
    }
}
