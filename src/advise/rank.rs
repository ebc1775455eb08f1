// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ranks the measured configurations.
//!
//! The first touch depends on backing and prefault, the writes under dirty logging on backing and
//! logging mode. The runs of all candidates that share these are one sample, so each figure has more
//! runs than there are passes.

use std::ops::Add;

use granule_report::Spread;
use granule_types::{
    backing::Backing,
    record::ResidentPages,
    units::{Bytes, Nanoseconds},
};

use super::{
    candidates::{Candidate, LoggingMode},
    sweep::Measurement,
};

/// Median of a figure over runs, with half the width of its range.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    pub median: f64,
    /// Half the distance between the quartiles, or between minimum and maximum of few runs; `None`
    /// for a single run.
    pub half_range: Option<f64>,
}

impl Estimate {
    fn new(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let spread = Spread::new(values)?;
        let [low, high] = spread.range();
        let half_range = (spread.runs > 1).then_some((high - low) / 2.0);
        Some(Self { median: spread.median, half_range })
    }

    fn scale(self, factor: f64) -> Self {
        let half_range = self.half_range.map(|half| half * factor);
        Self { median: self.median * factor, half_range }
    }

    /// Returns whether this estimate is below another one by more than both ranges.
    pub fn is_clearly_below(self, other: Self) -> bool {
        let ranges = self.half_range.zip(other.half_range);
        ranges.is_some_and(|(own, others)| self.median + own < other.median - others)
    }
}

impl Add for Estimate {
    type Output = Self;

    /// Adds medians, and ranges as if they depended on each other.
    fn add(self, other: Self) -> Self {
        let ranges = self.half_range.zip(other.half_range);
        Self {
            median: self.median + other.median,
            half_range: ranges.map(|(own, others)| own + others),
        }
    }
}

/// Writes under one mode of dirty logging.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoggedWrites {
    pub mode: LoggingMode,
    /// Time of one write, in nanoseconds.
    pub write: Estimate,
    /// Time to start and stop logging, in nanoseconds per GiB.
    switch: Estimate,
}

impl LoggedWrites {
    /// Returns the time of one write to every page of a GiB, in nanoseconds.
    fn per_gib(&self, page: Bytes) -> Estimate {
        self.switch + self.write.scale(Bytes::gib(1).0 as f64 / page.0 as f64)
    }
}

/// A configuration in the ranking, with its best mode of dirty logging. Times are in nanoseconds per
/// GiB.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub backing: Backing,
    pub prefault: bool,
    pub logged: LoggedWrites,
    pub populate: Estimate,
    pub first_touch: Estimate,
    /// Populate, first touch, and one write of every page under dirty logging.
    pub total: Estimate,
    /// Bytes of page tables per GiB, if the host reports them.
    pub tables: Option<f64>,
    pub resident_pages: Option<ResidentPages>,
}

impl Row {
    /// Returns the size of most of the resident pages, and their share.
    pub fn main_page(&self) -> Option<(Bytes, f64)> {
        let resident = &self.resident_pages.as_ref()?.resident_bytes;
        let total: u64 = resident.values().sum();
        let (page, bytes) = resident.iter().max_by_key(|(_, bytes)| **bytes)?;
        Some((Bytes(*page), *bytes as f64 / total as f64))
    }

    /// Returns the candidate of the row.
    pub fn candidate(&self) -> Candidate {
        Candidate { backing: self.backing, prefault: self.prefault, logging: self.logged.mode }
    }
}

/// The ranking, best first, and the writes of each backing in every mode.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Ranking {
    pub rows: Vec<Row>,
    pub logged: Vec<(Backing, Vec<LoggedWrites>)>,
}

type Measured = (Candidate, Measurement);

/// Ranks measurements on a host with pages of `page`.
pub fn rank(measurements: &[Measured], page: Bytes) -> Ranking {
    let mut ranking = Ranking::default();
    for (candidate, _) in measurements {
        let backing = candidate.backing;
        if ranking.logged.iter().any(|(other, _)| *other == backing) {
            continue;
        }
        let of_backing: Vec<&Measured> =
            measurements.iter().filter(|(other, _)| other.backing == backing).collect();
        let mut logged = logged_writes(&of_backing);
        let total = |logged: &LoggedWrites| logged.per_gib(page).median;
        logged.sort_by(|a, b| total(a).total_cmp(&total(b)));
        let rows = [false, true]
            .into_iter()
            .filter_map(|prefault| row(backing, prefault, &of_backing, *logged.first()?, page));
        ranking.rows.extend(rows);
        ranking.logged.push((backing, logged));
    }
    ranking.rows.sort_by(|a, b| a.total.median.total_cmp(&b.total.median));
    ranking
}

/// Returns the writes in each mode, in the order of the modes' first measurements.
fn logged_writes(of_backing: &[&Measured]) -> Vec<LoggedWrites> {
    let mut modes: Vec<LoggingMode> = Vec::new();
    for (candidate, _) in of_backing {
        if !modes.contains(&candidate.logging) {
            modes.push(candidate.logging);
        }
    }
    let writes = |mode: LoggingMode| {
        let of_mode = of_backing.iter().filter(move |(candidate, _)| candidate.logging == mode);
        let runs = of_mode.map(|(_, run)| run);
        let write = runs.clone().map(|run| run.rounds.0 as f64 / run.writes as f64);
        let switch = runs.map(|run| per_gib(run.switch_logging, run.memory));
        Some(LoggedWrites { mode, write: Estimate::new(write)?, switch: Estimate::new(switch)? })
    };
    modes.into_iter().filter_map(writes).collect()
}

fn row(
    backing: Backing,
    prefault: bool,
    of_backing: &[&Measured],
    logged: LoggedWrites,
    page: Bytes,
) -> Option<Row> {
    let runs = of_backing
        .iter()
        .filter(|(candidate, _)| candidate.prefault == prefault)
        .map(|(_, run)| run);
    let estimate = |figure: fn(&Measurement) -> Nanoseconds| {
        Estimate::new(runs.clone().map(|run| per_gib(figure(run), run.memory)))
    };
    let populate = estimate(|run| run.populate)?;
    let first_touch = estimate(|run| run.first_touch)?;
    let tables = of_backing.iter().filter_map(|(_, run)| {
        Some(run.table_bytes?.0 as f64 * Bytes::gib(1).0 as f64 / run.memory.0 as f64)
    });
    Some(Row {
        backing,
        prefault,
        logged,
        populate,
        first_touch,
        total: populate + first_touch + logged.per_gib(page),
        tables: Spread::new(tables).map(|spread| spread.median),
        resident_pages: runs.clone().find_map(|run| run.resident_pages.clone()),
    })
}

fn per_gib(time: Nanoseconds, memory: Bytes) -> f64 {
    time.0 as f64 * (Bytes::gib(1).0 as f64 / memory.0 as f64)
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::values::DirtyLogOption;

    pub const PAGE: Bytes = Bytes::kib(4);

    pub fn mode(dirty_log: DirtyLogOption) -> LoggingMode {
        LoggingMode { dirty_log, eager_split: None }
    }

    /// Returns a run of 1G whose writes take `write` nanoseconds each.
    pub fn run(
        backing: Backing,
        prefault: bool,
        dirty_log: DirtyLogOption,
        first_touch: u64,
        write: u64,
    ) -> Measured {
        let page = if backing == Backing::Anonymous { PAGE } else { Bytes::mib(2) };
        let measurement = Measurement {
            memory: Bytes::gib(1),
            populate: Nanoseconds(if prefault { 5_000_000 } else { 0 }),
            first_touch: Nanoseconds(first_touch),
            switch_logging: Nanoseconds(1000),
            rounds: Nanoseconds(100 * write),
            writes: 100,
            table_bytes: (!prefault).then_some(Bytes::mib(2)),
            resident_pages: Some(ResidentPages { resident_bytes: [(page.0, 1 << 30)].into() }),
        };
        (Candidate { backing, prefault, logging: mode(dirty_log) }, measurement)
    }

    pub fn runs() -> Vec<Measured> {
        use DirtyLogOption::{Plain, Ring};
        let (small, thp) = (Backing::Anonymous, Backing::AnonymousThp);
        let mut runs = Vec::new();
        for noise in [0, 1_000_000, 2_000_000] {
            runs.extend([
                run(small, false, Plain, 900_000_000 + noise, 3000),
                run(small, true, Plain, 300_000_000 + noise, 3000),
                run(small, false, Ring, 900_000_000 + noise, 2000),
                run(thp, false, Plain, 90_000_000 + noise, 3500),
                run(thp, true, Plain, 10_000_000 + noise, 3500),
                run(thp, false, Ring, 90_000_000 + noise, 4500),
            ]);
        }
        runs
    }

    #[test]
    fn rows_are_ranked_by_total_with_the_best_mode_of_their_backing() {
        let ranking = rank(&runs(), PAGE);

        let order: Vec<_> = ranking.rows.iter().map(|row| row.candidate().to_string()).collect();
        assert_eq!(
            order,
            [
                "anonymous, prefault on, ring",
                "anonymous_thp, prefault on, plain",
                "anonymous_thp, prefault off, plain",
                "anonymous, prefault off, ring",
            ]
        );
        let first = &ranking.rows[0];
        // 301 ms first touch, 5 ms populate, 262144 writes of 2 µs, 1 µs to switch logging.
        assert_eq!(first.total.median, 301e6 + 5e6 + 262_144.0 * 2000.0 + 1000.0);
        assert_eq!(first.main_page(), Some((PAGE, 1.0)));
        assert_eq!(first.tables, Some(2_097_152.0));
    }

    #[test]
    fn figures_are_scaled_to_a_gib_and_pooled_over_candidates() {
        let (candidate, run) = run(Backing::Anonymous, false, DirtyLogOption::Plain, 1000, 10);
        let small = Measurement { memory: Bytes::mib(64), ..run.clone() };
        let other = Candidate { logging: mode(DirtyLogOption::Ring), ..candidate };

        let ranking = rank(&[(candidate, small), (other, run)], PAGE);

        let touch = ranking.rows[0].first_touch;
        assert_eq!((touch.median, touch.half_range), (8500.0, Some(7500.0)));
        assert_eq!(ranking.logged[0].1.len(), 2);
    }

    #[test]
    fn overlapping_ranges_are_not_clearly_apart() {
        let range = |median, half| Estimate { median, half_range: Some(half) };
        let single_run = Estimate { median: 1.0, half_range: None };

        assert!(range(10.0, 1.0).is_clearly_below(range(13.0, 1.0)));
        assert!(!range(10.0, 1.0).is_clearly_below(range(11.5, 1.0)));
        assert!(!single_run.is_clearly_below(range(13.0, 1.0)));
    }
}
