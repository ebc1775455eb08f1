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

use super::log::{FAILURE, LogDefect, LogError, MODE, behind, parsed, time};
use crate::sample::engine;
use granule_types::{
    backing::Backing,
    phase::Phase,
    record::{Host, Record, RunConfig, SCHEMA},
    units::{Bytes, Nanoseconds},
};

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
pub fn records(runs: &[Run]) -> Vec<Record> {
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
pub fn is_log(text: &str) -> bool {
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
pub(super) fn check_end(text: &str) -> Result<(), LogError> {
    let last = text.lines().last().unwrap_or_default().trim_end();
    let words = MODE.trim_end();
    // "Test" alone may begin any line.
    let begins_a_run = (5..=words.len()).any(|count| last.ends_with(&words[..count]));
    if text.ends_with('\n') || !begins_a_run {
        return Ok(());
    }
    Err(LogDefect::CutOff(last.trim().to_owned()).at(text.lines().count()))
}

/// Reads every run of a log.
///
/// # Errors
/// The log has no run, or one that failed, is damaged or is cut off.
pub fn read(text: &str) -> Result<Vec<Run>, LogError> {
    let mut log = Log::default();
    for (line, text) in (1..).zip(text.lines()) {
        if text.contains(FAILURE) {
            return Err(LogDefect::Failed.at(line));
        }
        if is_json(text) {
            return Err(LogDefect::Json.at(line));
        }
        if let Some(mode) = behind(text, MODE) {
            log.end_head()?;
            log.open = Some(OpenRun::new(line, mode));
        } else if text.contains(BENCH) && log.open.is_some() {
            log.bench_line(line, text)?;
        } else if let Some(run) = &mut log.open {
            run.take(line, text)?;
        } else if is_distinctive(text) || text.contains(VCPUS) {
            return Err(LogDefect::Stray(text.trim().to_owned()).at(line));
        }
    }
    log.check_last()?;
    log.end_head()?;
    check_end(text)?;
    if log.runs.is_empty() {
        return Err(LogError::NoRun);
    }
    Ok(log.runs)
}

/// The part of a log that was read.
#[derive(Default)]
struct Log {
    runs: Vec<Run>,
    open: Option<OpenRun>,
    /// Runs of `granule bench` and their own phases.
    bench_phases: Vec<(Head, Vec<String>)>,
}

impl Log {
    /// Reads a line of `granule bench`.
    fn bench_line(&mut self, line: usize, text: &str) -> Result<(), LogError> {
        let Some(run) = &mut self.open else {
            return Ok(());
        };
        run.engine = engine::BENCH_LINES;
        let Some(value) = behind(text, ITERATION) else {
            let own = behind(text, BENCH).and_then(|words| words.split_once(" took "));
            run.bench_phases.extend(own.map(|(name, _)| name.to_owned()));
            return Ok(());
        };
        let (number, of) = iteration(line, value)?;
        let last = run.iteration;
        if run.times != [None; 3] {
            let next = run.next_iteration(line);
            let ended = self.open.replace(next);
            self.close(ended)?;
        }
        if last.is_some_and(|(_, known)| known != of) {
            let wanted = "an iteration of as many as the one before it";
            return Err(LogDefect::value(value, wanted).at(line));
        }
        let last = last.map_or(0, |(last, _)| last);
        if number != last + 1 {
            return Err(LogDefect::Iteration { found: number, last }.at(line));
        }
        self.open.iter_mut().for_each(|run| run.iteration = Some((number, of)));
        Ok(())
    }

    /// Ends the runs below a head, which need all iterations.
    fn end_head(&mut self) -> Result<(), LogError> {
        let Some(run) = self.open.take() else {
            return Ok(());
        };
        let (line, iteration) = (run.line, run.iteration);
        self.close(Some(run))?;
        match iteration {
            Some((number, of)) if number < of => {
                let next = format!("{ITERATION}{} of {of}", number + 1);
                Err(LogDefect::incomplete(&next).at(line))
            }
            _ => Ok(()),
        }
    }

    fn close(&mut self, run: Option<OpenRun>) -> Result<(), LogError> {
        let Some(run) = run else { return Ok(()) };
        if run.engine == engine::BENCH_LINES {
            self.bench_phases.push((run.head.clone(), run.bench_phases.clone()));
        }
        self.runs.push(run.close()?);
        Ok(())
    }

    /// Checks that the last run has the own phases of equal runs.
    fn check_last(&self) -> Result<(), LogError> {
        let Some(last) = &self.open else {
            return Ok(());
        };
        let missing = self.bench_phases.iter().rev().find_map(|(head, phases)| {
            let equal = *head == last.head && last.lacks_no_iteration();
            equal.then(|| phases.strip_prefix(last.bench_phases.as_slice())?.first())?
        });
        if let Some(name) = missing {
            last.clone().close()?;
            return Err(LogDefect::incomplete(&format!("{BENCH}{name} took")).at(last.line));
        }
        Ok(())
    }
}

/// Reads `3 of 8`.
fn iteration(line: usize, text: &str) -> Result<(u32, u32), LogError> {
    let read = || {
        let (number, of) = text.split_once(" of ")?;
        let (number, of) = (number.parse().ok()?, of.parse().ok()?);
        (number <= of).then_some((number, of))
    };
    read().ok_or_else(|| LogDefect::value(text, "an iteration as N of M").at(line))
}

/// Lines that precede the times.
#[derive(Debug, Clone, PartialEq)]
struct Head {
    mode: String,
    backing: Option<Backing>,
    memory: Option<Bytes>,
    vcpus: Option<u32>,
}

/// A run whose end is not yet read.
#[derive(Clone)]
struct OpenRun {
    line: usize,
    engine: &'static str,
    head: Head,
    times: [Option<Nanoseconds>; 3],
    /// Iteration from 1 below its head, and the number of all.
    iteration: Option<(u32, u32)>,
    /// Phases that only `granule bench` has.
    bench_phases: Vec<String>,
}

impl OpenRun {
    fn new(line: usize, mode: &str) -> Self {
        Self {
            line,
            engine: engine::PAGE_TABLE_TEST,
            head: Head { mode: mode.to_owned(), backing: None, memory: None, vcpus: None },
            times: [None; 3],
            iteration: None,
            bench_phases: Vec::new(),
        }
    }

    /// Returns a run with the same head and no times.
    fn next_iteration(&self, line: usize) -> Self {
        Self { line, times: [None; 3], bench_phases: Vec::new(), ..self.clone() }
    }

    fn lacks_no_iteration(&self) -> bool {
        self.iteration.is_none_or(|(number, of)| number == of)
    }

    /// Reads a line of the test; other lines are ignored.
    fn take(&mut self, line: usize, text: &str) -> Result<(), LogError> {
        let head = &mut self.head;
        let (is_repeated, words) = if let Some(value) = behind(text, BACKING) {
            let value = parsed(line, value, "a backing source type")?;
            (head.backing.replace(value).is_some(), BACKING.to_owned())
        } else if let Some(value) = behind(text, MEMORY) {
            let value = parsed(line, value, "a size")?;
            (head.memory.replace(value).is_some(), MEMORY.to_owned())
        } else if let Some(value) = behind(text, VCPUS) {
            let value = parsed(line, value, "a number of vCPUs")?;
            (head.vcpus.replace(value).is_some(), VCPUS.to_owned())
        } else if let Some((front, value)) = text.split_once(TIME) {
            let phase = PHASES.iter().position(|&phase| front.ends_with(&time_words(phase)));
            let Some(at) = phase else {
                let wanted = "a phase of kvm_page_table_test";
                return Err(LogDefect::value(text.trim(), wanted).at(line));
            };
            let value = time(line, value.trim())?;
            (self.times[at].replace(value).is_some(), time_words(PHASES[at]) + "_MAPPINGS")
        } else {
            return Ok(());
        };
        if is_repeated {
            return Err(LogDefect::Repeated(words.trim_end().to_owned(), self.line).at(line));
        }
        Ok(())
    }

    fn close(self) -> Result<Run, LogError> {
        let lacks = |missing: &str| LogDefect::incomplete(missing).at(self.line);
        let time = |at: usize| {
            let phase = PHASES[at];
            let ns = self.times[at].ok_or_else(|| lacks(&(time_words(phase) + "_MAPPINGS")))?;
            Ok((phase, ns))
        };
        Ok(Run {
            line: self.line,
            engine: self.engine,
            backing: self.head.backing.ok_or_else(|| lacks(BACKING))?,
            memory: self.head.memory.ok_or_else(|| lacks(MEMORY))?,
            vcpus: self.head.vcpus.ok_or_else(|| lacks(VCPUS))?,
            times: [time(0)?, time(1)?, time(2)?],
            mode: self.head.mode,
        })
    }
}

/// Returns the word of a phase before `_MAPPINGS`.
fn time_words(phase: Phase) -> String {
    format!("KVM_{}", phase.kernel_word().unwrap_or_default())
}

#[cfg(test)]
mod tests;
