// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Places of figures on an axis. An axis begins at zero, unless figures are so far apart that small
//! ones would coincide: then it is logarithmic.

/// Ratio of the greatest to the least figure above which an axis is logarithmic.
const FAR_APART: f64 = 30.0;

/// Axis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scale {
    /// Linear from 0 to this.
    Linear(f64),
    /// Logarithmic between these.
    Log(f64, f64),
}

impl Scale {
    /// Returns an axis for figures.
    pub fn of(figures: impl IntoIterator<Item = f64>) -> Self {
        let (mut least, mut greatest) = (f64::INFINITY, 0.0_f64);
        for figure in figures.into_iter().filter(|figure| *figure > 0.0) {
            least = least.min(figure);
            greatest = greatest.max(figure);
        }
        if greatest == 0.0 {
            Self::Linear(1.0)
        } else if greatest > least * FAR_APART {
            Self::Log(least / 1.25, greatest * 1.25)
        } else {
            Self::Linear(greatest * 1.08)
        }
    }

    /// Returns a linear axis for figures.
    pub fn from_zero(figures: impl IntoIterator<Item = f64>) -> Self {
        let greatest = figures.into_iter().fold(0.0_f64, f64::max);
        Self::Linear(if greatest > 0.0 { greatest * 1.08 } else { 1.0 })
    }

    /// Returns the place of a figure, from 0 to 1.
    pub fn at(self, figure: f64) -> f64 {
        match self {
            Self::Linear(greatest) => (figure / greatest).clamp(0.0, 1.0),
            Self::Log(least, _) if figure <= least => 0.0,
            Self::Log(least, greatest) => {
                ((figure / least).ln() / (greatest / least).ln()).clamp(0.0, 1.0)
            }
        }
    }

    /// Returns round figures for labels, at most five.
    pub fn ticks(self) -> Vec<f64> {
        match self {
            Self::Linear(greatest) => {
                let raw = greatest / 4.0;
                let power = 10_f64.powf(raw.log10().floor());
                let step = [1.0, 2.0, 2.5, 5.0, 10.0]
                    .into_iter()
                    .map(|step| step * power)
                    .find(|step| *step >= raw);
                let step = step.unwrap_or(raw);
                (0..5).map(|at| f64::from(at) * step).filter(|tick| *tick <= greatest).collect()
            }
            Self::Log(least, greatest) => {
                let (low, high) = (least.log10(), greatest.log10());
                #[expect(clippy::cast_possible_truncation, reason = "a decade of a finite figure")]
                let (first, last) = (low.ceil() as i32, high.floor() as i32);
                let skip = ((last - first) / 4 + 1).max(1);
                let mut ticks: Vec<f64> = (first..=last)
                    .filter(|decade| (decade - first) % skip == 0)
                    .map(|decade| 10_f64.powi(decade))
                    .collect();
                if ticks.len() < 2 {
                    ticks = vec![least * 1.25, greatest / 1.25];
                }
                ticks
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_figures_have_a_linear_axis_from_zero() {
        let scale = Scale::of([40.0, 100.0]);
        assert_eq!(scale.ticks(), [0.0, 50.0, 100.0]);
        assert!((scale.at(54.0) - 0.5).abs() < 1e-9);
    }

    #[test]
    fn figures_far_apart_have_a_logarithmic_axis() {
        let scale = Scale::of([3.0, 0.0, 4000.0]);
        assert_eq!(scale.ticks(), [10.0, 100.0, 1000.0]);
        assert_eq!(scale.at(0.0), 0.0);
        assert!(scale.at(4000.0) < 1.0 && scale.at(3.0) > 0.0);
    }

    #[test]
    fn there_are_two_to_five_ticks_on_the_axis() {
        for exponent in -3..15 {
            for factor in [1.0, 1.7, 3.3, 7.9, 9.99] {
                let greatest = factor * 10_f64.powi(exponent);
                for scale in [
                    Scale::of([greatest]),
                    Scale::of([greatest, greatest * 1e7]),
                    Scale::of([greatest, greatest * 35.0]),
                ] {
                    let ticks = scale.ticks();
                    assert!((2..=5).contains(&ticks.len()), "{scale:?}: {ticks:?}");
                    assert!(ticks.iter().all(|tick| (0.0..=1.0).contains(&scale.at(*tick))));
                }
            }
        }
        assert_eq!(Scale::of([]), Scale::Linear(1.0));
    }
}
