// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Progress on standard error: a bar on a terminal, plain lines elsewhere.

use std::{
    io::{self, IsTerminal},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressStyle};

#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
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
        Self { bar }
    }

    pub fn start_stage(&self, text: impl Into<String>) {
        let text = text.into();
        match &self.bar {
            Some(bar) => bar.set_message(text),
            None => eprintln!("lab: {text}"),
        }
    }

    pub fn start_jobs(&self, count: usize) {
        let Some(bar) = &self.bar else { return };
        bar.set_length(count as u64);
        bar.set_position(0);
        let style = "{spinner} {pos}/{len} [{elapsed_precise}] {bar:24} {msg}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
    }

    /// Reports that a job ended after `seconds` of real time.
    pub fn job_done(&self, name: &str, seconds: f64) {
        match &self.bar {
            Some(bar) => {
                bar.inc(1);
                bar.set_message(name.to_owned());
            }
            None => eprintln!("lab: {name} done in {seconds:.1} s"),
        }
    }

    /// Prints a message that stays on the screen.
    pub fn print_note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("lab: {text}")),
            None => eprintln!("lab: {text}"),
        }
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
