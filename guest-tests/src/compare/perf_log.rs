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
//!
//! Finished creating vCPUs and starting uffd threads            demand_paging_test
//! Total guest execution time: 1.234567890s
//! ```
//!
//! The first iteration does other work than the later ones, which are averaged. Neither test prints
//! its backing, its size or its vCPUs: logs of different arguments belong into different files.

use super::{
    raw_log::{self, LogError, MODE, behind, seconds},
    sample::{Sample, Setup, Step, plain},
};
use crate::results::Host;

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
const TOTAL: &str = "Get dirty log over ";
const DEMAND: &str = "Total guest execution time:";
const DEMAND_BEGINS: &str = "Finished creating vCPUs and starting uffd threads";
const DEMAND_STEP: Step = Step::foreign(20, "demand-paging");
const CUT: &str = "Get dirty log over N iterations took";

/// One line of either test.
enum Line {
    /// A time of the run: which of [`TIMES`].
    Time(usize, f64),
    /// A time of an iteration, from 1: which of [`ITERATION_TIMES`].
    Iteration(u32, usize, f64),
    /// The end of `dirty_log_perf_test`, and how many iterations it says there were.
    Total(u32),
    DemandBegins,
    Demand(f64),
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
        if let Some(value) = behind(text, TOTAL) {
            let count = value.split_whitespace().next().unwrap_or_default();
            return Ok(Some(Self::Total(number(count)?)));
        }
        if let Some(value) = behind(text, DEMAND) {
            return Ok(Some(Self::Demand(time(value)?)));
        }
        Ok(text.contains(DEMAND_BEGINS).then_some(Self::DemandBegins))
    }
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
    total: Option<u32>,
    demand: Option<f64>,
}

impl Open {
    fn new(line: usize, mode: &str) -> Self {
        Self {
            line,
            mode: plain(mode),
            met: [false; 2],
            times: [None; 3],
            iterations: Vec::new(),
            total: None,
            demand: None,
        }
    }

    fn take(&mut self, line: usize, known: &Line) -> Result<(), LogError> {
        let twice = |text: &str| LogError::Twice {
            line,
            text: text.trim().to_owned(),
            begun: self.line,
        };
        let demand = matches!(known, Line::Demand(_) | Line::DemandBegins);
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
            Line::Total(count) => {
                let before = self.total.replace(count);
                return before.map_or(Ok(()), |_| Err(twice(TOTAL)));
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
        let total = self.total.ok_or_else(|| lacks(CUT))?;
        if self.iterations.is_empty() || u32::try_from(self.iterations.len()) != Ok(total) {
            return Err(lacks(&format!("Iteration {total} dirty memory time:")));
        }
        for (at, (words, first, later)) in ITERATION_TIMES.into_iter().enumerate() {
            let times: Vec<Option<f64>> = self.iterations.iter().map(|times| times[at]).collect();
            let by_hand = self.iterations.iter().any(|times| times[at].is_some());
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
    let mut rest = String::with_capacity(text.len());
    let mut samples: Vec<Sample> = Vec::new();
    let mut at = lines.iter().position(&begins).unwrap_or(lines.len());
    for (index, text) in lines[..at].iter().enumerate() {
        if Line::of(index + 1, text)?.is_some() {
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
            if let Some(known) = Line::of(index + 1, text)? {
                open.take(index + 1, &known)?;
            } else if raw_log::is_distinctive(text) {
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
                .position(|l| l.contains(raw_log::FAILURE))
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
mod tests {
    use super::*;

    const LOG: &str = include_str!("golden/perf.log");

    fn steps(samples: &[Sample]) -> Vec<(&str, f64)> {
        samples
            .iter()
            .map(|s| (s.step.name(), s.ns / 1e3))
            .collect()
    }

    #[test]
    fn both_tests_are_read_from_one_console() {
        let (rest, samples) = take(LOG).unwrap();

        let [dirty, demand] = ENGINES.map(|engine| {
            let of = samples.iter().filter(|s| s.engine == engine).cloned();
            of.collect::<Vec<_>>()
        });
        assert_eq!(
            steps(&dirty)[..9],
            [
                ("populate", 182_904.752),
                ("logging-on", 123.456),
                ("dirty-first", 110_523.456),
                ("get-first", 23.456),
                ("clear-first", 1523.456),
                ("dirty-later", 30_000.0),
                ("get-later", 18.0),
                ("clear-later", 1300.0),
                ("logging-off", 923.456),
            ]
        );
        assert_eq!(dirty.last().unwrap().iteration, 1, "the second run");
        assert_eq!(steps(&demand), [("demand-paging", 1_234_567.89)]);
        assert_eq!(rest.lines().count(), LOG.lines().count());
        assert_eq!(
            raw_log::read(&rest).unwrap().len(),
            1,
            "the page-table test's own"
        );
    }

    #[test]
    fn what_is_cut_off_is_refused_wherever_it_is_cut() {
        let whole = &LOG[..LOG.find("Total guest execution").unwrap()];
        let ends: Vec<usize> = whole.match_indices('\n').map(|(at, _)| at + 1).collect();
        let first = LOG.find("Populate").unwrap();
        let second = LOG.find("Clear dirty log over").unwrap();
        let refused = ends
            .iter()
            .filter(|&&end| take(&LOG[..end]).is_err())
            .count();
        let inside = ends
            .iter()
            .filter(|&&end| end > first && end < second)
            .count();
        assert!(refused + 1 >= inside, "{refused} of {inside}");
    }

    #[test]
    fn damage_is_told_with_its_line() {
        for (from, to, wanted) in [
            (
                "Iteration 2 dirty",
                "Iteration 3 dirty",
                "line 13: iteration 3 follows 1",
            ),
            (
                "Enabling dirty logging time: 0.",
                "Enabling dirty logging time: x.",
                "line 7: 'x.000123456s'",
            ),
            (
                "Iteration 2 get",
                "Iteration 1 get",
                "line 14: iteration 1 follows 2",
            ),
            (
                "over 3 iterations",
                "over 4 iterations",
                "ends without 'Iteration 4",
            ),
            (
                "Iteration 2 clear dirty log",
                "lost",
                "ends without 'clear dirty log time:'",
            ),
            (
                "Populate memory time",
                "Total guest execution time",
                "line 7: a line of another test",
            ),
        ] {
            let damaged = LOG.replacen(from, to, 1);
            assert_ne!(damaged, LOG, "{from}");
            let error = take(&damaged).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        let stray = take("Populate memory time: 0.182904752s\n").unwrap_err();
        assert!(matches!(stray, LogError::Stray { line: 1, .. }));
    }
}
