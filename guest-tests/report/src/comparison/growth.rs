// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How times grow with the number of vCPUs or with the size of memory, where a comparison holds
//! several of them.

use serde::Serialize;

use super::{Comparison, PhaseChange};
use crate::{
    sample::{Setup, Step},
    spread::Spread,
    stats,
};
use granule_types::units::{Bytes, counted};

/// What grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Growing {
    /// The number of vCPUs.
    Vcpus,
    /// The size of memory.
    Memory,
}

impl Growing {
    /// Both of them.
    pub const ALL: [Self; 2] = [Self::Vcpus, Self::Memory];

    /// What a reader calls it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vcpus => "vCPUs",
            Self::Memory => "size",
        }
    }

    fn of(self, setup: &Setup) -> Option<u64> {
        match self {
            Self::Vcpus => setup.vcpus.map(u64::from),
            Self::Memory => setup.memory.map(|memory| memory.0),
        }
    }

    /// The setup without what grows.
    fn without(self, setup: &Setup) -> Setup {
        let mut rest = setup.clone();
        match self {
            Self::Vcpus => rest.vcpus = None,
            Self::Memory => rest.memory = None,
        }
        rest
    }

    /// A value of it and what it is of: `1 vCPU`, `64M`.
    pub fn words(self, value: u64) -> String {
        match self {
            Self::Vcpus => counted(value, "vCPU"),
            Self::Memory => self.label(value),
        }
    }

    /// A value of it in few characters.
    pub fn label(self, value: u64) -> String {
        match self {
            Self::Vcpus => value.to_string(),
            Self::Memory => Bytes(value).to_string(),
        }
    }
}

/// One phase over all values of what grows, everything else being the same.
#[derive(Debug, Clone)]
pub struct Family<'a> {
    /// What everything else is.
    pub rest: Setup,
    /// What ran it.
    pub engine: &'a str,
    /// Two values and more, the least first.
    pub points: Vec<(u64, &'a PhaseChange)>,
}

/// Every family of a step.
pub fn families<'a>(comparison: &'a Comparison, step: &Step, growing: Growing) -> Vec<Family<'a>> {
    let mut families: Vec<Family> = Vec::new();
    for (configuration, phase) in comparison.rows().filter(|(_, p)| p.phase == *step) {
        let Some(value) = growing.of(&configuration.setup) else {
            continue;
        };
        let rest = growing.without(&configuration.setup);
        let engine = configuration.engine.as_str();
        let mut known = families.iter_mut();
        match known.find(|family| family.rest == rest && family.engine == engine) {
            Some(family) => family.points.push((value, phase)),
            None => families.push(Family {
                rest,
                engine,
                points: vec![(value, phase)],
            }),
        }
    }
    for family in &mut families {
        family.points.sort_by_key(|(value, _)| *value);
        family.points.dedup_by_key(|(value, _)| *value);
    }
    families.retain(|family| family.points.len() > 1);
    families
}

/// How the time of a phase grows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Growth {
    /// Of which phase.
    pub phase: Step,
    /// With what.
    pub with: Growing,
    /// What everything else is.
    pub of: String,
    /// Before; `None` for fewer than three values.
    pub before: Option<Fit>,
    /// After.
    pub after: Option<Fit>,
}

/// A power law.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Fit {
    /// Time grows with this power.
    pub exponent: f64,
    /// Its 95% interval.
    pub interval: [f64; 2],
    /// The power in a word, if the interval holds one of 0, 1 and 2, and is no wider than 1.
    pub kind: Option<&'static str>,
    /// Whether a point is of one run alone.
    pub single: bool,
    /// Whether times are exact for their interleaving: an emulator's or the model's.
    pub exact: bool,
}

/// How far beyond its ends an interval still holds a power. Times that are exact lie so near to a
/// line that a constant part of a hundredth (a call's own cost) keeps 1 out of the interval.
const SLACK: f64 = 0.05;
/// An interval wider than this cannot tell flat from quadratic.
const WIDEST: f64 = 2.0;

impl Fit {
    fn of(points: &[(f64, f64)]) -> Option<Self> {
        let fit = stats::power_law(points)?;
        let (low, high) = fit.interval;
        let kinds = [(0.0, "flat"), (1.0, "linear"), (2.0, "quadratic")];
        let near = |power: f64| (fit.exponent - power).abs();
        let held: Vec<_> = kinds
            .into_iter()
            .filter(|(power, _)| (low - SLACK..=high + SLACK).contains(power))
            .collect();
        let kind = match held.as_slice() {
            [(power, kind)] if near(*power) < 0.5 && high - low <= 1.0 => Some(*kind),
            _ => None,
        };
        Some(Self {
            exponent: fit.exponent,
            interval: [low, high],
            kind,
            single: false,
            exact: true,
        })
    }

    /// Whether the interval says anything of the power.
    pub fn tells(&self) -> bool {
        let [low, high] = self.interval;
        high - low <= WIDEST && !self.is_one_draw()
    }

    /// Whether it is of real time, which no single run tells.
    pub fn is_one_draw(&self) -> bool {
        self.single && !self.exact
    }

    /// `1.98 (1.90 to 2.06), quadratic`; `cannot tell` where the interval says nothing.
    pub fn words(&self) -> String {
        if self.is_one_draw() {
            return "cannot tell: one run a point".to_owned();
        }
        if !self.tells() {
            return "cannot tell".to_owned();
        }
        // Not "-0.00".
        let digits = |value: f64| format!("{:.2}", if value.abs() < 0.005 { 0.0 } else { value });
        let [low, high] = self.interval.map(digits);
        let kind = self
            .kind
            .map_or_else(String::new, |kind| format!(", {kind}"));
        let of = if self.single {
            ", of one interleaving"
        } else {
            ""
        };
        format!("{} ({low} to {high}){kind}{of}", digits(self.exponent))
    }
}

impl Growth {
    /// Whether either side can be told.
    pub fn tells(&self) -> bool {
        [self.before, self.after].iter().flatten().any(Fit::tells)
    }
}

/// The fit of one side of a family, whose times are `exact` or real.
pub fn fit(family: &Family, exact: bool, side: fn(&PhaseChange) -> Option<Spread>) -> Option<Fit> {
    let point = |(value, phase): &(u64, &PhaseChange)| Some((*value as f64, side(phase)?.median));
    let points: Option<Vec<_>> = family.points.iter().map(point).collect();
    let mut fit = Fit::of(&points?)?;
    let mut spreads = family.points.iter().filter_map(|(_, phase)| side(phase));
    fit.single = spreads.any(|spread| spread.runs == 1);
    fit.exact = exact;
    if fit.is_one_draw() {
        fit.kind = None;
    }
    Some(fit)
}

/// Whether the times of a family are exact for their interleaving: an emulator's or the model's.
pub fn is_exact(comparison: &Comparison, family: &Family) -> bool {
    comparison.is_emulated() || family.engine == "model"
}

/// All growth that can be told.
pub fn growth(comparison: &Comparison) -> Vec<Growth> {
    let steps: std::collections::BTreeSet<&Step> =
        comparison.rows().map(|(_, phase)| &phase.phase).collect();
    let mut all = Vec::new();
    for step in steps {
        for with in Growing::ALL {
            for family in families(comparison, step, with) {
                let exact = is_exact(comparison, &family);
                let growth = Growth {
                    phase: step.clone(),
                    with,
                    of: family.rest.name(),
                    before: fit(&family, exact, |phase| phase.time.before),
                    after: fit(&family, exact, |phase| phase.time.after),
                };
                if growth.before.is_some() || growth.after.is_some() {
                    all.push(growth);
                }
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fit_is_called_by_the_power_it_holds() {
        let fit = |power: f64, bend: f64| {
            let points =
                [1.0, 2.0, 4.0, 8.0].map(|x: f64| (x, x.powf(power) * x.powf(bend * x.ln())));
            Fit::of(&points).unwrap()
        };
        assert_eq!(fit(0.01, 0.0).kind, Some("flat"));
        assert_eq!(fit(1.0, 0.0).words(), "1.00 (1.00 to 1.00), linear");
        assert_eq!(fit(2.0, 0.02).kind, Some("quadratic"));
        assert_eq!(fit(1.4, 0.0).kind, None);
        assert_eq!(fit(0.5, 0.4).kind, None, "too wide");
        let wild = [(1.0, 10.0), (2.0, 3.0), (4.0, 4.0), (8.0, 3.0)];
        let wild = Fit::of(&wild).unwrap();
        assert!(wild.interval[0] < -1.0 && (0.0..1.0).contains(&wild.interval[1]));
        assert_eq!(
            wild.kind, None,
            "it holds 0 alone, but anything else as well"
        );
        assert_eq!(wild.words(), "cannot tell", "neither flat nor quadratic");
    }

    #[test]
    fn one_run_a_point_of_real_time_tells_nothing() {
        let points = [1.0, 2.0, 4.0].map(|x: f64| (x, x));
        let single = Fit {
            single: true,
            ..Fit::of(&points).unwrap()
        };
        let real = Fit {
            exact: false,
            ..single
        };

        assert_eq!(
            single.words(),
            "1.00 (1.00 to 1.00), linear, of one interleaving"
        );
        assert_eq!(real.words(), "cannot tell: one run a point");
        assert!(!real.tells());
    }

    #[test]
    fn a_comparison_of_single_runs_tells_growth_of_virtual_time_alone() {
        let told = |emulated: bool| {
            let records = [1, 2, 4].map(|vcpus| {
                let mut record = crate::fixture::record();
                record.config.vcpus = vcpus;
                record.ns = granule_types::units::Nanoseconds(u64::from(vcpus) * 1_000_000);
                if !emulated {
                    record.host.emulator = None;
                }
                record
            });
            let side = crate::samples(&records);
            let comparison = Comparison::of(&side, &side, &Default::default()).unwrap();
            crate::render::markdown(&comparison)
        };

        assert!(told(true).contains("linear, of one interleaving"));
        assert!(told(false).contains("cannot tell: one run a point"));
        assert!(!told(false).contains("linear"));
    }

    #[test]
    fn exact_times_with_a_constant_part_are_still_what_they_are() {
        let points = |constant: f64| [1.0, 2.0, 4.0, 8.0].map(|x: f64| (x, x + constant));
        let near = Fit::of(&points(0.02)).unwrap();

        assert!(near.interval[1] < 1.0, "{near:?}");
        assert_eq!(near.kind, Some("linear"));
        assert_eq!(Fit::of(&points(1.0)).unwrap().kind, None);
        let flat = [1.0, 2.0, 4.0, 8.0].map(|x: f64| (x, x.powf(-0.001)));
        assert_eq!(Fit::of(&flat).unwrap().words(), "0.00 (0.00 to 0.00), flat");
    }
}
