// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Logs of the kernel's `kvm_page_table_test`, in the format of every kernel since 5.13.
//!
//! ```text
//! Testing guest mode: PA-bits:48,  VA-bits:48,  4K pages      begins a run
//! Testing memory backing src type: anonymous_hugetlb_2mb
//! Testing memory size(aligned): 0x4000000
//! Number of testing vCPUs: 16
//! KVM_CREATE_MAPPINGS: total execution time: 0.042209280s     one line a phase,
//! KVM_UPDATE_MAPPINGS: total execution time: 0.522255104s     three in all
//! KVM_ADJUST_MAPPINGS: total execution time: 0.073213952s
//! ```
//!
//! A line is recognised by its words at any place, behind a time stamp of the console or the `# ` of
//! a test runner; other lines are ignored. A file may hold several runs, each with all three phases.
//! A run that lacks a line was cut off or mixed with another one, and the file is refused.
//!
//! `granule bench` prints these lines too: its iterations share one head (`granule: iteration 3 of
//! 8`, all of which are required), and its own phases (`granule: exec took …`) are ignored here,
//! since its JSON has them. The last run needs as many of them as equal runs before it.

use std::collections::HashMap;

use granule_types::{
    backing::Backing,
    phase::Phase,
    record::{Host, Record, RunConfig, SCHEMA},
    units::{Bytes, Nanoseconds},
};

use super::log::{
    FAILURE, MODE, behind, cut_off, damaged, failed, incomplete, json, out_of_order, parsed,
    repeated, stray, time,
};
use crate::{results::FileError, sample::engine};

const BACKING: &str = "Testing memory backing src type: ";
const MEMORY: &str = "Testing memory size(aligned): ";
const VCPUS: &str = "Number of testing vCPUs: ";
const TIME: &str = "_MAPPINGS: total execution time: ";
const BENCH: &str = "granule: ";
const ITERATION: &str = "granule: iteration ";
const PHASES: [Phase; 3] = [Phase::Create, Phase::Update, Phase::Rebuild];

/// One run of the test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// First line, counted from 1.
    pub line: usize,
    /// Program that printed it: `kvm_page_table_test` or the lines of `granule bench`.
    pub engine: &'static str,
    /// Guest mode as printed.
    pub mode: String,
    /// Requested backing.
    pub backing: Backing,
    /// Size of the region.
    pub memory: Bytes,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Times of create, update and rebuild, in this order.
    pub times: [(Phase, Nanoseconds); 3],
}

impl Run {
    /// Returns the run as results, one record for each phase; a log does not name its host.
    pub fn records(&self, host: &Host, seed: u64, iteration: u32) -> Vec<Record> {
        let record = |(phase, ns)| Record {
            schema: SCHEMA.to_owned(),
            host: host.clone(),
            engine: self.engine.to_owned(),
            config: RunConfig {
                mode: self.mode.clone(),
                backing: self.backing,
                memory: self.memory,
                vcpus: self.vcpus,
                seed,
                iteration,
                prefault: false,
                options: Default::default(),
            },
            obtained: None,
            phase,
            round: None,
            ns,
            vcpu_ns: Vec::new(),
            counters: Default::default(),
            events: Default::default(),
            gauges: Default::default(),
        };
        self.times.map(record).into()
    }
}

/// Returns runs as results of an unknown host; equal runs are iterations of each other.
pub(super) fn records(runs: &[Run]) -> Vec<Record> {
    let mut iterations = HashMap::new();
    let records = runs.iter().flat_map(|run| {
        let key = (run.engine, &run.mode, run.backing, run.memory, run.vcpus);
        let next = iterations.entry(key).or_insert(0);
        *next += 1;
        run.records(&Host::default(), 0, *next - 1)
    });
    records.collect()
}

/// Reports whether a text has a line of the test.
pub(super) fn is_log(text: &str) -> bool {
    [MODE, BACKING, TIME].iter().any(|words| text.contains(words))
}

/// Reports whether a line is of this test and of no other.
pub(super) fn is_distinctive(line: &str) -> bool {
    [BACKING, MEMORY, TIME].iter().any(|words| line.contains(words))
}

/// Reports whether a line is of results, or a part of one.
pub(super) fn is_json(line: &str) -> bool {
    line.trim_start().starts_with("{\"") || line.contains("\"granule.result/")
}

/// Checks that a file does not end within a line that begins a run.
pub(super) fn check_end(text: &str) -> Result<(), FileError> {
    let last = text.lines().last().unwrap_or_default().trim_end();
    let words = MODE.trim_end();
    // "Test" alone may begin any line.
    let begins_a_run = (5..=words.len()).any(|count| last.ends_with(&words[..count]));
    if text.ends_with('\n') || !begins_a_run {
        return Ok(());
    }
    Err(cut_off(last).at(text.lines().count()))
}

/// Reads every run of a log.
///
/// # Errors
/// The log has no run, or one that failed, is damaged or is cut off.
pub fn read(text: &str) -> Result<Vec<Run>, FileError> {
    let mut log = Log::default();
    for (line, text) in (1..).zip(text.lines()) {
        if text.contains(FAILURE) {
            return Err(failed().at(line));
        }
        if is_json(text) {
            return Err(json().at(line));
        }
        if let Some(mode) = behind(text, MODE) {
            log.end_head()?;
            log.open = Some(OpenRun::new(line, mode));
        } else if let Some(run) = &mut log.open {
            if text.contains(BENCH) {
                log.bench_line(line, text)?;
            } else {
                run.take(text).map_err(|error| error.at(line))?;
            }
        } else if is_distinctive(text) || text.contains(VCPUS) {
            return Err(stray(text).at(line));
        }
    }
    log.check_last()?;
    log.end_head()?;
    check_end(text)?;
    if log.runs.is_empty() {
        let message =
            format!("holds no run of kvm_page_table_test: no line contains '{}'", MODE.trim_end());
        return Err(FileError::new(message));
    }
    Ok(log.runs)
}

/// The part of a log that was read.
#[derive(Default)]
struct Log {
    runs: Vec<Run>,
    open: Option<OpenRun>,
    /// Ended runs of `granule bench`.
    bench: Vec<OpenRun>,
}

impl Log {
    /// Reads a line of `granule bench`.
    fn bench_line(&mut self, line: usize, text: &str) -> Result<(), FileError> {
        let Some(mut run) = self.open.take() else {
            return Ok(());
        };
        run.engine = engine::BENCH_LINES;
        if let Some(value) = behind(text, ITERATION) {
            let (number, of) = iteration(value).map_err(|error| error.at(line))?;
            let last = run.iteration.replace((number, of));
            if run.times != [None; 3] {
                let next = OpenRun { line, times: [None; 3], bench_phases: vec![], ..run.clone() };
                self.end(run)?;
                run = next;
            }
            if last.is_some_and(|(_, known)| known != of) {
                let expected = "an iteration of as many as the one before it";
                return Err(damaged(value, expected).at(line));
            }
            let last = last.map_or(0, |(last, _)| last);
            if number != last + 1 {
                return Err(out_of_order(number, last).at(line));
            }
        } else {
            let own = behind(text, BENCH).and_then(|words| words.split_once(" took "));
            run.bench_phases.extend(own.map(|(name, _)| name.to_owned()));
        }
        self.open = Some(run);
        Ok(())
    }

    /// Ends the runs below a head, which need all iterations.
    fn end_head(&mut self) -> Result<(), FileError> {
        let Some(run) = self.open.take() else {
            return Ok(());
        };
        let (line, iteration) = (run.line, run.iteration);
        self.end(run)?;
        match iteration {
            Some((number, of)) if number < of => {
                let next = format!("{ITERATION}{} of {of}", number + 1);
                Err(incomplete(&next).at(line))
            }
            _ => Ok(()),
        }
    }

    fn end(&mut self, run: OpenRun) -> Result<(), FileError> {
        self.runs.push(run.close()?);
        if run.engine == engine::BENCH_LINES {
            self.bench.push(run);
        }
        Ok(())
    }

    /// Checks that the last run has the own phases of equal runs of `granule bench`.
    fn check_last(&self) -> Result<(), FileError> {
        let Some(last) = &self.open else {
            return Ok(());
        };
        if last.iteration.is_some_and(|(number, of)| number != of) {
            return Ok(());
        }
        let missing = self.bench.iter().rev().filter(|run| run.head() == last.head());
        let mut missing = missing
            .filter_map(|run| run.bench_phases.strip_prefix(&last.bench_phases[..])?.first());
        let Some(name) = missing.next() else {
            return Ok(());
        };
        last.close()?;
        Err(incomplete(&format!("{BENCH}{name} took")).at(last.line))
    }
}

/// Reads `3 of 8`.
fn iteration(text: &str) -> Result<(u32, u32), FileError> {
    let read = || {
        let (number, of) = text.split_once(" of ")?;
        let (number, of) = (number.parse().ok()?, of.parse().ok()?);
        (number <= of).then_some((number, of))
    };
    read().ok_or_else(|| damaged(text, "an iteration as N of M"))
}

/// A run whose end is not yet read.
#[derive(Clone, Default)]
struct OpenRun {
    line: usize,
    engine: &'static str,
    mode: String,
    backing: Option<Backing>,
    memory: Option<Bytes>,
    vcpus: Option<u32>,
    times: [Option<Nanoseconds>; 3],
    /// Iteration from 1 below its head, and the number of all.
    iteration: Option<(u32, u32)>,
    /// Phases that only `granule bench` has.
    bench_phases: Vec<String>,
}

impl OpenRun {
    fn new(line: usize, mode: &str) -> Self {
        let engine = engine::PAGE_TABLE_TEST;
        Self { line, engine, mode: mode.to_owned(), ..Self::default() }
    }

    /// Returns the values of the lines that precede the times.
    fn head(&self) -> (&str, Option<Backing>, Option<Bytes>, Option<u32>) {
        (&self.mode, self.backing, self.memory, self.vcpus)
    }

    /// Reads a line of the test; other lines are ignored.
    fn take(&mut self, text: &str) -> Result<(), FileError> {
        let (is_repeated, words) = if let Some(value) = behind(text, BACKING) {
            let value = parsed(value, "a backing source type")?;
            (self.backing.replace(value).is_some(), BACKING.to_owned())
        } else if let Some(value) = behind(text, MEMORY) {
            (self.memory.replace(parsed(value, "a size")?).is_some(), MEMORY.to_owned())
        } else if let Some(value) = behind(text, VCPUS) {
            (self.vcpus.replace(parsed(value, "a number of vCPUs")?).is_some(), VCPUS.to_owned())
        } else if let Some((front, value)) = text.split_once(TIME) {
            let mut phases = PHASES.iter();
            let Some(at) = phases.position(|&phase| front.ends_with(&kernel_name(phase))) else {
                return Err(damaged(text.trim(), "a phase of kvm_page_table_test"));
            };
            let words = kernel_name(PHASES[at]) + "_MAPPINGS";
            (self.times[at].replace(time(value)?).is_some(), words)
        } else {
            return Ok(());
        };
        if is_repeated { Err(repeated(&words, self.line)) } else { Ok(()) }
    }

    fn close(&self) -> Result<Run, FileError> {
        let lacks = |missing: &str| incomplete(missing).at(self.line);
        let time = |at: usize| {
            let phase = PHASES[at];
            let ns = self.times[at].ok_or_else(|| lacks(&(kernel_name(phase) + "_MAPPINGS")))?;
            Ok((phase, ns))
        };
        Ok(Run {
            line: self.line,
            engine: self.engine,
            backing: self.backing.ok_or_else(|| lacks(BACKING))?,
            memory: self.memory.ok_or_else(|| lacks(MEMORY))?,
            vcpus: self.vcpus.ok_or_else(|| lacks(VCPUS))?,
            times: [time(0)?, time(1)?, time(2)?],
            mode: self.mode.clone(),
        })
    }
}

/// Returns the words of a phase before `_MAPPINGS`.
fn kernel_name(phase: Phase) -> String {
    format!("KVM_{}", phase.kernel_word().unwrap_or_default())
}
