// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The outcome of a boot that ended, from the files in the directory of its job.
//!
//! The console decides first: a parameter that the kernel does not know, a crash or a splat explains
//! what the emulator or the test reports afterwards. Then follow the end of the emulator, the report
//! of PID 1 and the counts.

use std::{fs, path::Path};

use super::{CONSOLE_FILE, COUNTS_FILE, Executor};
use crate::{
    command::{CommandError, log_tail},
    host::job::{JobReport, receive_report},
    jobs::{
        counts::{CountError, SegmentLine, check_waits, read_segments},
        matrix::PlannedJob,
        outcome::{JobError, JobOutcome, find_oops, find_splat, find_unknown_parameter},
    },
    options::Rodata,
};

impl Executor {
    /// Returns the outcome of a job; `ended` is the result of its emulator.
    pub(super) fn collect_outcome(
        &self,
        job: &PlannedJob,
        directory: &Path,
        ended: Result<(), CommandError>,
    ) -> Result<JobOutcome, JobError> {
        let console = directory.join(CONSOLE_FILE);
        let bytes = fs::read(&console).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        self.check_console(job, &console, &text)?;
        let report = read_report(&console, &text, ended)?;
        for (file, content) in
            [("stdout", &report.stdout), ("stderr", &report.stderr), ("raw.jsonl", &report.results)]
        {
            let path = directory.join(file);
            fs::write(&path, content).map_err(|e| CommandError::file("write", path, e))?;
        }
        let in_guest = self.fails_on_splat && job.work.guest().is_some();
        if let Some(splat) = in_guest.then(|| find_splat(&report.stdout)).flatten() {
            let (machine, event, console) = ("guest", "printed a splat", directory.join("stdout"));
            return Err(JobError::Splat { machine, event, console, splat });
        }
        let segments = match &self.check {
            Some(_) => Vec::new(),
            None => read_counts(job, directory)?,
        };
        Ok(JobOutcome { report, segments, programs: self.programs(job)? })
    }

    /// Checks that the console has no reason to fail the job.
    fn check_console(&self, job: &PlannedJob, console: &Path, text: &str) -> Result<(), JobError> {
        if let Some(boot) = job.work.measured_boot()
            && text.contains(&format!("Invalid option string for rodata: '{}'", boot.rodata))
            && boot.rodata != Rodata::Full
        {
            return Err(JobError::UnknownRodata(boot.rodata));
        }
        if let Some(parameter) = find_unknown_parameter(text, &job.kernel_parameters) {
            return Err(JobError::UnknownParameter(parameter));
        }
        let splat_if_fatal = || find_splat(text).filter(|_| self.fails_on_splat);
        match find_oops(text)
            .map(|splat| ("crashed", splat))
            .or_else(|| Some(("printed a splat", splat_if_fatal()?)))
        {
            Some((event, splat)) => {
                let console = console.to_owned();
                Err(JobError::Splat { machine: "host", event, console, splat })
            }
            None => Ok(()),
        }
    }
}

/// Returns the report of PID 1 on the console of an emulator that ended.
fn read_report(
    console: &Path,
    text: &str,
    ended: Result<(), CommandError>,
) -> Result<JobReport, JobError> {
    let console = console.to_owned();
    match ended {
        // The console shows the reason, not the emulator's log.
        Err(CommandError::Deadline { task, seconds, .. }) => {
            let tail = log_tail(&console);
            let error = CommandError::Deadline { task, seconds, log: Some(console), tail };
            return Err(JobError::Command(error));
        }
        other => other?,
    }
    match receive_report(text) {
        Ok(Some(report)) => Ok(report),
        Ok(None) => Err(JobError::NoReport { tail: log_tail(&console), console }),
        Err(source) => Err(JobError::Report { console, source }),
    }
}

fn read_counts(job: &PlannedJob, directory: &Path) -> Result<Vec<SegmentLine>, JobError> {
    let path = directory.join(COUNTS_FILE);
    let counts =
        fs::read_to_string(&path).map_err(|source| CountError::Missing { path, source })?;
    let segments = read_segments(&counts)?;
    check_waits(&segments, job.machine.max_wait())?;
    Ok(segments)
}
