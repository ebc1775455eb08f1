// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One job on one kernel: pack the initramfs, boot, wait, take the results off the console, pair
//! them with the counts.
//!
//! Everything stays in the job's folder, whatever happens:
//!
//! | file | holds |
//! |---|---|
//! | `command` | the emulator's command line, as shell |
//! | `job.json`, `facts.json` | what PID 1 was given |
//! | `console.log` | the console |
//! | `emulator.log` | QEMU's own messages |
//! | `counts.jsonl` | the plugin's segments |
//! | `stdout`, `stderr`, `raw.jsonl` | what the test printed and reported, as it came |

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Serialize;
use thiserror::Error;

use super::{
    counts::{self, CountError, Segment},
    emulator::{Boot, Plugin},
    frames::{self, FrameError, Frames},
    guest::{self, Guest},
    guest_init,
    initramfs::Initramfs,
    job::{
        ENDING_FRAME, Ending, FACTS_PATH, HOST_FRAME, JOB_PATH, RESULTS_FRAME, STDERR_FRAME,
        STDOUT_FRAME,
    },
    kernel::Kernel,
    matrix::PlannedJob,
    splat,
    step::{self, Shell, StepError},
};
use granule_report::{
    input::{LogError, page_table_log},
    results::{ReadError, read_records},
};
use granule_types::{
    phase::Phase,
    record::{Host, Record, Series},
    units::{Bytes, Nanoseconds},
};

/// Why a job gave no results.
#[derive(Debug, Error)]
pub enum JobError {
    /// A file or the emulator is at fault.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The kernel died.
    #[error("the host kernel died; the console is {console}\n{splat}")]
    Died {
        /// Where the console is.
        console: PathBuf,
        /// What the kernel said.
        splat: String,
    },
    /// A checker of the debug kernel complained.
    #[error("the host kernel complained; the console is {console}\n{splat}")]
    Complained {
        /// Where the console is.
        console: PathBuf,
        /// What the kernel said.
        splat: String,
    },
    /// PID 1 never said how the job ended.
    #[error("the host ended without a word about the job; the console is {console}\n{tail}")]
    Silent {
        /// Where the console is.
        console: PathBuf,
        /// The console's last lines.
        tail: String,
    },
    /// What came over the console is damaged.
    #[error("{console}")]
    Frame {
        /// Where the console is.
        console: PathBuf,
        /// How it is damaged.
        #[source]
        source: FrameError,
    },
    /// What PID 1 said of the end is not understood.
    #[error("the emulated host's `granule` is of another version: build it again with scripts/lab")]
    Ending(#[source] serde_json::Error),
    /// The test did not end well.
    #[error("the test {0}\n{1}")]
    Test(String, String),
    /// The results are not as they should be.
    #[error("the results of the test are unusable")]
    Results(#[from] ReadError),
    /// The log of the kernel's test is not as it should be.
    #[error("the log of the kernel's test is unusable")]
    Log(#[from] LogError),
    /// The counts are not as they should be.
    #[error(transparent)]
    Counts(#[from] CountError),
}

/// What all jobs of a run share.
#[derive(Debug, Clone)]
pub struct Bench {
    /// The static arm64 `granule`.
    pub init: PathBuf,
    /// The counting plugin.
    pub plugin: PathBuf,
    /// The emulator's version.
    pub emulator: String,
    /// The real time a boot may take.
    pub deadline: Duration,
    /// Whether any complaint of the kernel is a failure.
    pub strict: bool,
}

/// What PID 1 cannot find out, written into the initramfs; see [`granule_types::record::Host`].
#[derive(Debug, Serialize)]
struct Facts<'a> {
    series: Option<&'a [Series]>,
    image_sha256: &'a str,
    emulator: String,
    cpu: &'a str,
}

/// What came of a job that ran to its end.
#[derive(Debug)]
pub struct Outcome {
    /// How the test ended.
    pub ending: Ending,
    /// What it printed.
    pub stdout: String,
    /// What it complained about.
    pub stderr: String,
    frames: Frames,
    /// What was counted, from mark to mark.
    pub segments: Vec<Segment>,
}

impl Bench {
    /// Runs a job; its folder is made. `None` in a dry run.
    ///
    /// # Errors
    /// The host did not boot, died, complained (where that matters), hung, or its results were
    /// lost on the way.
    pub fn run(
        &self,
        shell: Shell,
        kernel: &Kernel,
        job: &PlannedJob,
        folder: &Path,
    ) -> Result<Option<Outcome>, JobError> {
        shell.make_dir(folder)?;
        let initramfs = folder.join("initramfs.cpio");
        let facts = Facts {
            series: kernel.series.as_deref(),
            image_sha256: &kernel.image_sha256,
            emulator: format!("{} {}", self.emulator, job.hardware.describe()),
            cpu: &job.hardware.cpu,
        };
        self.pack(shell, kernel, job, &facts, folder, &initramfs)?;
        let boot = Boot {
            hardware: job.hardware.clone(),
            image: kernel.image.clone(),
            initramfs: initramfs.clone(),
            append: job.append.clone(),
            console: folder.join("console.log"),
            log: folder.join("emulator.log"),
            plugin: Plugin {
                library: self.plugin.clone(),
                out: folder.join("counts.jsonl"),
                functions: kernel.functions.clone(),
                instructions: job.guest.is_some(),
            },
            deadline: self.deadline,
        };
        let command = boot.step();
        if !shell.is_dry() {
            shell.write(&folder.join("command"), format!("{command}\n"))?;
        }
        let ended = shell.run(&command);
        if shell.is_dry() {
            return Ok(None);
        }
        // It is large and made of files that are at hand; the command is not needed to repeat it.
        let _ = fs::remove_file(&initramfs);
        self.collect(&boot, ended).map(Some)
    }

    /// Packs the initramfs.
    fn pack(
        &self,
        shell: Shell,
        kernel: &Kernel,
        job: &PlannedJob,
        facts: &Facts,
        folder: &Path,
        initramfs: &Path,
    ) -> Result<(), StepError> {
        let file = |e: serde_json::Error| StepError::file("write", folder, e.into());
        let job_text = serde_json::to_string(&job.job).map_err(file)?;
        let facts_text = serde_json::to_string(facts).map_err(file)?;
        if shell.is_dry() {
            let root = folder.join("initramfs");
            for dir in ["dev", "proc", "sys", "tmp"] {
                shell.make_dir(&root.join(dir))?;
            }
            shell.copy(&self.init, &root.join("init"))?;
            if let Some(program) = &job.foreign {
                shell.copy(program, &root.join("test"))?;
            }
            if job.guest == Some(Guest::Own) {
                let guest = root.join("guest");
                for dir in ["dev", "proc", "sys", "tmp"] {
                    shell.make_dir(&guest.join(dir))?;
                }
                shell.copy(&self.init, &guest.join("init"))?;
                shell.write(&guest.join("guest"), "")?;
                shell.print(format_args!(
                    "(cd {} && find . | LC_ALL=C sort | cpio -o -H newc -R 0:0) >{}",
                    guest.display(),
                    root.join("guest.cpio").display()
                ));
                shell.copy(&kernel.image, &root.join("guest.image"))?;
            }
            for (file, place) in job.guest.iter().flat_map(Guest::files) {
                shell.copy(&file, &root.join(place.trim_start_matches('/')))?;
            }
            shell.write(&root.join("job.json"), &job_text)?;
            shell.write(&root.join("facts.json"), &facts_text)?;
            shell.print(format_args!(
                "(cd {} && find . | LC_ALL=C sort | cpio -o -H newc --reproducible -R 0:0) >{}",
                root.display(),
                initramfs.display()
            ));
            return Ok(());
        }
        shell.write(&folder.join("job.json"), &job_text)?;
        shell.write(&folder.join("facts.json"), &facts_text)?;
        let init = step::read(&self.init)?;
        let foreign = job.foreign.as_deref().map(step::read).transpose()?;
        let own = job.guest == Some(Guest::Own);
        let image = own.then(|| step::read(&kernel.image)).transpose()?;
        let files = job.guest.iter().flat_map(Guest::files);
        let files = files
            .map(|(file, place)| Ok((step::read(&file)?, place)))
            .collect::<Result<Vec<_>, StepError>>()?;
        let pack = || {
            let mut archive = Initramfs::new(Vec::new())?;
            archive.program("/init", &init)?;
            if let Some(image) = image {
                archive.file(guest::IMAGE, &image)?;
                let mut inner = Initramfs::new(Vec::new())?;
                inner.program("/init", &init)?;
                inner.file(guest_init::MARKER, b"")?;
                archive.file(guest::INITRD, &inner.finish()?)?;
            }
            for (content, place) in &files {
                archive.file(place, content)?;
            }
            if let Some(foreign) = foreign {
                archive.program(super::job::FOREIGN_PATH, &foreign)?;
            }
            archive.file(JOB_PATH, job_text.as_bytes())?;
            archive.file(FACTS_PATH, facts_text.as_bytes())?;
            archive.finish()
        };
        let archive = pack().map_err(|e| StepError::file("pack", initramfs, e))?;
        super::initramfs::keep(&archive, initramfs)
            .map_err(|e| StepError::file("write", initramfs, e))
    }

    /// Takes everything the boot left behind and judges it.
    fn collect(&self, boot: &Boot, ended: Result<(), StepError>) -> Result<Outcome, JobError> {
        let folder = boot.console.parent().unwrap_or(Path::new("."));
        let console = fs::read(&boot.console).unwrap_or_default();
        let text = String::from_utf8_lossy(&console);
        if let Some(splat) = splat::death(&text) {
            return Err(JobError::Died {
                console: boot.console.clone(),
                splat,
            });
        }
        if self.strict
            && let Some(splat) = splat::complaint(&text)
        {
            return Err(JobError::Complained {
                console: boot.console.clone(),
                splat,
            });
        }
        match ended {
            // Why it took so long is on the console, not in the emulator's log.
            Err(StepError::Deadline { what, seconds, .. }) => {
                return Err(JobError::Step(StepError::Deadline {
                    what,
                    seconds,
                    log: boot.console.clone(),
                    tail: step::tail(&boot.console),
                }));
            }
            other => other?,
        }
        let frames = frames::receive(&console).map_err(|source| JobError::Frame {
            console: boot.console.clone(),
            source,
        })?;
        for (frame, file) in [
            (STDOUT_FRAME, "stdout"),
            (STDERR_FRAME, "stderr"),
            (RESULTS_FRAME, "raw.jsonl"),
        ] {
            if let Some(payload) = frames.get(frame) {
                let path = folder.join(file);
                fs::write(&path, payload).map_err(|e| StepError::file("write", path, e))?;
            }
        }
        let Some(ending) = frames.get(ENDING_FRAME) else {
            return Err(JobError::Silent {
                console: boot.console.clone(),
                tail: step::tail(&boot.console),
            });
        };
        let ending = serde_json::from_slice(ending).map_err(JobError::Ending)?;
        let counts = &boot.plugin.out;
        let segments = fs::read_to_string(counts).map_err(|source| CountError::Missing {
            path: counts.clone(),
            source,
        })?;
        let lossy = |name: &str| {
            String::from_utf8_lossy(frames.get(name).map_or(&[][..], Vec::as_slice)).into_owned()
        };
        Ok(Outcome {
            ending,
            stdout: lossy(STDOUT_FRAME),
            stderr: lossy(STDERR_FRAME),
            segments: counts::read_segments(&segments)?,
            frames,
        })
    }
}

impl Outcome {
    /// What the test reported, as it came.
    pub fn results(&self) -> &[u8] {
        self.frames
            .get(RESULTS_FRAME)
            .map_or(&[][..], Vec::as_slice)
    }

    /// The test's results with the counts of each phase.
    ///
    /// # Errors
    /// The test failed, or results and counts do not belong together.
    pub fn records(&self, job: &PlannedJob) -> Result<Vec<Record>, JobError> {
        let ns = self.success()?;
        if !job.job.foreign {
            let results = self
                .frames
                .get(RESULTS_FRAME)
                .map_or(&[][..], Vec::as_slice);
            let mut records = read_records(&String::from_utf8_lossy(results))?;
            counts::merge(&self.segments, &mut records)?;
            return Ok(records);
        }
        // The kernel's test says nothing of its host; PID 1 does.
        let host: Host = match self.frames.get(HOST_FRAME) {
            Some(host) => serde_json::from_slice(host).map_err(JobError::Ending)?,
            None => Host::default(),
        };
        let runs = page_table_log::read(&self.stdout)?;
        let mut records: Vec<Record> = (0..)
            .zip(&runs)
            .flat_map(|(iteration, run)| run.records(&host, job.seed, iteration))
            .collect();
        if let Some(first) = records.first() {
            let mut whole = [Record {
                phase: Phase::Whole,
                ns,
                ..first.clone()
            }];
            counts::merge(&self.segments, &mut whole)?;
            records.extend(whole);
        }
        Ok(records)
    }

    /// The time the test took, if it succeeded.
    pub(super) fn success(&self) -> Result<Nanoseconds, JobError> {
        match &self.ending {
            Ending::Exited { code: 0, ns } => Ok(*ns),
            other => Err(JobError::Test(describe(other), self.last_words())),
        }
    }

    /// The last lines the test printed.
    pub(super) fn last_words(&self) -> String {
        let lines: Vec<&str> = self.stdout.lines().chain(self.stderr.lines()).collect();
        lines[lines.len().saturating_sub(20)..]
            .iter()
            .map(|line| format!("    | {line}\n"))
            .collect()
    }
}

/// An ending in words, behind "the test".
pub fn describe(ending: &Ending) -> String {
    match ending {
        Ending::Exited { code, .. } => format!("ended with exit code {code}"),
        Ending::Killed { signal } => format!("was killed by signal {signal}"),
        Ending::Deadline { seconds } => format!("did not end within {seconds} s of virtual time"),
        Ending::ShortPool { page, wanted, got } => format!(
            "needs {wanted} huge pages of {}, the emulated host has {got}: give it more --memory",
            Bytes(*page)
        ),
        Ending::Init { error } => format!("could not be started: {error}"),
    }
}
