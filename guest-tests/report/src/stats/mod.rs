// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Statistics of a comparison. The module works on samples of `f64`, whatever they measure.
//!
//! | question | answer |
//! |---|---|
//! | typical value and spread | [`Spread`]: median and quartiles |
//! | difference between independent runs | [`mann_whitney`] |
//! | difference between paired runs | [`wilcoxon`] on differences of logarithms |
//! | difference between a few exact runs | [`student`] on logarithms |
//! | size of the difference | [`ratio`]: Hodges-Lehmann on logarithms, with its interval |
//! | correction for the number of rows in a table | [`holm`] |
//! | ratios of many rows together | [`geometric_mean`], with a bootstrap interval |
//! | growth with vCPUs or memory | [`fit_power_law`] |
//! | smallest difference that the runs can show | [`detectable_ratio`] |
//!
//! A test and its interval agree: the interval holds exactly the ratios that the test does not
//! reject at 5%. All results match SciPy's to six digits (`golden/scipy.json`, written by
//! `make_scipy.py` beside it).
//!
//! Distributions come from `statrs`. The rank tests are implemented here: the crate's Mann-Whitney
//! test does not expose the null distribution, which an interval requires, and is exact for at most
//! eight values only; it has no Wilcoxon test.

mod descriptive;
mod effect;
mod significance;

pub use self::{
    descriptive::{Change, Runs, Spread, holm, logarithms},
    effect::{detectable_ratio, differences, fit_power_law, geometric_mean, ratio},
    significance::{ALPHA, Design, TestedRow, mann_whitney, min_p, student, wilcoxon},
};

#[cfg(test)]
pub mod tests {
    //! Tests against SciPy's results, to six digits, and seeded samples for simulations.

    use std::f64::consts::TAU;

    use rand_core::{Rng, SeedableRng};
    use rand_xoshiro::SplitMix64;
    use serde::Deserialize;

    use super::{Design::*, descriptive::quantile, *};

    #[derive(Deserialize)]
    struct ScipyResults {
        unpaired: Vec<ScipyCase>,
        paired: Vec<ScipyCase>,
    }

    #[derive(Deserialize)]
    struct ScipyCase {
        kind: String,
        before: Vec<f64>,
        after: Vec<f64>,
        quartiles: Option<[f64; 3]>,
        u: Option<f64>,
        positive: Option<f64>,
        p: f64,
        delta: Option<f64>,
        student: Option<f64>,
        ratio: f64,
        interval: Option<[f64; 2]>,
        /// Indicates that SciPy has an interval for the case.
        inverted: Option<bool>,
    }

    impl ScipyCase {
        #[track_caller]
        fn assert_figure(&self, figure: &str, found: f64, expected: f64) {
            let close = (found - expected).abs() <= 1e-6 * expected.abs().max(1e-9);
            let (m, n) = (self.before.len(), self.after.len());
            let kind = &self.kind;
            assert!(close, "{kind} {m} {n}: {figure} is {found}, SciPy has {expected}");
        }

        fn assert_agrees_with_scipy(&self, design: Design) {
            let [before, after] = [&self.before, &self.after].map(|side| logarithms(side).unwrap());
            let test = match design {
                Independent => mann_whitney(&self.before, &self.after).unwrap(),
                Paired => wilcoxon(&differences(&before, &after)),
            };
            self.assert_figure("statistic", test.statistic, self.u.or(self.positive).unwrap());
            self.assert_figure("p", test.p, self.p);
            self.assert_figure("delta", test.delta, self.delta.unwrap_or(test.delta));
            if let Some(expected) = self.student {
                let (_, p) = student(&before, &after).unwrap();
                self.assert_figure("p of Student's test", p, expected);
            }
            let mut sorted = self.before.clone();
            sorted.sort_by(f64::total_cmp);
            let quartiles = [0.25, 0.5, 0.75].map(|share| quantile(&sorted, share).unwrap());
            for (found, expected) in quartiles.into_iter().zip(self.quartiles.into_iter().flatten())
            {
                self.assert_figure("quantile", found, expected);
            }
            let (found, interval) = ratio(design, &self.before, &self.after).unwrap();
            self.assert_figure("ratio", found, self.ratio);
            if self.inverted != Some(false) {
                assert_eq!(interval.is_some(), self.interval.is_some(), "{}", self.kind);
                let ends = interval.into_iter().flatten();
                for (found, expected) in ends.zip(self.interval.into_iter().flatten()) {
                    self.assert_figure("interval", found, expected);
                }
            }
        }
    }

    #[test]
    fn tests_ratios_and_quartiles_agree_with_scipy() {
        let golden = include_str!("../../golden/scipy.json");
        let ScipyResults { unpaired, paired } = serde_json::from_str(golden).unwrap();
        assert!(unpaired.len() >= 20 && paired.len() >= 15);
        unpaired.iter().for_each(|case| case.assert_agrees_with_scipy(Independent));
        paired.iter().for_each(|case| case.assert_agrees_with_scipy(Paired));
    }

    pub struct LogNormal(SplitMix64);

    impl LogNormal {
        pub fn new(seed: u64) -> Self {
            // Consecutive seeds must not start from consecutive states.
            let spread = SplitMix64::seed_from_u64(seed).next_u64();
            let mut random = SplitMix64::seed_from_u64(spread);
            random.next_u64();
            Self(random)
        }

        /// Returns a uniform value in the open interval (0, 1).
        fn uniform(&mut self) -> f64 {
            ((self.0.next_u64() >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
        }

        /// Returns one standard normal value (Box and Muller).
        fn standard_normal(&mut self) -> f64 {
            (-2.0 * self.uniform().ln()).sqrt() * (TAU * self.uniform()).cos()
        }

        /// Returns log-normal runs with median `centre`; `deviation` is that of their logarithms.
        pub fn sample(&mut self, runs: usize, centre: f64, deviation: f64) -> Vec<f64> {
            (0..runs).map(|_| centre * (deviation * self.standard_normal()).exp()).collect()
        }
    }
}
