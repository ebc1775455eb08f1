// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Logs of the kernel's `dirty_log_perf_test` and `demand_paging_test`, from 5.10 on.
//!
//! ```text
//! Testing guest mode: PA-bits:40,  VA-bits:48,  4K pages       begins a run, as in every KVM test
//! Populate memory time: 0.182904752s                           dirty_log_perf_test
//! Enabling dirty logging time: 0.000123456s
//! Iteration 1 dirty memory time: 0.110523456s                  splits blocks
//! Iteration 1 get dirty log time: 0.000023456s
//! Iteration 1 clear dirty log time: 0.001523456s               with manual clearing
//! Iteration 2 ...                                              blocks are split already
//! Disabling dirty logging time: 0.000923456s
//! Get dirty log over 2 iterations took 0.000041234s. (Avg 0.000020617s/iteration)
//! Clear dirty log over 2 iterations took ...                   with manual clearing
//!
//! Finished creating vCPUs and starting uffd threads            demand_paging_test
//! Total guest execution time: 1.234567890s
//! Per-vcpu demand paging rate: 212345.678901 pgs/sec/vcpu      newer kernels only
//! Overall demand paging rate: 212345.678901 pgs/sec
//! ```
//!
//! Without the whole last line of a run the log is cut off. The first iteration splits blocks and is
//! a step of its own; the later ones are averaged. Neither test prints backing, size or vCPUs, so
//! runs of different arguments need files of their own.

use std::{collections::BTreeMap, ops::Range};

use super::{
    log::{FAILURE, LogDefect, LogError, MODE, behind, parsed, seconds, time},
    page_table_log,
};
use crate::sample::{Sample, Setup, Step, engine, single_spaced};

/// Lines of a time and their steps.
const TIMES: [(&str, Step); 3] = [
    ("Populate memory time:", Step::of_other_test(0, "populate")),
    ("Enabling dirty logging time:", Step::of_other_test(1, "logging-on")),
    ("Disabling dirty logging time:", Step::of_other_test(8, "logging-off")),
];
const ITERATION: &str = "Iteration ";
/// Lines of an iteration, and the steps of the first and of the later iterations. The last one
/// needs manual clearing.
const ITERATION_TIMES: [(&str, Step, Step); 3] = [
    (
        " dirty memory time:",
        Step::of_other_test(2, "dirty-first"),
        Step::of_other_test(5, "dirty-later"),
    ),
    (
        " get dirty log time:",
        Step::of_other_test(3, "get-first"),
        Step::of_other_test(6, "get-later"),
    ),
    (
        " clear dirty log time:",
        Step::of_other_test(4, "clear-first"),
        Step::of_other_test(7, "clear-later"),
    ),
];
/// Lines that end `dirty_log_perf_test`; the second needs manual clearing.
const TOTALS: [&str; 2] = ["Get dirty log over ", "Clear dirty log over "];
const DEMAND: &str = "Total guest execution time:";
const DEMAND_BEGINS: &str = "Finished creating vCPUs and starting uffd threads";
const DEMAND_STEP: Step = Step::of_other_test(20, "demand-paging");
/// Rates that end `demand_paging_test`, and their units; every kernel prints the second.
const RATES: [(&str, &str); 2] = [
    ("Per-vcpu demand paging rate:", " pgs/sec/vcpu"),
    ("Overall demand paging rate:", " pgs/sec"),
];

/// One line of either test.
enum Line {
    /// A time or rate of the run, by its words.
    Figure(&'static str, f64),
    /// A time of an iteration, from 1, by its place in [`ITERATION_TIMES`].
    Iteration(u32, usize, f64),
    /// The number of iterations in a line of [`TOTALS`].
    Total(usize, u32),
    DemandBegins,
}

impl Line {
    /// Recognises a line; `None` for other lines.
    fn of(line: usize, text: &str) -> Result<Option<Self>, LogError> {
        let time = |value: &str| Ok(time(line, value.trim())?.0 as f64);
        let count = |value: &str| parsed(line, value.trim(), "a number of iterations");
        for words in TIMES.iter().map(|(words, _)| *words).chain([DEMAND]) {
            if let Some(value) = behind(text, words) {
                return Ok(Some(Self::Figure(words, time(value)?)));
            }
        }
        for (at, (words, ..)) in ITERATION_TIMES.iter().enumerate() {
            // Lines of single vCPUs begin with other words.
            let parts = text.split_once(words);
            let parts =
                parts.and_then(|(front, value)| Some((front.rsplit_once(ITERATION)?.1, value)));
            if let Some((number, value)) = parts {
                return Ok(Some(Self::Iteration(count(number)?, at, time(value)?)));
            }
        }
        for (at, words) in TOTALS.into_iter().enumerate() {
            if let Some(value) = behind(text, words) {
                let iterations = count(value.split_whitespace().next().unwrap_or_default())?;
                if !is_total(value) {
                    let wanted = "'N iterations took S.NNNNNNNNNs. (Avg S.NNNNNNNNNs/iteration)'";
                    return Err(LogDefect::value(value, wanted).at(line));
                }
                return Ok(Some(Self::Total(at, iterations)));
            }
        }
        for (words, unit) in RATES {
            if let Some(value) = behind(text, words) {
                let number = value.strip_suffix(unit).unwrap_or_default();
                let rate = number.parse();
                let rate =
                    rate.map_err(|_| LogDefect::value(value, "a rate in pages a second").at(line));
                return Ok(Some(Self::Figure(words, rate?)));
            }
        }
        Ok(text.contains(DEMAND_BEGINS).then_some(Self::DemandBegins))
    }

    fn is_of_demand_paging(&self) -> bool {
        match self {
            Self::Figure(words, _) => !TIMES.iter().any(|(known, _)| known == words),
            Self::DemandBegins => true,
            Self::Iteration(..) | Self::Total(..) => false,
        }
    }
}

/// Reports whether a total is whole: `3 iterations took 0.000059456s. (Avg 0.000019818s/iteration)`.
fn is_total(value: &str) -> bool {
    let parts = || {
        let (_, times) = value.split_once(" iterations took ")?;
        let (total, average) = times.split_once(". (Avg ")?;
        seconds(total)?;
        seconds(average.strip_suffix("/iteration)")?)
    };
    parts().is_some()
}

/// Engine and steps of a run.
type Run = (&'static str, Vec<(Step, f64)>);

/// A run whose end is not yet read.
#[derive(Default)]
struct OpenRun {
    /// First line.
    line: usize,
    /// True if the run is of `demand_paging_test`; `None` before the first line of either test.
    demand: Option<bool>,
    figures: BTreeMap<&'static str, f64>,
    iterations: Vec<[Option<f64>; 3]>,
    totals: [Option<u32>; 2],
}

impl OpenRun {
    fn take(&mut self, line: usize, known: &Line) -> Result<(), LogError> {
        let demand = known.is_of_demand_paging();
        if *self.demand.get_or_insert(demand) != demand {
            return Err(LogDefect::Mixed(self.line).at(line));
        }
        let (is_repeated, words) = match *known {
            Line::Figure(words, value) => (self.figures.insert(words, value).is_some(), words),
            Line::Total(at, count) => (self.totals[at].replace(count).is_some(), TOTALS[at]),
            Line::DemandBegins => return Ok(()),
            Line::Iteration(found, at, ns) => {
                let last = u32::try_from(self.iterations.len()).unwrap_or(u32::MAX);
                if found == last.saturating_add(1) {
                    self.iterations.push([None; 3]);
                } else if found != last || found == 0 {
                    return Err(LogDefect::Iteration { found, last }.at(line));
                }
                let times = self.iterations.last_mut();
                let repeated = times.is_none_or(|times| times[at].replace(ns).is_some());
                (repeated, ITERATION_TIMES[at].0)
            }
        };
        if is_repeated {
            return Err(LogDefect::Repeated(words.trim().to_owned(), self.line).at(line));
        }
        Ok(())
    }

    fn lacks(&self, missing: &str) -> LogError {
        LogDefect::incomplete(missing).at(self.line)
    }

    fn figure(&self, words: &str) -> Result<f64, LogError> {
        self.figures.get(words).copied().ok_or_else(|| self.lacks(words))
    }

    /// Returns engine and steps; `None` for a run of neither test.
    fn close(&self) -> Result<Option<Run>, LogError> {
        Ok(match self.demand {
            None => None,
            Some(true) => {
                let ns = self.figure(DEMAND)?;
                self.figure(RATES[1].0)?;
                Some((engine::DEMAND_PAGING_TEST, vec![(DEMAND_STEP, ns)]))
            }
            Some(false) => Some((engine::DIRTY_LOG_TEST, self.dirty_log_steps()?)),
        })
    }

    fn dirty_log_steps(&self) -> Result<Vec<(Step, f64)>, LogError> {
        let mut steps = Vec::new();
        for (words, step) in TIMES {
            steps.push((step, self.figure(words)?));
        }
        let is_cleared = self.iterations.iter().any(|times| times[2].is_some());
        let manual_clearing = is_cleared || self.totals[1].is_some();
        let totals = TOTALS.into_iter().zip(self.totals);
        for (words, total) in totals.take(1 + usize::from(manual_clearing)) {
            let total = total.ok_or_else(|| self.lacks(&format!("{words}N iterations took")))?;
            if total == 0 || u32::try_from(self.iterations.len()) != Ok(total) {
                return Err(self.lacks(&format!("Iteration {total} dirty memory time:")));
            }
        }
        let lines = ITERATION_TIMES.into_iter().enumerate();
        for (at, (words, first, later)) in lines.take(2 + usize::from(manual_clearing)) {
            let times: Option<Vec<f64>> = self.iterations.iter().map(|times| times[at]).collect();
            let times = times.ok_or_else(|| self.lacks(words))?;
            let (Some(one), rest) = (times.first(), times.get(1..).unwrap_or_default()) else {
                return Err(self.lacks(words));
            };
            steps.push((first, *one));
            if !rest.is_empty() {
                steps.push((later, rest.iter().sum::<f64>() / rest.len() as f64));
            }
        }
        steps.sort_by(|one, two| one.0.cmp(&two.0));
        Ok(steps)
    }
}

/// Takes the runs of both tests out of a log. The rest of it is returned with the lines of those
/// runs blank, so that its lines keep their numbers.
///
/// # Errors
/// A run failed, is damaged, is cut off, or is mixed with another.
pub fn take(text: &str) -> Result<(String, Vec<Sample>), LogError> {
    let lines: Vec<&str> = text.lines().collect();
    let mut known = Vec::with_capacity(lines.len());
    for (number, line) in (1..).zip(&lines) {
        // An unreadable last line without a line feed is where the file is cut.
        let is_cut = number == lines.len() && !text.ends_with('\n');
        known.push(Line::of(number, line).map_err(|error| match is_cut {
            true => LogDefect::CutOff(line.trim().to_owned()).at(number),
            false => error,
        })?);
    }
    let begins = (0..lines.len()).filter(|&at| lines[at].contains(MODE));
    let begins: Vec<usize> = begins.chain([lines.len()]).collect();
    if let Some(stray) = known[..begins[0]].iter().position(Option::is_some) {
        return Err(LogDefect::Stray(lines[stray].trim().to_owned()).at(stray + 1));
    }
    let mut rest = lines.clone();
    let mut samples: Vec<Sample> = Vec::new();
    for run in begins.windows(2).map(|run| run[0]..run[1]) {
        if let Some((engine, steps)) = read_run(&lines, &known, run.clone())? {
            let mode = single_spaced(behind(lines[run.start], MODE).unwrap_or_default());
            push_run(&mut samples, engine, mode, steps);
            rest[run].fill("");
        }
    }
    Ok((rest.iter().flat_map(|line| [line, "\n"]).collect(), samples))
}

/// Reads the run in some lines of a log; `None` for a run of another test.
fn read_run(
    lines: &[&str],
    known: &[Option<Line>],
    run: Range<usize>,
) -> Result<Option<Run>, LogError> {
    let begun = run.start + 1;
    let mut open = OpenRun { line: begun, ..OpenRun::default() };
    for at in run.clone() {
        if let Some(line) = &known[at] {
            open.take(at + 1, line)?;
        }
    }
    if open.demand.is_none() {
        return Ok(None);
    }
    let is_other = |&at: &usize| known[at].is_none() && page_table_log::is_distinctive(lines[at]);
    if let Some(at) = run.clone().find(is_other) {
        return Err(LogDefect::Mixed(begun).at(at + 1));
    }
    if let Some(at) = run.clone().find(|&at| lines[at].contains(FAILURE)) {
        return Err(LogDefect::Failed.at(at + 1));
    }
    open.close()
}

/// Adds the steps of a run, which is the next iteration of equal runs.
fn push_run(samples: &mut Vec<Sample>, engine: &str, mode: String, steps: Vec<(Step, f64)>) {
    let is_equal = |s: &&Sample| s.engine == engine && s.setup.mode == mode;
    let next = samples.iter().filter(is_equal).map(|s| s.iteration + 1).max();
    samples.extend(steps.into_iter().map(|(step, ns)| Sample {
        engine: engine.to_owned(),
        setup: Setup { subject: engine.to_owned(), mode: mode.clone(), ..Setup::default() },
        iteration: next.unwrap_or(0),
        step,
        ns,
        ..Sample::default()
    }));
}

#[cfg(test)]
mod tests;
