// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Logs of the kernel's `dirty_log_perf_test` and `demand_paging_test`, from 5.10 on.
//!
//! ```text
//! Testing guest mode: PA-bits:40,  VA-bits:48,  4K pages       begins a run, as in every KVM test
//! Populate memory time: 0.182904752s                           dirty_log_perf_test
//! Enabling dirty logging time: 0.000123456s
//! Iteration 1 dirty memory time: 0.110523456s                  splits blocks
//! Iteration 1 get dirty log time: 0.000023456s
//! Iteration 1 clear dirty log time: 0.001523456s               if the log is cleared by hand
//! Iteration 2 ...                                              pages are small already
//! Disabling dirty logging time: 0.000923456s
//! Get dirty log over 2 iterations took 0.000041234s. (Avg 0.000020617s/iteration)
//! Clear dirty log over 2 iterations took ...                   if the log is cleared by hand
//!
//! Finished creating vCPUs and starting uffd threads            demand_paging_test
//! Total guest execution time: 1.234567890s
//! Per-vcpu demand paging rate: 212345.678901 pgs/sec/vcpu      newer kernels alone
//! Overall demand paging rate: 212345.678901 pgs/sec
//! ```
//!
//! The last line of a run must be there and whole, or the log was cut off.
//!
//! The first iteration does other work than the later ones, which are averaged. Neither test prints
//! its backing, its size or its vCPUs: logs of different arguments belong into different files.

use super::{
    LogError,
    page_table_log::{self, MODE, behind, seconds},
};
use crate::sample::{Sample, Setup, Step, plain};
use granule_types::record::Host;

/// What samples carry as their engine.
pub const ENGINES: [&str; 2] = ["dirty_log_perf_test", "demand_paging_test"];

/// Lines with a time, and the steps they are; an iteration's lines have two, for the first and for
/// the later ones.
const TIMES: [(&str, Step); 3] = [
    ("Populate memory time:", Step::foreign(0, "populate")),
    (
        "Enabling dirty logging time:",
        Step::foreign(1, "logging-on"),
    ),
    (
        "Disabling dirty logging time:",
        Step::foreign(8, "logging-off"),
    ),
];
const ITERATION: &str = "Iteration ";
const ITERATION_TIMES: [(&str, Step, Step); 3] = [
    (
        " dirty memory time:",
        Step::foreign(2, "dirty-first"),
        Step::foreign(5, "dirty-later"),
    ),
    (
        " get dirty log time:",
        Step::foreign(3, "get-first"),
        Step::foreign(6, "get-later"),
    ),
    (
        " clear dirty log time:",
        Step::foreign(4, "clear-first"),
        Step::foreign(7, "clear-later"),
    ),
];
/// The lines that end `dirty_log_perf_test`; the second only if the log is cleared by hand.
const TOTALS: [&str; 2] = ["Get dirty log over ", "Clear dirty log over "];
const DEMAND: &str = "Total guest execution time:";
const DEMAND_BEGINS: &str = "Finished creating vCPUs and starting uffd threads";
const DEMAND_STEP: Step = Step::foreign(20, "demand-paging");
/// The rates that end `demand_paging_test`, and their units; every kernel prints the second.
const RATES: [(&str, &str); 2] = [
    ("Per-vcpu demand paging rate:", " pgs/sec/vcpu"),
    ("Overall demand paging rate:", " pgs/sec"),
];

/// One line of either test.
enum Line {
    /// A time of the run: which of [`TIMES`].
    Time(usize, f64),
    /// A time of an iteration, from 1: which of [`ITERATION_TIMES`].
    Iteration(u32, usize, f64),
    /// An end of `dirty_log_perf_test`: which of [`TOTALS`], and how many iterations it tells of.
    Total(usize, u32),
    DemandBegins,
    Demand(f64),
    /// A rate: which of [`RATES`].
    Rate(usize),
}

impl Line {
    fn of(line: usize, text: &str) -> Result<Option<Self>, LogError> {
        let time = |value: &str| {
            seconds(value)
                .map(|ns| ns.0 as f64)
                .ok_or_else(|| LogError::Value {
                    line,
                    value: value.to_owned(),
                    wanted: "a time as S.NNNNNNNNNs",
                })
        };
        let number = |value: &str| {
            value.parse().map_err(|_| LogError::Value {
                line,
                value: value.to_owned(),
                wanted: "a number of iterations",
            })
        };
        for (at, (words, _)) in TIMES.iter().enumerate() {
            if let Some(value) = behind(text, words) {
                return Ok(Some(Self::Time(at, time(value)?)));
            }
        }
        for (at, (words, _, _)) in ITERATION_TIMES.iter().enumerate() {
            let parts = text.split_once(words);
            let Some((front, value)) = parts else {
                continue;
            };
            // A vCPU's own line, of a test built to tell more, has another beginning.
            if let Some((_, count)) = front.rsplit_once(ITERATION) {
                let count = number(count.trim())?;
                return Ok(Some(Self::Iteration(count, at, time(value.trim())?)));
            }
        }
        let wrong = |value: &str, wanted| LogError::Value {
            line,
            value: value.to_owned(),
            wanted,
        };
        for (at, words) in TOTALS.into_iter().enumerate() {
            if let Some(value) = behind(text, words) {
                let count = number(value.split_whitespace().next().unwrap_or_default())?;
                if !is_total(value) {
                    let wanted = "'N iterations took S.NNNNNNNNNs. (Avg S.NNNNNNNNNs/iteration)'";
                    return Err(wrong(value, wanted));
                }
                return Ok(Some(Self::Total(at, count)));
            }
        }
        for (at, (words, unit)) in RATES.into_iter().enumerate() {
            if let Some(value) = behind(text, words) {
                let rate = value.strip_suffix(unit).map(str::parse::<f64>);
                if !matches!(rate, Some(Ok(_))) {
                    return Err(wrong(value, "a rate in pages a second"));
                }
                return Ok(Some(Self::Rate(at)));
            }
        }
        if let Some(value) = behind(text, DEMAND) {
            return Ok(Some(Self::Demand(time(value)?)));
        }
        Ok(text.contains(DEMAND_BEGINS).then_some(Self::DemandBegins))
    }
}

/// Whether a total is whole: `3 iterations took 0.000059456s. (Avg 0.000019818s/iteration)`.
fn is_total(value: &str) -> bool {
    let parts = || {
        let (_, times) = value.split_once(" iterations took ")?;
        let (total, average) = times.split_once(". (Avg ")?;
        seconds(total)?;
        seconds(average.strip_suffix("/iteration)")?)
    };
    parts().is_some()
}

/// A run that came to its end.
struct Run {
    engine: &'static str,
    mode: String,
    steps: Vec<(Step, f64)>,
}

/// A run not yet at its end.
struct Open {
    line: usize,
    mode: String,
    /// Whether a line of each engine was met.
    met: [bool; 2],
    times: [Option<f64>; 3],
    iterations: Vec<[Option<f64>; 3]>,
    totals: [Option<u32>; 2],
    demand: Option<f64>,
    rates: [bool; 2],
}

impl Open {
    fn new(line: usize, mode: &str) -> Self {
        Self {
            line,
            mode: plain(mode),
            met: [false; 2],
            times: [None; 3],
            iterations: Vec::new(),
            totals: [None; 2],
            demand: None,
            rates: [false; 2],
        }
    }

    fn take(&mut self, line: usize, known: &Line) -> Result<(), LogError> {
        let twice = |text: &str| LogError::Twice {
            line,
            text: text.trim().to_owned(),
            begun: self.line,
        };
        let demand = matches!(known, Line::Demand(_) | Line::DemandBegins | Line::Rate(_));
        self.met[usize::from(demand)] = true;
        if self.met == [true; 2] {
            return Err(LogError::Mixed {
                line,
                begun: self.line,
            });
        }
        let (slot, value, words) = match *known {
            Line::Time(at, ns) => (&mut self.times[at], ns, TIMES[at].0),
            Line::Demand(ns) => (&mut self.demand, ns, DEMAND),
            Line::DemandBegins => return Ok(()),
            Line::Total(at, count) => {
                let before = self.totals[at].replace(count);
                return before.map_or(Ok(()), |_| Err(twice(TOTALS[at])));
            }
            Line::Rate(at) => {
                let before = std::mem::replace(&mut self.rates[at], true);
                return if before {
                    Err(twice(RATES[at].0))
                } else {
                    Ok(())
                };
            }
            Line::Iteration(count, at, ns) => {
                let words = ITERATION_TIMES[at].0;
                let last = u32::try_from(self.iterations.len()).unwrap_or(u32::MAX);
                if count == last.saturating_add(1) {
                    self.iterations.push([None; 3]);
                } else if count != last || count == 0 {
                    return Err(LogError::OutOfTurn {
                        line,
                        found: count,
                        last,
                    });
                }
                let Some(open) = self.iterations.last_mut() else {
                    return Ok(());
                };
                (&mut open[at], ns, words)
            }
        };
        match slot.replace(value) {
            Some(_) => Err(twice(words)),
            None => Ok(()),
        }
    }

    /// The run; `None` where the run is of neither test.
    fn close(self) -> Result<Option<Run>, LogError> {
        let lacks = |missing: &str| LogError::Incomplete {
            line: self.line,
            missing: missing.trim().to_owned(),
        };
        let [dirty, demand] = self.met;
        if demand {
            let ns = self.demand.ok_or_else(|| lacks(DEMAND))?;
            if !self.rates[1] {
                return Err(lacks(RATES[1].0));
            }
            return Ok(Some(Run {
                engine: ENGINES[1],
                mode: self.mode,
                steps: vec![(DEMAND_STEP, ns)],
            }));
        }
        if !dirty {
            return Ok(None);
        }
        let mut steps = Vec::new();
        for ((words, step), time) in TIMES.into_iter().zip(self.times) {
            steps.push((step, time.ok_or_else(|| lacks(words))?));
        }
        let by_hand = self.iterations.iter().any(|times| times[2].is_some());
        let by_hand = by_hand || self.totals[1].is_some();
        for (words, total) in TOTALS
            .into_iter()
            .zip(self.totals)
            .take(1 + usize::from(by_hand))
        {
            let total = total.ok_or_else(|| lacks(&format!("{words}N iterations took")))?;
            if self.iterations.is_empty() || u32::try_from(self.iterations.len()) != Ok(total) {
                return Err(lacks(&format!("Iteration {total} dirty memory time:")));
            }
        }
        for (at, (words, first, later)) in ITERATION_TIMES.into_iter().enumerate() {
            let times: Vec<Option<f64>> = self.iterations.iter().map(|times| times[at]).collect();
            if at == 2 && !by_hand {
                continue;
            }
            let times: Option<Vec<f64>> = times.into_iter().collect();
            let times = times.ok_or_else(|| lacks(words))?;
            steps.push((first, times[0]));
            if let [_, rest @ ..] = times.as_slice()
                && !rest.is_empty()
            {
                steps.push((later, rest.iter().sum::<f64>() / rest.len() as f64));
            }
        }
        steps.sort_by(|one, two| one.0.cmp(&two.0));
        Ok(Some(Run {
            engine: ENGINES[0],
            mode: self.mode,
            steps,
        }))
    }
}

/// Takes the runs of both tests out of a log. The rest of it comes back with those runs' lines left
/// blank, so that its lines still count as they did.
///
/// # Errors
/// A run is damaged or cut off, failed, or is mixed with another.
pub fn take(text: &str) -> Result<(String, Vec<Sample>), LogError> {
    let lines: Vec<&str> = text.lines().collect();
    let begins = |line: &&str| line.contains(MODE);
    // What cannot be read at the very end, without a line's end, is where the file is cut.
    let known = |index: usize| {
        Line::of(index + 1, lines[index]).map_err(|error| match error {
            LogError::Value { line, .. } if line == lines.len() && !text.ends_with('\n') => {
                LogError::BreaksOff {
                    line,
                    text: lines[index].trim().to_owned(),
                }
            }
            error => error,
        })
    };
    let mut rest = String::with_capacity(text.len());
    let mut samples: Vec<Sample> = Vec::new();
    let mut at = lines.iter().position(&begins).unwrap_or(lines.len());
    for (index, text) in lines[..at].iter().enumerate() {
        if known(index)?.is_some() {
            return Err(LogError::Stray {
                line: index + 1,
                text: text.trim().to_owned(),
            });
        }
        rest.push_str(text);
        rest.push('\n');
    }
    while at < lines.len() {
        let next = lines[at + 1..].iter().position(&begins);
        let end = next.map_or(lines.len(), |distance| at + 1 + distance);
        let mut open = Open::new(at + 1, behind(lines[at], MODE).unwrap_or_default());
        let mut theirs = None;
        for (index, text) in lines.iter().enumerate().take(end).skip(at) {
            if let Some(line) = known(index)? {
                open.take(index + 1, &line)?;
            } else if page_table_log::is_distinctive(text) {
                theirs.get_or_insert(index + 1);
            }
        }
        if let (Some(line), true) = (theirs, open.met != [false; 2]) {
            return Err(LogError::Mixed {
                line,
                begun: at + 1,
            });
        }
        if open.met != [false; 2]
            && let Some(failed) = lines[at..end]
                .iter()
                .position(|l| l.contains(page_table_log::FAILURE))
        {
            return Err(LogError::Failed {
                line: at + failed + 1,
            });
        }
        match open.close()? {
            Some(Run {
                engine,
                mode,
                steps,
            }) => {
                let alike = |s: &&Sample| s.engine == engine && s.setup.mode == mode;
                let iteration = samples.iter().filter(alike).map(|s| s.iteration + 1).max();
                let sample = |(step, ns)| sample(engine, &mode, iteration.unwrap_or(0), step, ns);
                samples.extend(steps.into_iter().map(sample));
                rest.extend(std::iter::repeat_n('\n', end - at));
            }
            None => {
                for line in &lines[at..end] {
                    rest.push_str(line);
                    rest.push('\n');
                }
            }
        }
        at = end;
    }
    Ok((rest, samples))
}

fn sample(engine: &str, mode: &str, iteration: u32, step: Step, ns: f64) -> Sample {
    Sample {
        host: Host::default(),
        engine: engine.to_owned(),
        setup: Setup {
            subject: engine.to_owned(),
            mode: mode.to_owned(),
            ..Setup::default()
        },
        seed: 0,
        iteration,
        obtained: None,
        step,
        ns,
        vcpu_ns: Vec::new(),
        counters: Default::default(),
        events: Default::default(),
        gauges: Default::default(),
    }
}

#[cfg(test)]
mod tests;
