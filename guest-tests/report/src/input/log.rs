// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Logs of the kernel's `kvm_page_table_test` (since 5.13), `dirty_log_perf_test` and
//! `demand_paging_test` (since 5.10), and of `granule bench`, which prints the lines of the first.
//!
//! ```text
//! Testing guest mode: PA-bits:48,  VA-bits:48,  4K pages      begins a run of every KVM test
//!
//! Testing memory backing src type: anonymous_hugetlb_2mb      kvm_page_table_test
//! Testing memory size(aligned): 0x4000000
//! Number of testing vCPUs: 16
//! granule: iteration 3 of 8                                   granule bench, where it has several
//! KVM_CREATE_MAPPINGS: total execution time: 0.042209280s     one line a phase,
//! KVM_UPDATE_MAPPINGS: total execution time: 0.522255104s     three in all
//! KVM_ADJUST_MAPPINGS: total execution time: 0.073213952s
//!
//! Populate memory time: 0.182904752s                          dirty_log_perf_test
//! Enabling dirty logging time: 0.000123456s
//! Iteration 1 dirty memory time: 0.110523456s                 splits blocks
//! Iteration 1 get dirty log time: 0.000023456s
//! Iteration 1 clear dirty log time: 0.001523456s              with manual clearing
//! Iteration 2 ...                                             blocks are split already
//! Disabling dirty logging time: 0.000923456s
//! Get dirty log over 2 iterations took 0.000041234s. (Avg 0.000020617s/iteration)
//! Clear dirty log over 2 iterations took ...                  with manual clearing
//!
//! Finished creating vCPUs and starting uffd threads           demand_paging_test
//! Total guest execution time: 1.234567890s
//! Overall demand paging rate: 212345.678901 pgs/sec
//! ```
//!
//! A file may contain several runs. If a run lacks a line, it was cut off or mixed with another,
//! and the file is refused. Iterations of `granule bench` share one head, and all are required; its
//! additional phases (`granule: exec took …`) are ignored, since its JSON has them. The first
//! iteration of `dirty_log_perf_test` is a phase of its own; later ones are averaged. The last two
//! tests print neither backing, size nor vCPUs, so each set of arguments needs its own file.

use std::collections::BTreeMap;

use granule_types::{
    phase::Phase,
    record::{Record, RunConfig, SCHEMA},
    units::{Bytes, Nanoseconds},
};

use super::log_line::{
    BACKING, Form, LINES, Line, MEMORY, MODE, Need, PHASE_TIME, PHASES, Test, VCPUS, damaged,
};
use crate::{
    results::FileError,
    sample::{AnyPhase, RunSetup, Sample, engine, single_spaced},
};

const FAILURE: &str = "==== Test Assertion Failure ====";
const BENCH: &str = "granule: ";
const BENCH_ITERATION: &str = "granule: iteration ";

/// Runs of a log, which does not name its host; equal runs are iterations of each other.
#[derive(Debug, Default, PartialEq)]
pub struct Log {
    /// Runs of `kvm_page_table_test` and `granule bench`.
    pub records: Vec<Record>,
    /// Runs of the other tests.
    pub samples: Vec<Sample>,
}

/// Reports whether a text contains a line of a test run.
pub fn is_log(text: &str) -> bool {
    [MODE, BACKING, PHASE_TIME].iter().any(|words| text.contains(words))
}

/// Reports whether a line is a JSON result or part of one.
pub fn is_json(line: &str) -> bool {
    line.trim_start().starts_with("{\"") || line.contains("\"granule.result/")
}

/// Reads every run of a log.
///
/// # Errors
/// The log has no run, or a run failed, is damaged, is cut off, or is mixed with another.
pub fn read(text: &str) -> Result<Log, FileError> {
    let mut log = Log::default();
    let mut open: Option<OpenRun> = None;
    let count = text.lines().count();
    for (number, line) in (1..).zip(text.lines()) {
        let at = |error: FileError| error.at(number);
        if line.contains(FAILURE) {
            return Err(at(FileError::new("the test failed: see its message in the log")));
        }
        if is_json(line) {
            return Err(at(FileError::new(
                "the line is JSON in a log: use separate files for logs and results of `granule \
                 bench --json`",
            )));
        }
        if let Some((_, mode)) = line.split_once(MODE) {
            if let Some(run) = open.replace(OpenRun::new(number, mode.trim())) {
                run.close(&mut log)?;
            }
            continue;
        }
        if let (Some(run), true) = (&mut open, line.contains(BENCH)) {
            run.take_bench_line(number, line).map_err(at)?;
            continue;
        }
        // If the last line is unreadable and lacks its line feed, the file is cut off there.
        let is_cut = number == count && !text.ends_with('\n');
        let known = Line::of(line).map_err(|error| if is_cut { cut_off(line) } else { error });
        match (known.map_err(at)?, &mut open) {
            (Some(known), Some(run)) => run.take(known).map_err(at)?,
            (Some(_), None) => {
                return Err(at(FileError::new(format!(
                    "'{}' belongs to no run: the line '{}' before it is missing",
                    line.trim(),
                    MODE.trim_end()
                ))));
            }
            (None, _) => {}
        }
    }
    let Some(run) = open else {
        let mode = MODE.trim_end();
        let message = format!("holds no run of kvm_page_table_test: no line contains '{mode}'");
        return Err(FileError::new(message));
    };
    run.close(&mut log)?;
    check_end(text)?;
    Ok(log)
}

/// Checks that a file does not end inside the first line of a run.
fn check_end(text: &str) -> Result<(), FileError> {
    let last = text.lines().last().unwrap_or_default().trim_end();
    let words = MODE.trim_end();
    // "Test" may also be the start of an unrelated line.
    let begins_a_run = (5..=words.len()).any(|count| last.ends_with(&words[..count]));
    if text.ends_with('\n') || !begins_a_run {
        return Ok(());
    }
    Err(cut_off(last).at(text.lines().count()))
}

/// Returns the error for a file that ends inside this line.
fn cut_off(line: &str) -> FileError {
    let line = line.trim();
    FileError::new(format!("'{line}' is cut off: run the test again, or delete the line"))
}

/// Returns the error for iteration `found` after iteration `last` (0: none before).
fn out_of_order(found: u32, last: u32) -> FileError {
    let message =
        format!("iteration {found} follows {last}: lines are missing; run the test again");
    FileError::new(message)
}

fn name(words: &str) -> &str {
    words.split_once(": total").map_or(words, |(name, _)| name).trim()
}

/// Run whose last line has not been read yet.
struct OpenRun<'a> {
    begin: usize,
    mode: &'a str,
    test: Test,
    /// Number and text of each value, by the words of its line and its iteration.
    values: BTreeMap<(&'static str, Option<u32>), (u64, &'a str)>,
    /// Number of the last iteration.
    iterations: u32,
    /// True if `granule bench` printed the run.
    bench: bool,
    /// Line numbers of the iteration heads of `granule bench`, and the total that each states.
    heads: Vec<(usize, u32)>,
}

impl<'a> OpenRun<'a> {
    fn new(begin: usize, mode: &'a str) -> Self {
        let (values, heads) = (BTreeMap::new(), Vec::new());
        Self { begin, mode, test: Test::Any, values, iterations: 0, bench: false, heads }
    }

    fn take_bench_line(&mut self, number: usize, line: &str) -> Result<(), FileError> {
        self.bench = true;
        let Some((_, value)) = line.split_once(BENCH_ITERATION) else {
            return Ok(());
        };
        let value = value.trim();
        let numbers = || {
            let (found, of) = value.split_once(" of ")?;
            let (found, of): (u32, u32) = (found.parse().ok()?, of.parse().ok()?);
            (found <= of).then_some((found, of))
        };
        let (found, of) = numbers().ok_or_else(|| damaged(value, "an iteration as N of M"))?;
        if self.heads.iter().any(|(_, announced)| *announced != of) {
            return Err(damaged(value, "an iteration of as many as the one before it"));
        }
        if found.checked_sub(1) != Some(self.iterations) {
            return Err(out_of_order(found, self.iterations));
        }
        self.iterations = found;
        self.heads.push((if found == 1 { self.begin } else { number }, of));
        Ok(())
    }

    fn take(&mut self, line: Line<'a>) -> Result<(), FileError> {
        let (test, words, form, _) = line.kind;
        if self.test == Test::Any {
            self.test = *test;
        }
        if *test != Test::Any && *test != self.test {
            return Err(FileError::new(format!(
                "the line is of another test than the run that begins at line {}: two logs are \
                 mixed",
                self.begin
            )));
        }
        let mut iteration = line.iteration;
        if let Some(found) = iteration {
            let last = self.iterations;
            if found != last.saturating_add(1) && (found != last || found == 0) {
                return Err(out_of_order(found, last));
            }
            self.iterations = found;
        }
        if let (Form::Time, [_, ..]) = (form, self.heads.as_slice()) {
            iteration = Some(self.iterations);
        }
        let known = self.values.insert((words, iteration), (line.number, line.value));
        if known.is_some() && !matches!(form, Form::NoValue) {
            let begin = self.heads.last().map_or(self.begin, |(line, _)| *line);
            return Err(FileError::new(format!(
                "'{}' is repeated in the run that begins at line {begin}: lines are missing",
                name(words)
            )));
        }
        Ok(())
    }

    /// Returns the error for a run without the line that has these words.
    fn incomplete(&self, missing: &str) -> FileError {
        let message = format!(
            "the run that begins here has no '{}': it is cut off; run the test again, or delete \
             the run",
            name(missing)
        );
        FileError::new(message).at(self.begin)
    }

    /// Returns the number and the text of a value.
    fn value(&self, words: &'static str, at: Option<u32>) -> Result<(u64, &'a str), FileError> {
        self.values.get(&(words, at)).copied().ok_or_else(|| self.incomplete(words))
    }

    fn close(self, log: &mut Log) -> Result<(), FileError> {
        let engine = match self.test {
            Test::Any | Test::PageTable => return self.close_page_table(log),
            Test::DemandPaging => engine::DEMAND_PAGING_TEST,
            Test::DirtyLog => engine::DIRTY_LOG_TEST,
        };
        let phases = self.phases()?;
        let mode = single_spaced(self.mode);
        let is_equal = |s: &&Sample| s.engine == engine && s.setup.mode == mode;
        let next = log.samples.iter().filter(is_equal).map(|s| s.iteration + 1).max();
        let setup = RunSetup { subject: engine.to_owned(), mode, ..RunSetup::default() };
        log.samples.extend(phases.into_iter().map(|(phase, ns)| Sample {
            engine: engine.to_owned(),
            setup: setup.clone(),
            iteration: next.unwrap_or(0),
            phase: phase.clone(),
            ns,
            ..Sample::default()
        }));
        Ok(())
    }

    /// Returns the phases of `dirty_log_perf_test` or `demand_paging_test`.
    fn phases(&self) -> Result<Vec<(&'static AnyPhase, f64)>, FileError> {
        let mut phases = Vec::new();
        let lines = LINES.iter().filter(|(test, ..)| *test == self.test);
        let has = |words: &str| self.values.keys().any(|(known, _)| *known == words);
        let manual_clearing =
            lines.clone().any(|(_, words, _, need)| *need == Need::Manual && has(words));
        let is_required = |(_, _, _, need): &&_| {
            *need == Need::Always || *need == Need::Manual && manual_clearing
        };
        for (_, words, form, _) in lines.filter(is_required) {
            match form {
                Form::PhaseTime(phase) => phases.push((phase, self.value(words, None)?.0 as f64)),
                Form::Total => {
                    let missing = |_| self.incomplete(&format!("{words}N iterations took"));
                    let (total, _) = self.value(words, None).map_err(missing)?;
                    if total == 0 || total != u64::from(self.iterations) {
                        let next = format!("Iteration {total} dirty memory time:");
                        return Err(self.incomplete(&next));
                    }
                }
                Form::IterationTime([first, later]) => {
                    let time = |at| Ok(self.value(words, Some(at))?.0 as f64);
                    phases.push((first, time(1)?));
                    let rest = (2..=self.iterations).map(time);
                    let rest = rest.collect::<Result<Vec<f64>, FileError>>()?;
                    if !rest.is_empty() {
                        phases.push((later, rest.iter().sum::<f64>() / rest.len() as f64));
                    }
                }
                _ => drop(self.value(words, None)?),
            }
        }
        phases.sort_by(|one, two| one.0.cmp(two.0));
        Ok(phases)
    }

    /// Adds the records of `kvm_page_table_test`, or of every iteration of `granule bench`.
    fn close_page_table(mut self, log: &mut Log) -> Result<(), FileError> {
        let engine = if self.bench { engine::BENCH_LINES } else { engine::PAGE_TABLE_TEST };
        let (_, backing) = self.value(BACKING, None)?;
        let config = RunConfig {
            mode: self.mode.to_owned(),
            backing: backing.parse().map_err(|_| damaged(backing, "a backing source type"))?,
            memory: Bytes(self.value(MEMORY, None)?.0),
            vcpus: u32::try_from(self.value(VCPUS, None)?.0).unwrap_or(u32::MAX),
            ..RunConfig::default()
        };
        let heads = self.heads.iter().zip(1..).map(|((line, _), at)| (*line, Some(at)));
        let mut heads: Vec<_> = heads.collect();
        if heads.is_empty() {
            heads.push((self.begin, None));
        }
        for (begin, iteration) in heads {
            self.begin = begin;
            let records = &mut log.records;
            let is_equal = |record: &&Record| {
                record.engine == engine
                    && record.phase == Phase::Create
                    && RunConfig { iteration: 0, ..record.config.clone() } == config
            };
            let equal = records.iter().filter(is_equal).count();
            let config =
                RunConfig { iteration: u32::try_from(equal).unwrap_or(u32::MAX), ..config.clone() };
            for (words, phase) in
                PHASES.into_iter().zip([Phase::Create, Phase::Update, Phase::Rebuild])
            {
                records.push(Record {
                    schema: SCHEMA.to_owned(),
                    engine: engine.to_owned(),
                    config: config.clone(),
                    phase,
                    ns: Nanoseconds(self.value(words, iteration)?.0),
                    ..Record::default()
                });
            }
        }
        match self.heads.last() {
            Some((_, of)) if self.iterations < *of => {
                let next = self.iterations + 1;
                Err(self.incomplete(&format!("{BENCH_ITERATION}{next} of {of}")))
            }
            _ => Ok(()),
        }
    }
}
