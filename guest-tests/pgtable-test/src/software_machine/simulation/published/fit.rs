// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Fit of costs to published rows.

use super::{
    rows::ROWS,
    run::{PublishedError, gain, simulate},
};
use crate::software_machine::simulation::cost::CostTable;

/// A fitted number of the cost table.
#[derive(Debug, Clone, Copy)]
pub struct Fit {
    /// Name of the number.
    pub number: &'static str,
    /// Index of the row in [`ROWS`].
    pub row: usize,
    /// The fitted quantity of the row.
    pub of: FitQuantity,
}

/// A quantity of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FitQuantity {
    /// Seconds after the change.
    After,
    /// Seconds saved by the change.
    Saved,
    /// The gain in percent.
    Gain,
}

impl FitQuantity {
    fn of(self, (before, after): (f64, f64)) -> f64 {
        match self {
            Self::After => after,
            Self::Saved => before - after,
            Self::Gain => gain((before, after)),
        }
    }
}

/// The fitted numbers, in the order of fitting.
pub const FITS: [Fit; 6] = [
    fit("clean_line_long", 5, FitQuantity::Saved),
    fit("zero_rate", 5, FitQuantity::After),
    fit("fault_locked", 6, FitQuantity::After),
    fit("clean_start", 6, FitQuantity::Saved),
    fit("clean_line", 2, FitQuantity::Gain),
    fit("guest_touch_shared", 10, FitQuantity::After),
];

const fn fit(number: &'static str, row: usize, of: FitQuantity) -> Fit {
    Fit { number, row, of }
}

impl Fit {
    /// Returns the published and the simulated quantity, the latter on memory `divisor` times smaller.
    ///
    /// # Errors
    /// The row cannot be simulated.
    pub fn measure(&self, costs: &CostTable, divisor: u64) -> Result<(f64, f64), PublishedError> {
        let row = &ROWS[self.row];
        let seconds = |kernel| {
            let of = simulate(row.workload, kernel, costs, (row.phase, divisor))?;
            Ok::<_, PublishedError>(of.get(&row.phase).copied().unwrap_or(f64::NAN))
        };
        let after = seconds(row.kernels().1)?;
        let before = match self.of {
            FitQuantity::After => after,
            _ => seconds(row.kernels().0)?,
        };
        Ok((self.of.of(row.seconds), self.of.of((before, after))))
    }

    /// Changes the number to the value at which a line through two simulations meets the published
    /// quantity, and returns it.
    ///
    /// # Errors
    /// As [`Fit::measure`].
    pub fn improve(&self, costs: &mut CostTable, divisor: u64) -> Result<f64, PublishedError> {
        let set = |costs: &mut CostTable, to: f64| {
            costs
                .number_mut(self.number)
                .map(|number| std::mem::replace(&mut number.value, to))
        };
        let Some(here) = set(costs, 0.0) else {
            return Ok(f64::NAN);
        };
        let aside = here * 1.25;
        set(costs, aside);
        let (_, there) = self.measure(costs, divisor)?;
        set(costs, here);
        let (published, now) = self.measure(costs, divisor)?;
        let slope = (there - now) / (aside - here);
        let best = (here + (published - now) / slope).clamp(here / 4.0, here * 4.0);
        // The published figures have at most three digits.
        let best = format!("{best:.2e}").parse().unwrap_or(here);
        set(costs, best);
        Ok(best)
    }
}
