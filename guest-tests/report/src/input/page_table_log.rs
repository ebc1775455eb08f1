// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Logs of the kernel's own `kvm_page_table_test`, as every kernel since 5.13 prints them.
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
//! A line is known by its words, wherever they begin, so a console's time stamp or a test runner's
//! `# ` in front does no harm; every other line is passed over. A file may hold several runs. A run
//! that lacks a line was cut off or mixed up, and no figure is taken from such a file. No kernel's
//! test leaves one of the three phases out; how many runs a file holds is its owner's matter, but it
//! must not end within a line that begins one.
//!
//! `granule bench` prints these lines too, its iterations under one head (`granule: iteration 3 of
//! 8`, all of which must be there), and phases of its own (`granule: exec took …`). Their times are
//! in its JSON and are passed over here, but the last run must have as many of them as those before
//! it.

use std::collections::HashMap;

use super::LogError;

use granule_types::{
    backing::Backing,
    phase::Phase,
    record::{Host, Record, RunConfig, SCHEMA},
    units::{Bytes, Nanoseconds},
};

/// What a record of the kernel's own test carries as its engine.
pub const ENGINE: &str = "kvm_page_table_test";
/// What a record carries that was read from the lines `granule bench` prints.
pub const BENCH_ENGINE: &str = "granule bench, its lines";

/// What begins a run of any of the kernel's KVM tests.
pub(crate) const MODE: &str = "Testing guest mode: ";
const BACKING: &str = "Testing memory backing src type: ";
const MEMORY: &str = "Testing memory size(aligned): ";
const VCPUS: &str = "Number of testing vCPUs: ";
const TIME: &str = "_MAPPINGS: total execution time: ";
const OURS: &str = "granule: ";
const ITERATION: &str = "granule: iteration ";
/// What a failed test prints.
pub(crate) const FAILURE: &str = "==== Test Assertion Failure ====";
const PHASES: [Phase; 3] = [Phase::Create, Phase::Update, Phase::Rebuild];

/// One run of the kernel's test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// The line it begins at, from 1.
    pub line: usize,
    /// Who printed it: [`ENGINE`] or [`BENCH_ENGINE`].
    pub engine: &'static str,
    /// The guest mode, as printed.
    pub mode: String,
    /// What was asked for behind the region.
    pub backing: Backing,
    /// The region's size.
    pub memory: Bytes,
    /// How many vCPUs.
    pub vcpus: u32,
    /// The time of create, update and rebuild, in this order.
    pub times: [(Phase, Nanoseconds); 3],
}

impl Run {
    /// The run as results, one record for each phase; a log tells nothing of the host.
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

/// A log's runs as results of an unknown host; runs alike are iterations of each other.
pub fn records(runs: &[Run]) -> Vec<Record> {
    let mut iterations = HashMap::new();
    runs.iter()
        .flat_map(|run| {
            let next = iterations
                .entry((run.engine, &run.mode, run.backing, run.memory, run.vcpus))
                .or_insert(0);
            let iteration = *next;
            *next += 1;
            run.records(&Host::default(), 0, iteration)
        })
        .collect()
}

/// Whether a text has a line of the kernel's test in it.
pub fn is_log(text: &str) -> bool {
    [MODE, BACKING, TIME].iter().any(|word| text.contains(word))
}

/// Whether a line is of this test and of no other of the kernel's.
pub(crate) fn is_distinctive(line: &str) -> bool {
    [BACKING, MEMORY, TIME]
        .iter()
        .any(|word| line.contains(word))
}

/// Reads every run of a log.
///
/// # Errors
/// There is none, one failed, or one is damaged or cut off.
pub fn read(text: &str) -> Result<Vec<Run>, LogError> {
    let mut runs = Vec::new();
    let mut open: Option<Open> = None;
    let mut extent = Extent::default();
    for (index, text) in text.lines().enumerate() {
        let line = index + 1;
        if text.contains(FAILURE) {
            return Err(LogError::Failed { line });
        }
        if is_json(text) {
            return Err(LogError::Json { line });
        }
        if let Some(mode) = behind(text, MODE) {
            if let Some(run) = open.take() {
                extent.of_head(&run)?;
                runs.push(extent.close(run)?);
            }
            open = Some(Open::new(line, mode));
        } else if let (Some(words), Some(run)) = (behind(text, OURS), &mut open) {
            run.engine = BENCH_ENGINE;
            if let Some(value) = behind(text, ITERATION) {
                let (number, of) = iteration(line, value)?;
                if run.times != [None; 3] {
                    let next = run.next_iteration(line);
                    runs.push(extent.close(std::mem::replace(run, next))?);
                }
                let last = run.iteration.map_or(0, |(last, _)| last);
                if run.iteration.is_some_and(|(_, known)| known != of) {
                    return Err(LogError::Value {
                        line,
                        value: value.to_owned(),
                        wanted: "an iteration of as many as the one before it",
                    });
                }
                if number != last + 1 {
                    return Err(LogError::OutOfTurn {
                        line,
                        found: number,
                        last,
                    });
                }
                run.iteration = Some((number, of));
            } else if let Some((name, _)) = words.split_once(" took ") {
                run.own.push(name.to_owned());
            }
        } else if let Some(known) = Line::of(line, text)? {
            let stray = || LogError::Stray {
                line,
                text: known.words(),
            };
            open.as_mut().ok_or_else(stray)?.take(line, known)?;
        }
    }
    if let Some(run) = open {
        extent.of_head(&run)?;
        extent.of_last(&run)?;
        runs.push(extent.close(run)?);
    }
    ends_whole(text)?;
    if runs.is_empty() {
        return Err(LogError::Foreign);
    }
    Ok(runs)
}

/// What stands behind `words` in a line, if they are in it.
pub(crate) fn behind<'a>(text: &'a str, words: &str) -> Option<&'a str> {
    text.split_once(words).map(|(_, value)| value.trim())
}

/// A line inside a run.
#[derive(Clone, Copy)]
enum Line {
    Backing(Backing),
    Memory(Bytes),
    Vcpus(u32),
    Time(Phase, Nanoseconds),
}

impl Line {
    fn of(line: usize, text: &str) -> Result<Option<Self>, LogError> {
        let wrong = |value: &str, wanted| LogError::Value {
            line,
            value: value.to_owned(),
            wanted,
        };
        if let Some(value) = behind(text, BACKING) {
            let read = value.parse().map(Self::Backing);
            return read
                .map(Some)
                .map_err(|_| wrong(value, "a backing source type"));
        }
        if let Some(value) = behind(text, MEMORY) {
            let read = value.parse().map(Self::Memory);
            return read.map(Some).map_err(|_| wrong(value, "a size"));
        }
        if let Some(value) = behind(text, VCPUS) {
            let read = value.parse().map(Self::Vcpus);
            return read
                .map(Some)
                .map_err(|_| wrong(value, "a number of vCPUs"));
        }
        let Some((before, value)) = text.split_once(TIME) else {
            return Ok(None);
        };
        let phase = PHASES.into_iter().find(|phase| {
            phase.kernel_word().is_some_and(|word| {
                before
                    .strip_suffix(word)
                    .is_some_and(|front| front.ends_with("KVM_"))
            })
        });
        let value = value.trim();
        match (phase, seconds(value)) {
            (None, _) => Err(wrong(text.trim(), "a phase of kvm_page_table_test")),
            (_, None) => Err(wrong(value, "a time as S.NNNNNNNNNs")),
            (Some(phase), Some(ns)) => Ok(Some(Self::Time(phase, ns))),
        }
    }

    fn words(self) -> String {
        match self {
            Self::Backing(_) => BACKING.trim_end().to_owned(),
            Self::Memory(_) => MEMORY.trim_end().to_owned(),
            Self::Vcpus(_) => VCPUS.trim_end().to_owned(),
            Self::Time(phase, _) => time_words(phase),
        }
    }
}

fn time_words(phase: Phase) -> String {
    format!("KVM_{}_MAPPINGS", phase.kernel_word().unwrap_or_default())
}

/// Seconds with exactly nine digits behind the point, as the test prints them.
pub(crate) fn seconds(text: &str) -> Option<Nanoseconds> {
    let (whole, part) = text.strip_suffix('s')?.split_once('.')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(part) || part.len() != 9 {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let part: u64 = part.parse().ok()?;
    Some(Nanoseconds(
        whole.checked_mul(1_000_000_000)?.checked_add(part)?,
    ))
}

/// How far runs went that came before, for the last one to be held against.
#[derive(Default)]
struct Extent {
    /// Engine, mode, backing, size and vCPUs of a run, and what phases of its own it had.
    before: Vec<(Key, Vec<String>)>,
}

type Key = (String, Option<Backing>, Option<Bytes>, Option<u32>);

impl Extent {
    /// Ends a run.
    fn close(&mut self, run: Open) -> Result<Run, LogError> {
        if run.engine == BENCH_ENGINE {
            self.before.push((run.key(), run.own.clone()));
        }
        run.close()
    }

    /// Checks that the iterations under a head are as many as each of them says.
    fn of_head(&self, last: &Open) -> Result<(), LogError> {
        match last.iteration {
            Some((number, of)) if number < of => {
                // What the run itself lacks comes before what should follow it.
                last.clone().close()?;
                Err(last.lacks(&format!("{ITERATION}{} of {of}", number + 1)))
            }
            _ => Ok(()),
        }
    }

    /// Checks that the last run of a file does not stop at a phase of its own that runs alike went
    /// beyond.
    fn of_last(&self, last: &Open) -> Result<(), LogError> {
        let key = last.key();
        let beyond = self.before.iter().rev().find_map(|(other, own)| {
            (*other == key).then(|| own.strip_prefix(last.own.as_slice())?.first())?
        });
        match beyond {
            Some(name) => {
                last.clone().close()?;
                Err(last.lacks(&format!("{OURS}{name} took")))
            }
            None => Ok(()),
        }
    }
}

/// `3 of 8`.
fn iteration(line: usize, text: &str) -> Result<(u32, u32), LogError> {
    let read = || {
        let (number, of) = text.split_once(" of ")?;
        let (number, of) = (number.parse().ok()?, of.parse().ok()?);
        (number <= of).then_some((number, of))
    };
    read().ok_or_else(|| LogError::Value {
        line,
        value: text.to_owned(),
        wanted: "an iteration as N of M",
    })
}

/// Whether a line is one of results, or a part of one.
pub(crate) fn is_json(line: &str) -> bool {
    line.trim_start().starts_with("{\"") || line.contains("\"granule.result/")
}

/// Checks that a file does not end within a line that begins a run. It takes the file as it is: of
/// what was taken out of one, the end of the last line no longer tells.
///
/// # Errors
/// It does.
pub(crate) fn ends_whole(text: &str) -> Result<(), LogError> {
    let last = text.lines().last().unwrap_or_default();
    if text.ends_with('\n') || !begins_a_run(last) {
        return Ok(());
    }
    Err(LogError::BreaksOff {
        line: text.lines().count(),
        text: last.trim().to_owned(),
    })
}

/// Whether a line ends in the first words of a run, but before they are over.
fn begins_a_run(line: &str) -> bool {
    let line = line.trim_end();
    let words = MODE.trim_end();
    // "Test" alone may be of anything.
    (5..=words.len()).any(|count| line.ends_with(&words[..count]))
}

/// A run not yet at its end.
#[derive(Clone)]
struct Open {
    line: usize,
    engine: &'static str,
    mode: String,
    backing: Option<Backing>,
    memory: Option<Bytes>,
    vcpus: Option<u32>,
    times: [Option<Nanoseconds>; 3],
    /// Which iteration under its head, from 1, and of how many.
    iteration: Option<(u32, u32)>,
    /// The phases that only `granule bench` has.
    own: Vec<String>,
}

impl Open {
    fn new(line: usize, mode: &str) -> Self {
        Self {
            line,
            engine: ENGINE,
            mode: mode.to_owned(),
            backing: None,
            memory: None,
            vcpus: None,
            times: [None; 3],
            iteration: None,
            own: Vec::new(),
        }
    }

    /// The same head, its times still to come.
    fn next_iteration(&self, line: usize) -> Self {
        Self {
            line,
            times: [None; 3],
            own: Vec::new(),
            ..self.clone()
        }
    }

    fn take(&mut self, line: usize, known: Line) -> Result<(), LogError> {
        let twice = match known {
            Line::Backing(value) => self.backing.replace(value).is_some(),
            Line::Memory(value) => self.memory.replace(value).is_some(),
            Line::Vcpus(value) => self.vcpus.replace(value).is_some(),
            Line::Time(phase, value) => PHASES
                .iter()
                .zip(&mut self.times)
                .find(|(known, _)| **known == phase)
                .is_some_and(|(_, time)| time.replace(value).is_some()),
        };
        if twice {
            return Err(LogError::Twice {
                line,
                text: known.words(),
                begun: self.line,
            });
        }
        Ok(())
    }

    /// What it was run with.
    fn key(&self) -> Key {
        (self.mode.clone(), self.backing, self.memory, self.vcpus)
    }

    fn lacks(&self, missing: &str) -> LogError {
        LogError::Incomplete {
            line: self.line,
            missing: missing.trim_end().to_owned(),
        }
    }

    fn close(self) -> Result<Run, LogError> {
        let lacks = |missing: &str| self.lacks(missing);
        let time = |at: usize| {
            let phase = PHASES[at];
            self.times[at]
                .map(|ns| (phase, ns))
                .ok_or_else(|| lacks(&time_words(phase)))
        };
        Ok(Run {
            line: self.line,
            engine: self.engine,
            backing: self.backing.ok_or_else(|| lacks(BACKING))?,
            memory: self.memory.ok_or_else(|| lacks(MEMORY))?,
            vcpus: self.vcpus.ok_or_else(|| lacks(VCPUS))?,
            times: [time(0)?, time(1)?, time(2)?],
            mode: self.mode,
        })
    }
}

#[cfg(test)]
mod tests;
