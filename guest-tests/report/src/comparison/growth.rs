// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Growth of phase times with the number of vCPUs or the memory size.

use std::collections::BTreeSet;

use serde::Serialize;

use super::configuration::{Configuration, PhaseChange};
use crate::{
    sample::{AnyPhase, RunSetup},
    stats::{self, Spread},
};
use granule_types::units::{Bytes, pluralize};

/// Parameter whose effect on times is fitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SweepParameter {
    Vcpus,
    Memory,
}

impl SweepParameter {
    pub const ALL: [Self; 2] = [Self::Vcpus, Self::Memory];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Vcpus => "vCPUs",
            Self::Memory => "size",
        }
    }

    /// Removes the value of the parameter from a setup and returns it.
    fn take_from(self, setup: &mut RunSetup) -> Option<u64> {
        match self {
            Self::Vcpus => setup.vcpus.take().map(u64::from),
            Self::Memory => setup.memory.take().map(|memory| memory.0),
        }
    }

    /// Formats a value for a sentence: `1 vCPU`, `64M`.
    pub fn to_text(self, value: u64) -> String {
        if self == Self::Vcpus { pluralize(value, "vCPU") } else { self.label(value) }
    }

    /// Formats a value for an axis.
    pub fn label(self, value: u64) -> String {
        match self {
            Self::Vcpus => value.to_string(),
            Self::Memory => Bytes(value).to_string(),
        }
    }
}

/// Times of a phase for all values of a parameter, with an equal setup.
#[derive(Debug, Clone)]
pub struct Sweep<'a> {
    /// Setup without the parameter.
    pub setup: RunSetup,
    pub engine: &'a str,
    /// Two or more values in increasing order.
    pub points: Vec<(u64, &'a PhaseChange)>,
    /// Indicates that times are exact for a schedule: the virtual times of an emulator.
    is_exact: bool,
}

pub fn sweeps<'a>(
    configurations: &'a [Configuration],
    emulated: bool,
    phase: &AnyPhase,
    parameter: SweepParameter,
) -> Vec<Sweep<'a>> {
    let mut sweeps: Vec<Sweep> = Vec::new();
    for configuration in configurations {
        let mut setup = configuration.setup.clone();
        let (Some(change), Some(value)) =
            (configuration.phase(phase), parameter.take_from(&mut setup))
        else {
            continue;
        };
        let engine = configuration.engine.as_str();
        let mut known = sweeps.iter_mut();
        match known.find(|sweep| sweep.setup == setup && sweep.engine == engine) {
            Some(sweep) => sweep.points.push((value, change)),
            None => sweeps.push(Sweep {
                setup,
                engine,
                points: vec![(value, change)],
                is_exact: emulated,
            }),
        }
    }
    for sweep in &mut sweeps {
        sweep.points.sort_by_key(|(value, _)| *value);
        sweep.points.dedup_by_key(|(value, _)| *value);
    }
    sweeps.retain(|sweep| sweep.points.len() > 1);
    sweeps
}

impl Sweep<'_> {
    /// Returns the fits of both sides; `None` for fewer than three values.
    pub fn fits(&self) -> [Option<Fit>; 2] {
        let sides: [fn(&PhaseChange) -> Option<Spread>; 2] =
            [|change| change.time.before, |change| change.time.after];
        sides.map(|side| {
            let points = self.points.iter();
            let spreads: Option<Vec<(u64, Spread)>> =
                points.map(|(value, change)| Some((*value, side(change)?))).collect();
            let spreads = spreads?;
            let has_single_runs = spreads.iter().any(|(_, spread)| spread.runs == 1);
            let medians = spreads.iter().map(|(value, spread)| (*value as f64, spread.median));
            Fit::new(&medians.collect::<Vec<_>>(), has_single_runs, self.is_exact)
        })
    }
}

/// Growth of the time of a phase.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Growth {
    pub phase: AnyPhase,
    #[serde(rename = "with")]
    pub parameter: SweepParameter,
    /// Name of the setup without the parameter.
    #[serde(rename = "of")]
    pub setup: String,
    /// Fit before; `None` for fewer than three values.
    pub before: Option<Fit>,
    pub after: Option<Fit>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Fit {
    pub exponent: f64,
    pub interval: [f64; 2],
    /// Name of the power, if the interval contains exactly one of 0, 1 and 2 and is at most 1 wide.
    pub kind: Option<&'static str>,
    /// Indicates that a point has a single run.
    #[serde(rename = "single")]
    pub has_single_runs: bool,
    /// Indicates that times are exact for their schedule.
    #[serde(rename = "exact")]
    pub is_exact: bool,
}

/// Tolerance at both ends of an interval that is searched for a power. Exact times have so narrow
/// an interval that a constant cost of 1% (a call) would exclude 1.
const INTERVAL_TOLERANCE: f64 = 0.05;
/// Maximum width of an interval that distinguishes flat from quadratic growth.
const MAX_CONCLUSIVE_WIDTH: f64 = 2.0;

impl Fit {
    fn new(points: &[(f64, f64)], has_single_runs: bool, exact: bool) -> Option<Self> {
        let (exponent, interval) = stats::fit_power_law(points)?;
        let [low, high] = interval;
        let kinds = [(0.0, "flat"), (1.0, "linear"), (2.0, "quadratic")];
        let held = |(power, _): &(f64, _)| {
            (low - INTERVAL_TOLERANCE..=high + INTERVAL_TOLERANCE).contains(power)
        };
        let held: Vec<_> = kinds.into_iter().filter(held).collect();
        let mut fit = Self { exponent, interval, kind: None, has_single_runs, is_exact: exact };
        if let [(power, kind)] = held.as_slice()
            && (exponent - power).abs() < 0.5
            && high - low <= 1.0
            && !fit.is_single_run()
        {
            fit.kind = Some(kind);
        }
        Some(fit)
    }

    /// Reports whether the interval is narrow enough and does not come from single noisy runs.
    pub fn is_conclusive(&self) -> bool {
        let [low, high] = self.interval;
        high - low <= MAX_CONCLUSIVE_WIDTH && !self.is_single_run()
    }

    /// Reports whether a point has a single run in real time, whose noise is unknown.
    pub fn is_single_run(&self) -> bool {
        self.has_single_runs && !self.is_exact
    }

    /// Formats the fit: `1.98 (1.90 to 2.06), quadratic`.
    pub fn to_text(self) -> String {
        if self.is_single_run() {
            return "inconclusive: one run a point".to_owned();
        }
        if !self.is_conclusive() {
            return "inconclusive".to_owned();
        }
        // Avoids "-0.00".
        let digits = |value: f64| format!("{:.2}", if value.abs() < 0.005 { 0.0 } else { value });
        let [low, high] = self.interval.map(digits);
        let kind = self.kind.map(|kind| format!(", {kind}")).unwrap_or_default();
        let of = if self.has_single_runs { ", of one schedule" } else { "" };
        format!("{} ({low} to {high}){kind}{of}", digits(self.exponent))
    }
}

impl Growth {
    pub fn is_conclusive(&self) -> bool {
        [self.before, self.after].iter().flatten().any(Fit::is_conclusive)
    }
}

/// Fits the growth of every phase with every parameter.
pub fn growth(configurations: &[Configuration], emulated: bool) -> Vec<Growth> {
    let changes = configurations.iter().flat_map(|c| &c.phases);
    let phases: BTreeSet<&AnyPhase> = changes.map(|change| &change.phase).collect();
    let mut all = Vec::new();
    for phase in phases {
        for parameter in SweepParameter::ALL {
            for sweep in sweeps(configurations, emulated, phase, parameter) {
                let [before, after] = sweep.fits();
                if before.is_some() || after.is_some() {
                    all.push(Growth {
                        phase: phase.clone(),
                        parameter,
                        setup: sweep.setup.name(),
                        before,
                        after,
                    });
                }
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fit(points: [(f64, f64); 4]) -> Fit {
        Fit::new(&points, false, true).unwrap()
    }

    #[test]
    fn a_fit_is_named_by_the_power_in_its_interval() {
        let bent = |power: f64, bend: f64| {
            fit([1.0, 2.0, 4.0, 8.0].map(|x: f64| (x, x.powf(power) * x.powf(bend * x.ln()))))
        };
        assert_eq!(bent(0.01, 0.0).kind, Some("flat"));
        assert_eq!(bent(1.0, 0.0).to_text(), "1.00 (1.00 to 1.00), linear");
        assert_eq!(bent(2.0, 0.02).kind, Some("quadratic"));
        assert_eq!(bent(1.4, 0.0).kind, None);
        assert_eq!(bent(0.5, 0.4).kind, None, "too wide");
        let wild = fit([(1.0, 10.0), (2.0, 3.0), (4.0, 4.0), (8.0, 3.0)]);
        assert!(wild.interval[0] < -1.0 && (0.0..1.0).contains(&wild.interval[1]));
        assert_eq!(wild.kind, None, "the interval contains 0 only, but is too wide");
        assert_eq!(wild.to_text(), "inconclusive", "neither flat nor quadratic");
    }

    #[test]
    fn one_run_a_point_of_real_time_is_inconclusive() {
        let points = [1.0, 2.0, 4.0].map(|x: f64| (x, x));
        let of = |exact| Fit::new(&points, true, exact).unwrap();

        assert_eq!(of(true).to_text(), "1.00 (1.00 to 1.00), linear, of one schedule");
        assert_eq!(of(false).to_text(), "inconclusive: one run a point");
        assert!(!of(false).is_conclusive() && of(false).kind.is_none());
    }

    #[test]
    fn a_constant_part_does_not_hide_the_power_of_exact_times() {
        let with = |constant: f64| fit([1.0, 2.0, 4.0, 8.0].map(|x: f64| (x, x + constant)));
        let near = with(0.02);

        assert!(near.interval[1] < 1.0, "{near:?}");
        assert_eq!(near.kind, Some("linear"));
        assert_eq!(with(1.0).kind, None);
        let flat = fit([1.0, 2.0, 4.0, 8.0].map(|x: f64| (x, x.powf(-0.001))));
        assert_eq!(flat.to_text(), "0.00 (0.00 to 0.00), flat");
    }
}
