// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Columns of the report on measured boots: counts of the measured function, its time by a cost table,
//! and the growth of both with memory.

use std::collections::BTreeSet;

use granule_report::render::group_digits;

use crate::report::{
    RunInfo,
    count_table::Records,
    table_figures::{BootRecord, COUNT_COLUMNS},
};

/// Figure of a boot, which has a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    /// Count, by its index in [`COUNT_COLUMNS`].
    Count(usize),
    /// Time by a cost table.
    ModelTime,
}

impl Figure {
    /// Returns the figures of a report. Only a guest has aborts, which are the last count.
    pub fn of_report(has_guest: bool, has_model: bool) -> Vec<Self> {
        let counts = COUNT_COLUMNS.len() - usize::from(!has_guest);
        (0..counts).map(Self::Count).chain(has_model.then_some(Self::ModelTime)).collect()
    }

    pub const fn heading(self) -> &'static str {
        match self {
            Self::Count(index) => COUNT_COLUMNS[index].0,
            Self::ModelTime => "model ms",
        }
    }

    /// Returns the value in a boot; times are in nanoseconds.
    pub fn value(self, boot: &BootRecord) -> Option<f64> {
        match self {
            Self::Count(index) => Some(boot.counts()[index] as f64),
            Self::ModelTime => Some(boot.model_ns?.0 as f64),
        }
    }

    /// Formats a value, or its growth.
    pub fn format(self, value: f64) -> String {
        match self {
            Self::Count(_) => rounded(value),
            Self::ModelTime => format!("{:.3}", value / 1e6),
        }
    }

    /// Formats the value in a boot.
    pub fn cell(self, boot: &BootRecord) -> String {
        self.value(boot).map_or("–".to_owned(), |value| self.format(value))
    }
}

/// Returns the growth of figures per GiB: a row for each kernel and value of `rodata` with two sizes of
/// memory.
pub fn growth_rows(
    figures: &[Figure],
    run: RunInfo<'_>,
    boots: &Records<BootRecord>,
) -> Vec<Vec<String>> {
    let values: BTreeSet<_> =
        run.jobs.iter().filter_map(|job| Some(job.work.measured_boot()?.rodata)).collect();
    let mut rows = Vec::new();
    for rodata in values {
        for (index, kernel) in run.kernels.iter().enumerate() {
            let of_kernel = boots.iter().filter_map(|boots| boots[index].as_ref().ok());
            let records: Vec<_> = of_kernel.filter(|boot| boot.rodata == rodata).collect();
            let growth = |figure: &Figure| {
                let gib = |boot: &BootRecord| boot.memory.0 as f64 / (1 << 30) as f64;
                let point = |boot: &&BootRecord| Some((gib(boot), figure.value(boot)?));
                let points: Vec<_> = records.iter().filter_map(point).collect();
                Some(figure.format(slope(&points)?))
            };
            let Some(cells) = figures.iter().map(growth).collect::<Option<Vec<_>>>() else {
                continue;
            };
            rows.push([vec![format!("rodata-{rodata}"), kernel.name.clone()], cells].concat());
        }
    }
    rows
}

/// Returns the slope of the line of least squares; `None` if all `x` are equal.
fn slope(points: &[(f64, f64)]) -> Option<f64> {
    let count = points.len() as f64;
    let mean = |value: fn(&(f64, f64)) -> f64| points.iter().map(value).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    let products: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    (spread > 0.0).then(|| products / spread)
}

/// Formats a number without decimals.
fn rounded(number: f64) -> String {
    let digits = group_digits(&format!("{:.0}", number.abs()));
    if number <= -0.5 { format!("-{digits}") } else { digits }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slope_is_that_of_least_squares() {
        assert_eq!(slope(&[(1.0, 5.0), (2.0, 7.0), (3.0, 9.0)]), Some(2.0));
        assert_eq!(slope(&[(0.0, 0.0), (1.0, 0.0), (2.0, 3.0)]), Some(1.5));
        assert_eq!(slope(&[(4.0, 1.0)]), None);
        assert_eq!([-1234.0, -0.2, 123.4].map(rounded), ["-1,234", "0", "123"]);
    }

    #[test]
    fn a_guest_has_aborts_and_a_cost_table_a_time() {
        let headings = |has_guest, has_model| -> Vec<_> {
            Figure::of_report(has_guest, has_model).into_iter().map(Figure::heading).collect()
        };

        assert_eq!(headings(true, true)[7..], ["DC ZVA", "aborts", "model ms"]);
        assert_eq!(headings(false, true)[7..], ["DC ZVA", "model ms"]);
        assert_eq!(Figure::ModelTime.format(1_234_567.0), "1.235");
    }
}
