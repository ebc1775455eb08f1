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
//! A line is recognised by its words at any position, after a time stamp of the console or the `# `
//! of a test runner; other lines are ignored. A file may hold several runs, each with all three
//! phases. A run that lacks a line was cut off or mixed with another one, and the file is refused.
//!
//! `granule bench` prints these lines too: its iterations share one head (`granule: iteration 3 of
//! 8`, all of which are required), and its own phases (`granule: exec took …`) are ignored here,
//! since its JSON has them.

use granule_types::{
    backing::Backing,
    phase::Phase,
    record::{Host, Record, RunConfig, SCHEMA},
    units::{Bytes, Nanoseconds},
};

use super::log::{
    FAILURE, MODE, cut_off, damaged, failed, incomplete, json, line_outside_run, out_of_order,
    parsed, repeated, text_after, time,
};
use crate::{results::FileError, sample::engine};

const BACKING: &str = "Testing memory backing src type: ";
const MEMORY: &str = "Testing memory size(aligned): ";
const VCPUS: &str = "Number of testing vCPUs: ";
const TIME: &str = "_MAPPINGS: total execution time: ";
const BENCH: &str = "granule: ";
const ITERATION: &str = "granule: iteration ";
const PHASES: [Phase; 3] = [Phase::Create, Phase::Update, Phase::Rebuild];

/// Records of one run, one for each phase: create, update, rebuild.
pub type RunRecords = [Record; 3];

/// Returns the records of runs; equal runs are iterations of each other.
pub(super) fn records(runs: Vec<RunRecords>) -> Vec<Record> {
    let mut records: Vec<Record> = Vec::new();
    for mut run in runs {
        let key = |one: &Record| {
            let RunConfig { mode, backing, memory, vcpus, .. } = &one.config;
            (one.phase, one.engine.clone(), mode.clone(), *backing, *memory, *vcpus)
        };
        let first = key(&run[0]);
        let iteration = records.iter().filter(|record| key(record) == first).count();
        for record in &mut run {
            record.config.iteration = u32::try_from(iteration).unwrap_or(u32::MAX);
        }
        records.extend(run);
    }
    records
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

/// Reads every run of a log, which does not name its host; seeds and iterations are 0.
///
/// # Errors
/// The log has no run, or one that failed, is damaged or is cut off.
pub fn read(text: &str) -> Result<Vec<RunRecords>, FileError> {
    let mut runs = Vec::new();
    let mut open: Option<OpenRun> = None;
    for (line, text) in (1..).zip(text.lines()) {
        if text.contains(FAILURE) {
            return Err(failed().at(line));
        }
        if is_json(text) {
            return Err(json().at(line));
        }
        if let Some(mode) = text_after(text, MODE) {
            let ended = open.replace(OpenRun::new(line, mode));
            runs.extend(ended.map(OpenRun::end).transpose()?);
        } else if let Some(run) = &mut open {
            if text.contains(BENCH) {
                runs.extend(run.bench_line(line, text)?);
            } else {
                run.take(text).map_err(|error| error.at(line))?;
            }
        } else if is_distinctive(text) || text.contains(VCPUS) {
            return Err(line_outside_run(text).at(line));
        }
    }
    runs.extend(open.map(OpenRun::end).transpose()?);
    check_end(text)?;
    if runs.is_empty() {
        let message =
            format!("holds no run of kvm_page_table_test: no line contains '{}'", MODE.trim_end());
        return Err(FileError::new(message));
    }
    Ok(runs)
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
#[derive(Default)]
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
}

impl OpenRun {
    fn new(line: usize, mode: &str) -> Self {
        let engine = engine::PAGE_TABLE_TEST;
        Self { line, engine, mode: mode.to_owned(), ..Self::default() }
    }

    /// Reads a line of the test; other lines are ignored.
    fn take(&mut self, text: &str) -> Result<(), FileError> {
        let (is_repeated, words) = if let Some(value) = text_after(text, BACKING) {
            let value = parsed(value, "a backing source type")?;
            (self.backing.replace(value).is_some(), BACKING.to_owned())
        } else if let Some(value) = text_after(text, MEMORY) {
            (self.memory.replace(parsed(value, "a size")?).is_some(), MEMORY.to_owned())
        } else if let Some(value) = text_after(text, VCPUS) {
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

    /// Reads a line of `granule bench`; returns the run that a next iteration ends.
    fn bench_line(&mut self, line: usize, text: &str) -> Result<Option<RunRecords>, FileError> {
        self.engine = engine::BENCH_LINES;
        let Some(value) = text_after(text, ITERATION) else {
            return Ok(None);
        };
        let (number, of) = iteration(value).map_err(|error| error.at(line))?;
        let mut ended = None;
        if self.times != [None; 3] {
            ended = Some(self.close()?);
            (self.line, self.times) = (line, [None; 3]);
        }
        let (last, all) = self.iteration.replace((number, of)).unwrap_or((0, of));
        if all != of {
            return Err(damaged(value, "an iteration of as many as the one before it").at(line));
        }
        if number != last + 1 {
            return Err(out_of_order(number, last).at(line));
        }
        Ok(ended)
    }

    /// Ends the last run below a head, which needs all iterations.
    fn end(self) -> Result<RunRecords, FileError> {
        let run = self.close()?;
        match self.iteration {
            Some((number, of)) if number < of => {
                let next = format!("{ITERATION}{} of {of}", number + 1);
                Err(incomplete(&next).at(self.line))
            }
            _ => Ok(run),
        }
    }

    fn close(&self) -> Result<RunRecords, FileError> {
        let lacks = |missing: &str| incomplete(missing).at(self.line);
        let config = RunConfig {
            mode: self.mode.clone(),
            backing: self.backing.ok_or_else(|| lacks(BACKING))?,
            memory: self.memory.ok_or_else(|| lacks(MEMORY))?,
            vcpus: self.vcpus.ok_or_else(|| lacks(VCPUS))?,
            seed: 0,
            iteration: 0,
            prefault: false,
            options: Default::default(),
        };
        let record = |at: usize| {
            let phase = PHASES[at];
            let ns = self.times[at].ok_or_else(|| lacks(&(kernel_name(phase) + "_MAPPINGS")))?;
            Ok(Record {
                schema: SCHEMA.to_owned(),
                host: Host::default(),
                engine: self.engine.to_owned(),
                config: config.clone(),
                obtained: None,
                phase,
                round: None,
                ns,
                elapsed_ns: None,
                vcpu_ns: Vec::new(),
                counters: Default::default(),
                events: Default::default(),
                gauges: Default::default(),
            })
        };
        Ok([record(0)?, record(1)?, record(2)?])
    }
}

/// Returns the words of a phase before `_MAPPINGS`.
fn kernel_name(phase: Phase) -> String {
    format!("KVM_{}", phase.kernel_word().unwrap_or_default())
}
