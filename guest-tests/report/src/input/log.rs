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
//! A file may hold several runs. A run that lacks a line was cut off or mixed with another one, and
//! the file is refused. Iterations of `granule bench` share one head, and all are required; its own
//! phases (`granule: exec took …`) are ignored, since its JSON has them. The first iteration of
//! `dirty_log_perf_test` is a phase of its own; the later ones are averaged. The last two tests
//! print neither backing, size nor vCPUs, so runs of different arguments need files of their own.

use std::collections::BTreeMap;

use granule_types::{
    backing::Backing,
    phase::Phase,
    record::{Host, Record, RunConfig, SCHEMA},
    units::{Bytes, Nanoseconds},
};

use super::log_line::{
    BACKING, DEMAND, DEMAND_BEGINS, FAILURE, ITERATION_TIMES, LOGGING_OFF, LOGGING_ON, Line,
    MEMORY, MODE, OVERALL_RATE, PHASE_TIME, PHASES, POPULATE, TOTALS, Test, VCPUS, damaged, parsed,
};
use crate::{
    results::FileError,
    sample::{AnyPhase, RunSetup, Sample, engine, single_spaced},
};

const BENCH: &str = "granule: ";
const BENCH_ITERATION: &str = "granule: iteration ";

/// Phases of `dirty_log_perf_test` outside its iterations.
const RUN_PHASES: [(&str, AnyPhase); 3] = [
    (POPULATE, AnyPhase::of_other_test(0, "populate")),
    (LOGGING_ON, AnyPhase::of_other_test(1, "logging-on")),
    (LOGGING_OFF, AnyPhase::of_other_test(8, "logging-off")),
];
/// Phases of its first and of its later iterations, in the order of [`ITERATION_TIMES`].
const ITERATION_PHASES: [[AnyPhase; 2]; 3] = [
    first_and_later(2, "dirty-first", "dirty-later"),
    first_and_later(3, "get-first", "get-later"),
    first_and_later(4, "clear-first", "clear-later"),
];
const DEMAND_PHASE: AnyPhase = AnyPhase::of_other_test(20, "demand-paging");

const fn first_and_later(rank: usize, first: &'static str, later: &'static str) -> [AnyPhase; 2] {
    [AnyPhase::of_other_test(rank, first), AnyPhase::of_other_test(rank + 3, later)]
}

/// Runs of a log, which does not name its host; equal runs are iterations of each other.
#[derive(Debug, Default, PartialEq)]
pub struct Log {
    /// Those of `kvm_page_table_test` and `granule bench`.
    pub records: Vec<Record>,
    /// Those of the other tests.
    pub samples: Vec<Sample>,
}

/// Reports whether a text has a line of a run.
pub fn is_log(text: &str) -> bool {
    [MODE, BACKING, PHASE_TIME].iter().any(|words| text.contains(words))
}

/// Reports whether a line is of results, or a part of one.
pub fn is_json(line: &str) -> bool {
    line.trim_start().starts_with("{\"") || line.contains("\"granule.result/")
}

/// Reads every run of a log.
///
/// # Errors
/// The log has no run, or one that failed, is damaged, is cut off, or is mixed with another.
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
        // An unreadable last line without a line feed is where the file is cut.
        let is_cut = number == count && !text.ends_with('\n');
        let known = Line::of(line).map_err(|error| if is_cut { cut_off(line) } else { error });
        match (known.map_err(at)?, &mut open) {
            (Some(known), Some(run)) => run.take(known).map_err(at)?,
            (Some(_), None) => return Err(at(outside_run(line))),
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

/// Checks that a file does not end within a line that begins a run.
pub fn check_end(text: &str) -> Result<(), FileError> {
    let last = text.lines().last().unwrap_or_default().trim_end();
    let words = MODE.trim_end();
    // "Test" alone may begin any line.
    let begins_a_run = (5..=words.len()).any(|count| last.ends_with(&words[..count]));
    if text.ends_with('\n') || !begins_a_run {
        return Ok(());
    }
    Err(cut_off(last).at(text.lines().count()))
}

fn outside_run(line: &str) -> FileError {
    let (line, mode) = (line.trim(), MODE.trim_end());
    FileError::new(format!("'{line}' belongs to no run: the line '{mode}' before it is missing"))
}

/// Returns the error of a line within which the file ends.
fn cut_off(line: &str) -> FileError {
    let line = line.trim();
    FileError::new(format!("'{line}' is cut off: run the test again, or delete the line"))
}

/// Returns the error of iteration `found` after iteration `last`, which is 0 for none.
fn out_of_order(found: u32, last: u32) -> FileError {
    let message =
        format!("iteration {found} follows {last}: lines are missing; run the test again");
    FileError::new(message)
}

/// Returns the name of a line in messages.
fn name(words: &str) -> &str {
    words.split_once(": total").map_or(words, |(name, _)| name).trim()
}

/// A run whose end is not yet read.
struct OpenRun<'a> {
    /// First line.
    begin: usize,
    mode: &'a str,
    /// Test of its lines; `None` before the first line of a single test.
    test: Option<Test>,
    /// Number and text of each value, by words and iteration.
    values: BTreeMap<(&'static str, Option<u32>), (u64, &'a str)>,
    /// Number of the last iteration.
    iterations: u32,
    /// True if `granule bench` printed the run.
    bench: bool,
    /// Lines of the heads of iterations of `granule bench`, and the number that each announces.
    heads: Vec<(usize, u32)>,
}

impl<'a> OpenRun<'a> {
    fn new(begin: usize, mode: &'a str) -> Self {
        let (values, heads) = (BTreeMap::new(), Vec::new());
        Self { begin, mode, test: None, values, iterations: 0, bench: false, heads }
    }

    /// Returns the iteration of `granule bench` whose lines follow.
    fn bench_iteration(&self) -> Option<u32> {
        self.heads.last().map(|_| self.iterations)
    }

    /// Reads a line of `granule bench`.
    fn take_bench_line(&mut self, number: usize, line: &str) -> Result<(), FileError> {
        self.bench = true;
        let Some((_, value)) = line.split_once(BENCH_ITERATION) else {
            return Ok(());
        };
        let value = value.trim();
        let read = value
            .split_once(" of ")
            .and_then(|(at, of)| Some((at.parse().ok()?, of.parse().ok()?)));
        let (found, of): (u32, u32) = read
            .filter(|(found, of)| found <= of)
            .ok_or_else(|| damaged(value, "an iteration as N of M"))?;
        if self.heads.iter().any(|(_, announced)| *announced != of) {
            return Err(damaged(value, "an iteration of as many as the one before it"));
        }
        if self.iterations.checked_add(1) != Some(found) {
            return Err(out_of_order(found, self.iterations));
        }
        self.iterations = found;
        self.heads.push((if found == 1 { self.begin } else { number }, of));
        Ok(())
    }

    fn take(&mut self, line: Line<'a>) -> Result<(), FileError> {
        if line.test.is_some_and(|test| *self.test.get_or_insert(test) != test) {
            return Err(FileError::new(format!(
                "the line is of another test than the run that begins at line {}: two logs are \
                 mixed",
                self.begin
            )));
        }
        if let Some(found) = line.iteration {
            let last = self.iterations;
            if found != last.saturating_add(1) && (found != last || found == 0) {
                return Err(out_of_order(found, last));
            }
            self.iterations = found;
        }
        let is_phase = PHASES.contains(&line.words);
        let iteration = if is_phase { self.bench_iteration() } else { line.iteration };
        let known = self.values.insert((line.words, iteration), (line.number, line.value));
        if known.is_some() && line.words != DEMAND_BEGINS {
            let begin = self.heads.last().map_or(self.begin, |(line, _)| *line);
            return Err(FileError::new(format!(
                "'{}' is repeated in the run that begins at line {begin}: lines are missing",
                name(line.words)
            )));
        }
        Ok(())
    }

    /// Returns the error of a run that lacks the line with these words.
    fn incomplete(&self, missing: &str) -> FileError {
        let message = format!(
            "the run that begins here has no '{}': it is cut off; run the test again, or delete \
             the run",
            name(missing)
        );
        FileError::new(message).at(self.begin)
    }

    fn value(
        &self,
        words: &'static str,
        iteration: Option<u32>,
    ) -> Result<(u64, &'a str), FileError> {
        self.values.get(&(words, iteration)).copied().ok_or_else(|| self.incomplete(words))
    }

    fn nanoseconds(&self, words: &'static str, at: Option<u32>) -> Result<f64, FileError> {
        Ok(self.value(words, at)?.0 as f64)
    }

    /// Ends the run and adds it to a log.
    fn close(self, log: &mut Log) -> Result<(), FileError> {
        let (engine, phases) = match self.test {
            None | Some(Test::PageTable) => return self.close_page_table(log),
            Some(Test::DemandPaging) => {
                let ns = self.nanoseconds(DEMAND, None)?;
                self.value(OVERALL_RATE, None)?;
                (engine::DEMAND_PAGING_TEST, vec![(DEMAND_PHASE, ns)])
            }
            Some(Test::DirtyLog) => (engine::DIRTY_LOG_TEST, self.dirty_log_phases()?),
        };
        let mode = single_spaced(self.mode);
        let is_equal = |s: &&Sample| s.engine == engine && s.setup.mode == mode;
        let next = log.samples.iter().filter(is_equal).map(|s| s.iteration + 1).max();
        let setup = RunSetup { subject: engine.to_owned(), mode, ..RunSetup::default() };
        log.samples.extend(phases.into_iter().map(|(phase, ns)| Sample {
            engine: engine.to_owned(),
            setup: setup.clone(),
            iteration: next.unwrap_or(0),
            phase,
            ns,
            ..Sample::default()
        }));
        Ok(())
    }

    fn dirty_log_phases(&self) -> Result<Vec<(AnyPhase, f64)>, FileError> {
        let mut phases = Vec::new();
        for (words, phase) in RUN_PHASES {
            phases.push((phase, self.nanoseconds(words, None)?));
        }
        let of_clearing = [ITERATION_TIMES[2], TOTALS[1]];
        let manual_clearing = self.values.keys().any(|(words, _)| of_clearing.contains(words));
        for words in TOTALS.into_iter().take(1 + usize::from(manual_clearing)) {
            let missing = |_| self.incomplete(&format!("{words}N iterations took"));
            let (total, _) = self.value(words, None).map_err(missing)?;
            if total == 0 || total != u64::from(self.iterations) {
                return Err(self.incomplete(&format!("Iteration {total} dirty memory time:")));
            }
        }
        let lines = ITERATION_TIMES.into_iter().zip(ITERATION_PHASES);
        for (words, [first, later]) in lines.take(2 + usize::from(manual_clearing)) {
            let times = (1..=self.iterations).map(|at| self.nanoseconds(words, Some(at)));
            let times = times.collect::<Result<Vec<f64>, _>>()?;
            phases.push((first, times[0]));
            if let rest @ [_, ..] = &times[1..] {
                phases.push((later, rest.iter().sum::<f64>() / rest.len() as f64));
            }
        }
        phases.sort_by(|one, two| one.0.cmp(&two.0));
        Ok(phases)
    }

    /// Adds the records of `kvm_page_table_test`, those of every iteration of `granule bench`.
    fn close_page_table(mut self, log: &mut Log) -> Result<(), FileError> {
        let engine = if self.bench { engine::BENCH_LINES } else { engine::PAGE_TABLE_TEST };
        let (_, backing) = self.value(BACKING, None)?;
        let config = RunConfig {
            mode: self.mode.to_owned(),
            backing: parsed::<Backing>(backing, "a backing source type")?,
            memory: Bytes(self.value(MEMORY, None)?.0),
            vcpus: u32::try_from(self.value(VCPUS, None)?.0).unwrap_or(u32::MAX),
            seed: 0,
            iteration: 0,
            prefault: false,
            options: BTreeMap::new(),
        };
        let heads = self.heads.clone();
        let iterations: Vec<Option<u32>> = match heads.len() {
            0 => vec![None],
            _ => (1..=self.iterations).map(Some).collect(),
        };
        for (at, iteration) in iterations.into_iter().enumerate() {
            self.begin = heads.get(at).map_or(self.begin, |(line, _)| *line);
            let records = &mut log.records;
            let is_equal = |record: &&Record| {
                record.engine == engine
                    && record.phase == Phase::Create
                    && RunConfig { iteration: 0, ..record.config.clone() } == config
            };
            let equal = records.iter().filter(is_equal).count();
            for (words, phase) in
                PHASES.into_iter().zip([Phase::Create, Phase::Update, Phase::Rebuild])
            {
                let iteration_number = u32::try_from(equal).unwrap_or(u32::MAX);
                records.push(Record {
                    schema: SCHEMA.to_owned(),
                    host: Host::default(),
                    engine: engine.to_owned(),
                    config: RunConfig { iteration: iteration_number, ..config.clone() },
                    obtained: None,
                    phase,
                    round: None,
                    ns: Nanoseconds(self.value(words, iteration)?.0),
                    elapsed_ns: None,
                    vcpu_ns: Vec::new(),
                    counters: BTreeMap::new(),
                    events: BTreeMap::new(),
                    gauges: BTreeMap::new(),
                });
            }
        }
        match heads.last() {
            Some((_, of)) if self.iterations < *of => {
                let next = self.iterations + 1;
                Err(self.incomplete(&format!("{BENCH_ITERATION}{next} of {of}")))
            }
            _ => Ok(()),
        }
    }
}
