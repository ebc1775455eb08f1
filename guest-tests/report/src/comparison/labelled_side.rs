// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Several sides with their labels, and their common configurations.

use super::configuration::{Group, GroupKey, groups};
use crate::sample::Sample;

/// Samples of one side with its label.
#[derive(Debug, Clone)]
pub struct LabelledSide {
    /// Name in reports, such as that of a kernel.
    pub label: String,
    /// Samples in run order.
    pub samples: Vec<Sample>,
}

/// Groups of one configuration: one for each side, `None` if a side lacks the configuration.
pub type GroupsOfSides<'a> = Vec<Option<Group<'a>>>;

/// Returns the configurations of all sides, in order of first appearance.
pub fn groups_of_sides<'a>(sides: &'a [LabelledSide], by_engine: bool) -> Vec<GroupsOfSides<'a>> {
    let sides: Vec<Vec<Group<'a>>> =
        sides.iter().map(|side| groups(&side.samples, by_engine)).collect();
    let mut keys: Vec<GroupKey> = Vec::new();
    for group in sides.iter().flatten() {
        if !keys.contains(&group.key) {
            keys.push(group.key.clone());
        }
    }
    let groups = keys.iter().map(|key| {
        let of_side = |side: &Vec<Group<'a>>| side.iter().find(|group| group.key == *key).cloned();
        sides.iter().map(of_side).collect()
    });
    groups.collect()
}
