// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Fields of a setup whose values are compared with each other, on one kernel.

use std::fmt;

use super::{CompareError, LabelledSide};
use crate::sample::{RunSetup, Sample};
use granule_types::units::pluralize;

/// Field of a setup by which the configurations of one kernel are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum SetupField {
    /// Backing of the memory
    Backing,
    /// Number of vCPUs
    Vcpus,
    /// Guest mode
    Mode,
    /// Size of the memory
    Memory,
}

impl SetupField {
    /// Returns the name in results and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Backing => "backing",
            Self::Vcpus => "vcpus",
            Self::Mode => "mode",
            Self::Memory => "memory",
        }
    }

    /// Removes the value from a setup and formats it for readers; `None` if it is unknown.
    fn take_from(self, setup: &mut RunSetup) -> Option<String> {
        match self {
            Self::Backing => setup.backing.take().map(|backing| backing.to_string()),
            Self::Vcpus => setup.vcpus.take().map(|vcpus| pluralize(vcpus, "vCPU")),
            Self::Mode => Some(std::mem::take(&mut setup.mode)).filter(|mode| !mode.is_empty()),
            Self::Memory => setup.memory.take().map(|memory| memory.to_string()),
        }
    }

    /// Returns a side for each value, in order of first appearance, without the value in the setup.
    ///
    /// # Errors
    /// A sample lacks the value, or all samples have the same.
    pub(super) fn sides(self, samples: &[Sample]) -> Result<Vec<LabelledSide>, CompareError> {
        let mut sides: Vec<LabelledSide> = Vec::new();
        for mut sample in samples.iter().cloned() {
            let value = self.take_from(&mut sample.setup);
            let label = value.ok_or(CompareError::UnknownValue(self))?;
            match sides.iter_mut().find(|side| side.label == label) {
                Some(side) => side.samples.push(sample),
                None => sides.push(LabelledSide { label, samples: vec![sample] }),
            }
        }
        if let [side] = sides.as_slice() {
            return Err(CompareError::SingleValue { field: self, value: side.label.clone() });
        }
        for side in &mut sides {
            // Files of one value each are numbered one after the other.
            let first = side.samples.iter().map(|sample| sample.iteration).min().unwrap_or(0);
            side.samples.iter_mut().for_each(|sample| sample.iteration -= first);
        }
        Ok(sides)
    }
}

impl fmt::Display for SetupField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
