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
//! granule: iteration 3 of 8                                   granule bench with several
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
//! A file may contain several runs. A file with a truncated run or mixed runs is refused. All
//! iterations of `granule bench` share one head and are required; its additional phases
//! (`granule: exec took …`) are read from its JSON only. The first iteration of
//! `dirty_log_perf_test` is a phase of its own; later ones are averaged. The last two tests print
//! neither backing, size nor vCPUs, so each set of arguments needs its own file.

use std::collections::BTreeMap;

use granule_types::{
    phase::Phase,
    record::{Record, RunConfig, SCHEMA},
    units::{Bytes, Nanoseconds},
};

use super::log_line::{
    BACKING, Condition, KernelTest, LINES, Line, MEMORY, MODE, PHASE_TIME, PHASES, VCPUS,
    ValueForm, bad_value,
};
use crate::{
    results::FileError,
    sample::{AnyPhase, RunSetup, Sample, collapse_spaces, engine},
};

const FAILURE_LINE: &str = "==== Test Assertion Failure ====";
const BENCH_PREFIX: &str = "granule: ";
const BENCH_ITERATION_PREFIX: &str = "granule: iteration ";

/// Runs of a log. A log does not describe its host; equal runs are iterations.
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
        let at = |error: FileError| error.at_line(number);
        if line.contains(FAILURE_LINE) {
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
                run.finish(&mut log)?;
            }
            continue;
        }
        if let (Some(run), true) = (&mut open, line.contains(BENCH_PREFIX)) {
            run.add_bench_line(number, line).map_err(at)?;
            continue;
        }
        // If the last line is unreadable and lacks its line feed, the file is cut off there.
        let is_cut = number == count && !text.ends_with('\n');
        let known =
            Line::parse(line).map_err(|error| if is_cut { cut_off_error(line) } else { error });
        match (known.map_err(at)?, &mut open) {
            (Some(known), Some(run)) => run.add_line(known).map_err(at)?,
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
    run.finish(&mut log)?;
    check_not_truncated(text)?;
    Ok(log)
}

/// Checks that a file does not end inside the first line of a run.
fn check_not_truncated(text: &str) -> Result<(), FileError> {
    let last = text.lines().last().unwrap_or_default().trim_end();
    let words = MODE.trim_end();
    // "Test" may also be the start of an unrelated line.
    let begins_a_run = (5..=words.len()).any(|count| last.ends_with(&words[..count]));
    if text.ends_with('\n') || !begins_a_run {
        return Ok(());
    }
    Err(cut_off_error(last).at_line(text.lines().count()))
}

/// Returns the error for a file that ends inside this line.
fn cut_off_error(line: &str) -> FileError {
    let line = line.trim();
    FileError::new(format!("'{line}' is cut off: run the test again, or delete the line"))
}

/// Returns the error for iteration `found` after iteration `last`, 0 for the first iteration.
fn iteration_order_error(found: u32, last: u32) -> FileError {
    let message =
        format!("iteration {found} follows {last}: lines are missing; run the test again");
    FileError::new(message)
}

fn line_name(words: &str) -> &str {
    words.split_once(": total").map_or(words, |(name, _)| name).trim()
}

/// Run that is being read.
struct OpenRun<'a> {
    /// Number of the run's first line.
    start: usize,
    mode: &'a str,
    test: KernelTest,
    /// Number and text of each value, by words of the line and iteration.
    values: BTreeMap<(&'static str, Option<u32>), (u64, &'a str)>,
    /// Number of the last iteration.
    iterations: u32,
    /// Indicates that `granule bench` printed the run.
    is_bench: bool,
    /// Line number of each iteration head of `granule bench`, and the total that it states.
    iteration_heads: Vec<(usize, u32)>,
}

impl<'a> OpenRun<'a> {
    fn new(start: usize, mode: &'a str) -> Self {
        let (test, values, iteration_heads) = (KernelTest::Any, BTreeMap::new(), Vec::new());
        Self { start, mode, test, values, iterations: 0, is_bench: false, iteration_heads }
    }

    fn add_bench_line(&mut self, number: usize, line: &str) -> Result<(), FileError> {
        self.is_bench = true;
        let Some((_, value)) = line.split_once(BENCH_ITERATION_PREFIX) else {
            return Ok(());
        };
        let value = value.trim();
        let numbers = || {
            let (found, of) = value.split_once(" of ")?;
            let (found, of): (u32, u32) = (found.parse().ok()?, of.parse().ok()?);
            (found <= of).then_some((found, of))
        };
        let (found, of) = numbers().ok_or_else(|| bad_value(value, "an iteration as N of M"))?;
        if self.iteration_heads.iter().any(|(_, announced)| *announced != of) {
            return Err(bad_value(value, "an iteration of as many as the one before it"));
        }
        if found.checked_sub(1) != Some(self.iterations) {
            return Err(iteration_order_error(found, self.iterations));
        }
        self.iterations = found;
        self.iteration_heads.push((if found == 1 { self.start } else { number }, of));
        Ok(())
    }

    fn add_line(&mut self, line: Line<'a>) -> Result<(), FileError> {
        let (test, words, form, _) = line.format;
        if self.test == KernelTest::Any {
            self.test = *test;
        }
        if *test != KernelTest::Any && *test != self.test {
            return Err(FileError::new(format!(
                "the line is of another test than the run that begins at line {}: two logs are \
                 mixed",
                self.start
            )));
        }
        let mut iteration = line.iteration;
        if let Some(found) = iteration {
            let last = self.iterations;
            if found != last.saturating_add(1) && (found != last || found == 0) {
                return Err(iteration_order_error(found, last));
            }
            self.iterations = found;
        }
        if let (ValueForm::PageTableTime, [_, ..]) = (form, self.iteration_heads.as_slice()) {
            iteration = Some(self.iterations);
        }
        let known = self.values.insert((words, iteration), (line.number, line.value));
        if known.is_some() && !matches!(form, ValueForm::NoValue) {
            let start = self.iteration_heads.last().map_or(self.start, |(line, _)| *line);
            return Err(FileError::new(format!(
                "'{}' is repeated in the run that begins at line {start}: lines are missing",
                line_name(words)
            )));
        }
        Ok(())
    }

    /// Returns the error for a run that lacks the line with these words.
    fn missing_line(&self, missing: &str) -> FileError {
        let message = format!(
            "the run that begins here has no '{}': it is cut off; run the test again, or delete \
             the run",
            line_name(missing)
        );
        FileError::new(message).at_line(self.start)
    }

    fn value(&self, words: &'static str, at: Option<u32>) -> Result<(u64, &'a str), FileError> {
        self.values.get(&(words, at)).copied().ok_or_else(|| self.missing_line(words))
    }

    fn finish(self, log: &mut Log) -> Result<(), FileError> {
        let engine = match self.test {
            KernelTest::Any | KernelTest::PageTable => return self.finish_page_table_test(log),
            KernelTest::DemandPaging => engine::DEMAND_PAGING_TEST,
            KernelTest::DirtyLog => engine::DIRTY_LOG_TEST,
        };
        let phases = self.phases()?;
        let mode = collapse_spaces(self.mode);
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
            lines.clone().any(|(_, words, _, need)| *need == Condition::ManualClear && has(words));
        let is_required = |(_, _, _, need): &&_| {
            *need == Condition::Always || *need == Condition::ManualClear && manual_clearing
        };
        for (_, words, form, _) in lines.filter(is_required) {
            match form {
                ValueForm::PhaseTime(phase) => {
                    phases.push((phase, self.value(words, None)?.0 as f64))
                }
                ValueForm::IterationTotal => {
                    let missing = |_| self.missing_line(&format!("{words}N iterations took"));
                    let (total, _) = self.value(words, None).map_err(missing)?;
                    if total == 0 || total != u64::from(self.iterations) {
                        let next = format!("Iteration {total} dirty memory time:");
                        return Err(self.missing_line(&next));
                    }
                }
                ValueForm::IterationTime([first, later]) => {
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
    fn finish_page_table_test(mut self, log: &mut Log) -> Result<(), FileError> {
        let engine = if self.is_bench { engine::BENCH_LINES } else { engine::PAGE_TABLE_TEST };
        let (_, backing) = self.value(BACKING, None)?;
        let config = RunConfig {
            mode: self.mode.to_owned(),
            backing: backing.parse().map_err(|_| bad_value(backing, "a backing source type"))?,
            memory: Bytes(self.value(MEMORY, None)?.0),
            vcpus: u32::try_from(self.value(VCPUS, None)?.0).unwrap_or(u32::MAX),
            ..RunConfig::default()
        };
        let heads = self.iteration_heads.iter().zip(1..).map(|((line, _), at)| (*line, Some(at)));
        let mut heads: Vec<_> = heads.collect();
        if heads.is_empty() {
            heads.push((self.start, None));
        }
        for (start, iteration) in heads {
            self.start = start;
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
        match self.iteration_heads.last() {
            Some((_, of)) if self.iterations < *of => {
                let next = self.iterations + 1;
                Err(self.missing_line(&format!("{BENCH_ITERATION_PREFIX}{next} of {of}")))
            }
            _ => Ok(()),
        }
    }
}
