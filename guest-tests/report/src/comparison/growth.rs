// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Growth of times with the number of vCPUs or the memory size, over configurations that otherwise
//! are equal.

use std::collections::BTreeSet;

use serde::Serialize;

use super::configuration::{Configuration, PhaseChange};
use crate::{
    sample::{AnyPhase, RunSetup},
    stats::{self, Spread},
};
use granule_types::units::{Bytes, counted};

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
    fn take(self, setup: &mut RunSetup) -> Option<u64> {
        match self {
            Self::Vcpus => setup.vcpus.take().map(u64::from),
            Self::Memory => setup.memory.take().map(|memory| memory.0),
        }
    }

    /// Formats a value for a sentence: `1 vCPU`, `64M`.
    pub fn words(self, value: u64) -> String {
        if self == Self::Vcpus { counted(value, "vCPU") } else { self.label(value) }
    }

    /// Formats a value for an axis.
    pub fn label(self, value: u64) -> String {
        match self {
            Self::Vcpus => value.to_string(),
            Self::Memory => Bytes(value).to_string(),
        }
    }
}

/// One phase over all values of a parameter.
#[derive(Debug, Clone)]
pub struct Sweep<'a> {
    /// Setup without the parameter.
    pub rest: RunSetup,
    pub engine: &'a str,
    /// At least two values in increasing order.
    pub points: Vec<(u64, &'a PhaseChange)>,
    /// True if times are exact for their schedule: virtual times of an emulator or the model.
    exact: bool,
}

pub fn sweeps<'a>(
    configurations: &'a [Configuration],
    emulated: bool,
    phase: &AnyPhase,
    parameter: SweepParameter,
) -> Vec<Sweep<'a>> {
    let mut sweeps: Vec<Sweep> = Vec::new();
    for configuration in configurations {
        let mut rest = configuration.setup.clone();
        let (Some(change), Some(value)) = (configuration.phase(phase), parameter.take(&mut rest))
        else {
            continue;
        };
        let engine = configuration.engine.as_str();
        let mut known = sweeps.iter_mut();
        match known.find(|sweep| sweep.rest == rest && sweep.engine == engine) {
            Some(sweep) => sweep.points.push((value, change)),
            None => sweeps.push(Sweep {
                rest,
                engine,
                points: vec![(value, change)],
                exact: emulated || engine == "model",
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
            let single = spreads.iter().any(|(_, spread)| spread.runs == 1);
            let medians = spreads.iter().map(|(value, spread)| (*value as f64, spread.median));
            Fit::of(&medians.collect::<Vec<_>>(), single, self.exact)
        })
    }
}

/// Growth of the time of a phase.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Growth {
    pub phase: AnyPhase,
    pub with: SweepParameter,
    /// Name of the rest of the setup.
    pub of: String,
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
    /// True if a point has a single run.
    pub single: bool,
    /// True if times are exact for their schedule.
    pub exact: bool,
}

/// Amount by which both ends of an interval are extended before it is searched for a power. The
/// interval of exact times is so narrow that a constant part of 1% (a call) would exclude 1.
const INTERVAL_TOLERANCE: f64 = 0.05;
/// Width at which an interval no longer distinguishes flat from quadratic growth.
const WIDEST: f64 = 2.0;

impl Fit {
    fn of(points: &[(f64, f64)], single: bool, exact: bool) -> Option<Self> {
        let (exponent, interval) = stats::power_law(points)?;
        let [low, high] = interval;
        let kinds = [(0.0, "flat"), (1.0, "linear"), (2.0, "quadratic")];
        let held = |(power, _): &(f64, _)| {
            (low - INTERVAL_TOLERANCE..=high + INTERVAL_TOLERANCE).contains(power)
        };
        let held: Vec<_> = kinds.into_iter().filter(held).collect();
        let mut fit = Self { exponent, interval, kind: None, single, exact };
        if let [(power, kind)] = held.as_slice()
            && (exponent - power).abs() < 0.5
            && high - low <= 1.0
            && !fit.is_single_run()
        {
            fit.kind = Some(kind);
        }
        Some(fit)
    }

    /// Reports whether the interval restricts the power.
    pub fn is_conclusive(&self) -> bool {
        let [low, high] = self.interval;
        high - low <= WIDEST && !self.is_single_run()
    }

    /// Reports whether a point is a single run in real time, whose noise is unknown.
    pub fn is_single_run(&self) -> bool {
        self.single && !self.exact
    }

    /// Formats the fit: `1.98 (1.90 to 2.06), quadratic`.
    pub fn words(&self) -> String {
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
        let of = if self.single { ", of one schedule" } else { "" };
        format!("{} ({low} to {high}){kind}{of}", digits(self.exponent))
    }
}

impl Growth {
    pub fn is_conclusive(&self) -> bool {
        [self.before, self.after].iter().flatten().any(Fit::is_conclusive)
    }
}

/// Returns the growth of every phase with every parameter.
pub fn growth(configurations: &[Configuration], emulated: bool) -> Vec<Growth> {
    let changes = configurations.iter().flat_map(|c| &c.phases);
    let phases: BTreeSet<&AnyPhase> = changes.map(|change| &change.phase).collect();
    let mut all = Vec::new();
    for phase in phases {
        for with in SweepParameter::ALL {
            for sweep in sweeps(configurations, emulated, phase, with) {
                let [before, after] = sweep.fits();
                if before.is_some() || after.is_some() {
                    all.push(Growth {
                        phase: phase.clone(),
                        with,
                        of: sweep.rest.name(),
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
        Fit::of(&points, false, true).unwrap()
    }

    #[test]
    fn a_fit_is_named_by_the_power_it_holds() {
        let bent = |power: f64, bend: f64| {
            fit([1.0, 2.0, 4.0, 8.0].map(|x: f64| (x, x.powf(power) * x.powf(bend * x.ln()))))
        };
        assert_eq!(bent(0.01, 0.0).kind, Some("flat"));
        assert_eq!(bent(1.0, 0.0).words(), "1.00 (1.00 to 1.00), linear");
        assert_eq!(bent(2.0, 0.02).kind, Some("quadratic"));
        assert_eq!(bent(1.4, 0.0).kind, None);
        assert_eq!(bent(0.5, 0.4).kind, None, "too wide");
        let wild = fit([(1.0, 10.0), (2.0, 3.0), (4.0, 4.0), (8.0, 3.0)]);
        assert!(wild.interval[0] < -1.0 && (0.0..1.0).contains(&wild.interval[1]));
        assert_eq!(wild.kind, None, "it holds 0 and no other power, but is too wide");
        assert_eq!(wild.words(), "inconclusive", "neither flat nor quadratic");
    }

    #[test]
    fn one_run_a_point_of_real_time_is_inconclusive() {
        let points = [1.0, 2.0, 4.0].map(|x: f64| (x, x));
        let of = |exact| Fit::of(&points, true, exact).unwrap();

        assert_eq!(of(true).words(), "1.00 (1.00 to 1.00), linear, of one schedule");
        assert_eq!(of(false).words(), "inconclusive: one run a point");
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
        assert_eq!(flat.words(), "0.00 (0.00 to 0.00), flat");
    }
}
