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
//! Without the whole last line of a run the log is cut off. The first iteration splits blocks and
//! is a phase of its own; the later ones are averaged. Neither test prints backing, size or vCPUs,
//! so runs of different arguments need files of their own.

use std::{collections::BTreeMap, ops::Range};

use super::{
    log::{
        FAILURE, MODE, cut_off, damaged, failed, incomplete, line_of_other_test, line_outside_run,
        out_of_order, parsed, repeated, seconds, text_after, time,
    },
    page_table_log,
};
use crate::{
    results::FileError,
    sample::{AnyPhase, RunSetup, Sample, engine, single_spaced},
};

/// Lines of a time and their phases.
const TIMES: [(&str, AnyPhase); 3] = [
    ("Populate memory time:", AnyPhase::of_other_test(0, "populate")),
    ("Enabling dirty logging time:", AnyPhase::of_other_test(1, "logging-on")),
    ("Disabling dirty logging time:", AnyPhase::of_other_test(8, "logging-off")),
];
const ITERATION: &str = "Iteration ";
/// Lines of an iteration, and the phases of the first and of the later iterations. The last one
/// needs manual clearing.
const ITERATION_TIMES: [(&str, [AnyPhase; 2]); 3] = [
    (" dirty memory time:", first_and_later(2, "dirty-first", "dirty-later")),
    (" get dirty log time:", first_and_later(3, "get-first", "get-later")),
    (" clear dirty log time:", first_and_later(4, "clear-first", "clear-later")),
];
/// Lines that end `dirty_log_perf_test`; the second needs manual clearing.
const TOTALS: [&str; 2] = ["Get dirty log over ", "Clear dirty log over "];
const DEMAND: &str = "Total guest execution time:";
const DEMAND_BEGINS: &str = "Finished creating vCPUs and starting uffd threads";
const DEMAND_PHASE: AnyPhase = AnyPhase::of_other_test(20, "demand-paging");
/// Rates that end `demand_paging_test`, and their units; every kernel prints the second.
const RATES: [(&str, &str); 2] = [
    ("Per-vcpu demand paging rate:", " pgs/sec/vcpu"),
    ("Overall demand paging rate:", " pgs/sec"),
];

const fn first_and_later(rank: usize, first: &'static str, later: &'static str) -> [AnyPhase; 2] {
    [AnyPhase::of_other_test(rank, first), AnyPhase::of_other_test(rank + 3, later)]
}

/// One line of either test.
struct PerfLine {
    words: &'static str,
    /// Number of its iteration, from 1; `None` for a line of the run.
    iteration: Option<u32>,
    /// Nanoseconds, pages per second, or a number of iterations.
    value: f64,
    /// True if the line is of `demand_paging_test`.
    demand: bool,
}

impl PerfLine {
    /// Recognises a line; `None` for other lines.
    fn of(text: &str) -> Result<Option<Self>, FileError> {
        let line = |words, value| Self { words, iteration: None, value, demand: false };
        let count = |value: &str| parsed(value.trim(), "a number of iterations");
        for words in TIMES.iter().map(|(words, _)| *words).chain([DEMAND]) {
            if let Some(value) = text_after(text, words) {
                let demand = words == DEMAND;
                return Ok(Some(Self { demand, ..line(words, time(value)?.0 as f64) }));
            }
        }
        for (words, _) in &ITERATION_TIMES {
            // Lines of single vCPUs begin with other words.
            let parts = text.split_once(words);
            let parts =
                parts.and_then(|(front, value)| Some((front.rsplit_once(ITERATION)?.1, value)));
            if let Some((number, value)) = parts {
                let iteration = Some(count(number)?);
                return Ok(Some(Self { iteration, ..line(words, time(value)?.0 as f64) }));
            }
        }
        for words in TOTALS {
            if let Some(value) = text_after(text, words) {
                let iterations = count(value.split_whitespace().next().unwrap_or_default())?;
                if !is_total(value) {
                    let expected = "'N iterations took S.NNNNNNNNNs. (Avg S.NNNNNNNNNs/iteration)'";
                    return Err(damaged(value, expected));
                }
                return Ok(Some(line(words, f64::from(iterations))));
            }
        }
        for (words, unit) in RATES {
            if let Some(value) = text_after(text, words) {
                let number = value.strip_suffix(unit).unwrap_or_default();
                let rate =
                    number.parse().map_err(|_| damaged(value, "a rate in pages a second"))?;
                return Ok(Some(Self { demand: true, ..line(words, rate) }));
            }
        }
        let begins = Self { demand: true, ..line(DEMAND_BEGINS, 0.0) };
        Ok(text.contains(DEMAND_BEGINS).then_some(begins))
    }
}

/// Returns whether a text is a complete total: `3 iterations took 0.000059456s. (Avg
/// 0.000019818s/iteration)`.
fn is_total(value: &str) -> bool {
    let parts = || {
        let (_, times) = value.split_once(" iterations took ")?;
        let (total, average) = times.split_once(". (Avg ")?;
        seconds(total)?;
        seconds(average.strip_suffix("/iteration)")?)
    };
    parts().is_some()
}

/// Engine, and times of the phases, of a run.
type RunPhases = (&'static str, Vec<(AnyPhase, f64)>);

/// A run whose end is not yet read.
#[derive(Default)]
struct OpenRun {
    /// First line.
    begin: usize,
    /// True if the run is of `demand_paging_test`; `None` before the first line of either test.
    demand: Option<bool>,
    /// Values by words and iteration.
    values: BTreeMap<(&'static str, Option<u32>), f64>,
    /// Number of the last iteration.
    iterations: u32,
}

impl OpenRun {
    fn take(&mut self, line: &PerfLine) -> Result<(), FileError> {
        if *self.demand.get_or_insert(line.demand) != line.demand {
            return Err(line_of_other_test(self.begin));
        }
        if let Some(found) = line.iteration {
            let last = self.iterations;
            if found != last.saturating_add(1) && (found != last || found == 0) {
                return Err(out_of_order(found, last));
            }
            self.iterations = found;
        }
        let known = self.values.insert((line.words, line.iteration), line.value);
        if known.is_some() && line.words != DEMAND_BEGINS {
            return Err(repeated(line.words, self.begin));
        }
        Ok(())
    }

    fn value(&self, words: &'static str, iteration: Option<u32>) -> Result<f64, FileError> {
        let value = self.values.get(&(words, iteration)).copied();
        value.ok_or_else(|| incomplete(words).at(self.begin))
    }

    /// Returns engine and phases; `None` for a run of neither test.
    fn close(&self) -> Result<Option<RunPhases>, FileError> {
        Ok(match self.demand {
            None => None,
            Some(true) => {
                let ns = self.value(DEMAND, None)?;
                self.value(RATES[1].0, None)?;
                Some((engine::DEMAND_PAGING_TEST, vec![(DEMAND_PHASE, ns)]))
            }
            Some(false) => Some((engine::DIRTY_LOG_TEST, self.dirty_log_phases()?)),
        })
    }

    fn dirty_log_phases(&self) -> Result<Vec<(AnyPhase, f64)>, FileError> {
        let mut phases = Vec::new();
        for (words, phase) in TIMES {
            phases.push((phase, self.value(words, None)?));
        }
        let of_clearing = [ITERATION_TIMES[2].0, TOTALS[1]];
        let manual_clearing = self.values.keys().any(|(words, _)| of_clearing.contains(words));
        for words in TOTALS.into_iter().take(1 + usize::from(manual_clearing)) {
            let missing = || incomplete(&format!("{words}N iterations took")).at(self.begin);
            let total = self.value(words, None).map_err(|_| missing())?;
            if total == 0.0 || total != f64::from(self.iterations) {
                let next = format!("Iteration {total} dirty memory time:");
                return Err(incomplete(&next).at(self.begin));
            }
        }
        let lines = ITERATION_TIMES.into_iter().take(2 + usize::from(manual_clearing));
        for (words, [first, later]) in lines {
            let times = (1..=self.iterations).map(|iteration| self.value(words, Some(iteration)));
            let times = times.collect::<Result<Vec<f64>, _>>()?;
            phases.push((first, times[0]));
            if let rest @ [_, ..] = &times[1..] {
                phases.push((later, rest.iter().sum::<f64>() / rest.len() as f64));
            }
        }
        phases.sort_by(|one, two| one.0.cmp(&two.0));
        Ok(phases)
    }
}

/// Removes the runs of both tests from a log and returns them. The rest of it is returned with the
/// lines of those runs blank, so that its lines keep their numbers.
///
/// # Errors
/// A run failed, is damaged, is cut off, or is mixed with another.
pub fn take(text: &str) -> Result<(String, Vec<Sample>), FileError> {
    let lines: Vec<&str> = text.lines().collect();
    let mut known = Vec::with_capacity(lines.len());
    for (number, line) in (1..).zip(&lines) {
        // An unreadable last line without a line feed is where the file is cut.
        let is_cut = number == lines.len() && !text.ends_with('\n');
        let error = |error| if is_cut { cut_off(line) } else { error };
        known.push(PerfLine::of(line).map_err(|found| error(found).at(number))?);
    }
    let begins = (0..lines.len()).filter(|&at| lines[at].contains(MODE));
    let begins: Vec<usize> = begins.chain([lines.len()]).collect();
    if let Some(at) = known[..begins[0]].iter().position(Option::is_some) {
        return Err(line_outside_run(lines[at]).at(at + 1));
    }
    let mut rest = lines.clone();
    let mut samples: Vec<Sample> = Vec::new();
    for run in begins.windows(2).map(|run| run[0]..run[1]) {
        if let Some((engine, phases)) = read_run(&lines, &known, run.clone())? {
            let mode = single_spaced(text_after(lines[run.start], MODE).unwrap_or_default());
            push_run(&mut samples, engine, mode, phases);
            rest[run].fill("");
        }
    }
    Ok((rest.iter().flat_map(|line| [line, "\n"]).collect(), samples))
}

/// Reads the run in some lines of a log; `None` for a run of another test.
fn read_run(
    lines: &[&str],
    known: &[Option<PerfLine>],
    run: Range<usize>,
) -> Result<Option<RunPhases>, FileError> {
    let begin = run.start + 1;
    let mut open = OpenRun { begin, ..OpenRun::default() };
    for at in run.clone() {
        if let Some(line) = &known[at] {
            open.take(line).map_err(|error| error.at(at + 1))?;
        }
    }
    if open.demand.is_none() {
        return Ok(None);
    }
    let is_other = |&at: &usize| known[at].is_none() && page_table_log::is_distinctive(lines[at]);
    if let Some(at) = run.clone().find(is_other) {
        return Err(line_of_other_test(begin).at(at + 1));
    }
    if let Some(at) = run.clone().find(|&at| lines[at].contains(FAILURE)) {
        return Err(failed().at(at + 1));
    }
    open.close()
}

/// Adds the phases of a run, which is the next iteration of equal runs.
fn push_run(samples: &mut Vec<Sample>, engine: &str, mode: String, phases: Vec<(AnyPhase, f64)>) {
    let is_equal = |s: &&Sample| s.engine == engine && s.setup.mode == mode;
    let next = samples.iter().filter(is_equal).map(|s| s.iteration + 1).max();
    samples.extend(phases.into_iter().map(|(phase, ns)| Sample {
        engine: engine.to_owned(),
        setup: RunSetup { subject: engine.to_owned(), mode: mode.clone(), ..RunSetup::default() },
        iteration: next.unwrap_or(0),
        phase,
        ns,
        ..Sample::default()
    }));
}
