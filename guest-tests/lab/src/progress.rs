// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Progress on standard error: a bar on a terminal, plain lines elsewhere, both with the estimated
//! remaining time.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, IsTerminal},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    jobs: Mutex<JobTimes>,
    /// Messages that are printed once.
    printed: Mutex<BTreeSet<String>>,
}

impl Progress {
    /// Returns a reporter, which is silent in a dry run.
    pub fn new(dry: bool) -> Self {
        let bar = if dry {
            Some(ProgressBar::hidden())
        } else {
            io::stderr().is_terminal().then(|| {
                let bar = ProgressBar::new_spinner();
                bar.enable_steady_tick(Duration::from_millis(200));
                bar
            })
        };
        Self { bar, jobs: Mutex::default(), printed: Mutex::default() }
    }

    pub fn start_stage(&self, text: impl Into<String>) {
        let text = text.into();
        match &self.bar {
            Some(bar) => bar.set_message(text),
            None => eprintln!("lab: {text}"),
        }
    }

    /// Starts a stage of jobs, each of a class of similar duration, on `parallel` machines.
    pub fn start_jobs(&self, classes: impl IntoIterator<Item = String>, parallel: usize) {
        let mut times = JobTimes { parallel: parallel.max(1), ..JobTimes::default() };
        for class in classes {
            times.total += 1;
            times.classes.entry(class).or_default().remaining += 1;
        }
        if let Some(bar) = &self.bar {
            bar.set_length(times.total as u64);
            bar.set_position(0);
            let style = "{spinner} {pos}/{len} [{elapsed_precise}] {bar:24} {msg}";
            if let Ok(style) = ProgressStyle::with_template(style) {
                bar.set_style(style);
            }
        }
        *self.jobs() = times;
    }

    fn jobs(&self) -> MutexGuard<'_, JobTimes> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports that a job of a class ended after `seconds` of real time; `None` if it was not run.
    pub fn job_done(&self, name: &str, class: &str, seconds: Option<f64>) {
        let mut jobs = self.jobs();
        jobs.record(class, seconds);
        let left = jobs.remaining_seconds().map(describe_remaining).unwrap_or_default();
        match &self.bar {
            Some(bar) => {
                bar.inc(1);
                bar.set_message(format!("{name}{left}"));
            }
            None => {
                let done = match seconds {
                    Some(seconds) => format!("done in {seconds:.1} s"),
                    None => "is done".to_owned(),
                };
                eprintln!("lab: {name} {done} ({} of {}{left})", jobs.ended, jobs.total);
            }
        }
    }

    /// Reports that `ended` of `total` jobs have ended since `start`, and the state of the others.
    pub fn set_jobs(&self, (ended, total): (usize, usize), start: Instant, state: &str) {
        let mut jobs = self.jobs();
        let new = ended.saturating_sub(*jobs.first_ended.get_or_insert(ended));
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let left = (new > 0 && ended < total).then(|| {
            describe_remaining(start.elapsed().as_secs_f64() * (total - ended) as f64 / new as f64)
        });
        let left = left.unwrap_or_default();
        match &self.bar {
            Some(bar) => {
                bar.set_length(total as u64);
                bar.set_position(ended as u64);
                bar.set_message(format!("{state}{left}"));
            }
            None if jobs.printed != (ended, state.to_owned()) => {
                eprintln!("lab: {ended} of {total} jobs done{left}; {state}");
                jobs.printed = (ended, state.to_owned());
            }
            None => {}
        }
    }

    /// Prints a message that stays on the screen.
    pub fn print_note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("lab: {text}")),
            None => eprintln!("lab: {text}"),
        }
    }

    /// Prints a message unless it was printed by this function.
    pub fn print_note_once(&self, text: &str) {
        let mut printed = self.printed.lock().unwrap_or_else(PoisonError::into_inner);
        if printed.insert(text.to_owned()) {
            self.print_note(text);
        }
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Durations of ended jobs, from which the remaining time is estimated: a job takes the mean of its
/// class, or of all jobs.
#[derive(Debug, Default)]
struct JobTimes {
    total: usize,
    ended: usize,
    parallel: usize,
    classes: BTreeMap<String, ClassTimes>,
    /// Ended jobs when the wait for another process's jobs began.
    first_ended: Option<usize>,
    printed: (usize, String),
}

#[derive(Debug, Default)]
struct ClassTimes {
    remaining: u32,
    measured: u32,
    seconds: f64,
}

impl JobTimes {
    fn record(&mut self, class: &str, seconds: Option<f64>) {
        self.ended += 1;
        let class = self.classes.entry(class.to_owned()).or_default();
        class.remaining = class.remaining.saturating_sub(1);
        if let Some(seconds) = seconds {
            class.measured += 1;
            class.seconds += seconds;
        }
    }

    /// Estimates the remaining time; `None` if no job was measured, or none remains.
    fn remaining_seconds(&self) -> Option<f64> {
        let sum = |value: fn(&ClassTimes) -> f64| self.classes.values().map(value).sum::<f64>();
        let measured = sum(|class| f64::from(class.measured));
        let remaining: u32 = self.classes.values().map(|class| class.remaining).sum();
        if measured == 0.0 || remaining == 0 {
            return None;
        }
        let mean = sum(|class| class.seconds) / measured;
        let of_class = |class: &ClassTimes| {
            let mean = match class.measured {
                0 => mean,
                measured => class.seconds / f64::from(measured),
            };
            mean * f64::from(class.remaining)
        };
        let work: f64 = self.classes.values().map(of_class).sum();
        let parallel = u32::try_from(self.parallel).unwrap_or(u32::MAX);
        Some(work / f64::from(parallel.min(remaining)))
    }
}

/// Formats a remaining time: `; about 3 min left`.
fn describe_remaining(seconds: f64) -> String {
    match seconds {
        0.0..90.0 => format!("; about {seconds:.0} s left"),
        _ => format!("; about {:.0} min left", seconds / 60.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimate_weighs_jobs_by_their_class() {
        let progress = Progress::new(true);
        let classes = ["4k", "4k", "4k", "1g", "1g", "thp"].map(str::to_owned);
        progress.start_jobs(classes, 2);
        let before = progress.jobs().remaining_seconds();

        progress.job_done("a", "4k", Some(10.0));
        progress.job_done("b", "1g", Some(100.0));
        progress.job_done("c", "4k", None);

        // 10 s for 4k, 100 s for 1g, and the mean of both, 55 s, for thp; two at a time.
        assert_eq!(before, None);
        assert_eq!(progress.jobs().remaining_seconds(), Some(82.5));
        assert_eq!(describe_remaining(82.5), "; about 82 s left");
        assert_eq!(describe_remaining(600.0), "; about 10 min left");
    }
}
