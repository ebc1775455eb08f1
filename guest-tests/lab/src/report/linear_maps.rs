// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Comparison of the linear maps of kernels: the first kernel's dump of its tables with that of each
//! other kernel, boot by boot.

use crate::report::{RunInfo, count_table::Records, table_figures::BootRecord};

/// Result of the comparison.
#[derive(Debug, Default)]
pub struct LinearMaps {
    /// Number of boots whose dump is compared with that of the first kernel.
    pub compared: usize,
    /// Sentence for each boot whose linear map differs.
    pub changes: Vec<String>,
}

impl LinearMaps {
    /// Compares the dumps of all boots; a boot without a dump is not compared.
    pub fn compare(run: RunInfo<'_>, boots: &Records<BootRecord>) -> Self {
        let mut maps = Self::default();
        for (job, boots) in run.jobs.iter().zip(boots) {
            let dump =
                |boot: &'_ Result<BootRecord, String>| boot.as_ref().ok()?.tables.dump.clone();
            let Some(first) = boots.first().and_then(dump) else { continue };
            for (kernel, boot) in run.kernels.iter().zip(boots).skip(1) {
                let Some(other) = dump(boot) else { continue };
                maps.compared += 1;
                if let Some(difference) = first_difference(&first, &other) {
                    maps.changes.push(format!(
                        "{}: the linear map of '{}' differs from that of '{}': {difference}",
                        job.name, kernel.name, run.kernels[0].name
                    ));
                }
            }
        }
        maps
    }
}

/// Describes the first lines that differ; `None` for equal dumps.
fn first_difference(one: &str, other: &str) -> Option<String> {
    let mut lines = one.lines().zip(other.lines());
    let differ = lines.find(|(one, other)| one != other);
    let (before, after) = differ.unwrap_or(("its last line", "another number of lines"));
    (one != other).then(|| format!("'{}' instead of '{}'", after.trim(), before.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_described() {
        let difference = |other| first_difference("a\n b\nc\n", other);

        assert_eq!(difference("a\n b\nc\n"), None);
        assert_eq!(difference("a\n x\ny\n").unwrap(), "'x' instead of 'b'");
        let shorter = "'another number of lines' instead of 'its last line'";
        assert_eq!(difference("a\n b\n").unwrap(), shorter);
    }
}
