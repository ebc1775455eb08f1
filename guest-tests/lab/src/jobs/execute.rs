// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Executes a job on a kernel: packs the initramfs, boots the host, collects results and counts.
//!
//! All files remain in the job's directory, after an error too:
//!
//! | file | contents |
//! |---|---|
//! | `command` | command line of the emulator, as shell |
//! | `job.json`, `facts.json` | input of PID 1 |
//! | `console.log` | console |
//! | `emulator.log` | QEMU's own messages |
//! | `counts.jsonl` | segments of the plugin |
//! | `stdout`, `stderr`, `raw.jsonl` | output and results of the test |

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use granule_types::host::HostFacts;

use crate::{
    command::{Command, CommandError, tail},
    host::{
        emulator::{kernel_command_line, with_path},
        guest_init,
        initramfs::{self, Entry},
        job::{FACTS_PATH, FOREIGN_PATH, JOB_PATH, receive},
    },
    jobs::{
        counts::{CountError, check_turns, read_segments},
        guest::Guest,
        matrix::PlannedJob,
        outcome::{JobError, JobOutcome, any_splat, oops},
    },
    kernel::Kernel,
    shell::Shell,
};

const CONSOLE: &str = "console.log";
const COUNTS: &str = "counts.jsonl";
const INITRAMFS: &str = "initramfs.cpio";

/// Executor of jobs, with the properties that all jobs of a run share.
#[derive(Debug, Clone)]
pub struct Executor {
    pub qemu: PathBuf,
    pub init: PathBuf,
    pub plugin: PathBuf,
    pub emulator: String,
    /// Real time after which an emulator is terminated.
    pub deadline: Duration,
    /// True if any splat on the console fails the job.
    pub strict: bool,
}

impl Executor {
    /// Executes a job; `None` in a dry run.
    pub fn run(
        &self,
        shell: Shell,
        kernel: &Kernel,
        job: &PlannedJob,
        directory: &Path,
    ) -> Result<Option<JobOutcome>, JobError> {
        shell.create_dir(directory)?;
        let command = self.command(kernel, job, directory);
        let facts = HostFacts {
            series: kernel.series.clone(),
            image_sha256: Some(kernel.image_sha256.clone()),
            emulator: Some(format!("{} {}", self.emulator, job.hardware.describe())),
            cpu: Some(job.hardware.cpu.clone()),
            ..HostFacts::default()
        };
        let serialize = |e: serde_json::Error| CommandError::file("write", directory, e.into());
        let job_text = serde_json::to_string(&job.job).map_err(serialize)?;
        let facts_text = serde_json::to_string(&facts).map_err(serialize)?;
        let archive = directory.join(INITRAMFS);
        let contents = self.contents(kernel, job, &job_text, &facts_text);
        if shell.is_dry() {
            initramfs::print(shell, &contents, &directory.join("initramfs"), &archive)?;
            shell.run(&command)?;
            return Ok(None);
        }
        shell.write(&directory.join("job.json"), &job_text)?;
        shell.write(&directory.join("facts.json"), &facts_text)?;
        let packed = initramfs::pack(&contents)?;
        initramfs::write_sparse(&packed, &archive)
            .map_err(|e| CommandError::file("write", &archive, e))?;
        drop(packed);
        shell.write(&directory.join("command"), format!("{command}\n"))?;
        let ended = shell.run(&command);
        // The archive is large and can be rebuilt from its inputs.
        let _ = fs::remove_file(&archive);
        self.collect(job, directory, ended).map(Some)
    }

    fn command(&self, kernel: &Kernel, job: &PlannedJob, directory: &Path) -> Command {
        let hardware = &job.hardware;
        let mut plugin = with_path("file=", &self.plugin);
        plugin += &with_path(",out=", &directory.join(COUNTS));
        if job.guest.is_some() {
            plugin += ",instructions=on";
        }
        plugin += &format!(",quantum={},seed={}", hardware.quantum.0, job.job.seed);
        if let Some(costs) = &hardware.costs {
            plugin += &costs.arguments();
        }
        for (name, address) in &kernel.functions {
            plugin += &format!(",at={name}:{address:x}");
        }
        let console = with_path("file,id=console,path=", &directory.join(CONSOLE));
        hardware
            .emulator(&self.qemu)
            .args(["-chardev", &console, "-serial", "chardev:console", "-plugin", &plugin])
            .arg("-kernel")
            .arg(&kernel.image)
            .arg("-initrd")
            .arg(directory.join(INITRAMFS))
            .args(["-append", &kernel_command_line(&job.append)])
            .log(directory.join("emulator.log"))
            .deadline(self.deadline)
    }

    fn contents<'a>(
        &self,
        kernel: &Kernel,
        job: &PlannedJob,
        job_text: &'a str,
        facts_text: &'a str,
    ) -> Vec<Entry<'a>> {
        let init = || Entry::program("/init", &self.init);
        let mut contents = vec![init()];
        if job.guest.as_ref().is_some_and(|guest| guest.files.is_empty()) {
            let inner = vec![init(), Entry::text(guest_init::MARKER, "")];
            contents.push(Entry::file(Guest::IMAGE, &kernel.image));
            contents.push(Entry::archive(Guest::INITRD, inner));
        }
        for (file, path) in job.guest.iter().flat_map(|guest| &guest.files) {
            contents.push(Entry::file(path, file));
        }
        contents.extend(job.foreign.iter().map(|test| Entry::program(FOREIGN_PATH, test)));
        contents.push(Entry::text(JOB_PATH, job_text));
        contents.push(Entry::text(FACTS_PATH, facts_text));
        contents
    }

    fn collect(
        &self,
        job: &PlannedJob,
        directory: &Path,
        ended: Result<(), CommandError>,
    ) -> Result<JobOutcome, JobError> {
        let console = directory.join(CONSOLE);
        let bytes = fs::read(&console).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let strict = || any_splat(&text).filter(|_| self.strict);
        if let Some((event, splat)) = oops(&text)
            .map(|splat| ("crashed", splat))
            .or_else(|| Some(("printed a splat", strict()?)))
        {
            return Err(JobError::Splat { event, console, splat });
        }
        match ended {
            // The reason is on the console, not in the emulator's log.
            Err(CommandError::Deadline { task, seconds, .. }) => {
                let tail = tail(&console);
                let error = CommandError::Deadline { task, seconds, log: console, tail };
                return Err(JobError::Command(error));
            }
            other => other?,
        }
        let report = match receive(&text) {
            Ok(Some(report)) => report,
            Ok(None) => return Err(JobError::NoEnding { tail: tail(&console), console }),
            Err(source) => return Err(JobError::Report { console, source }),
        };
        for (file, content) in
            [("stdout", &report.stdout), ("stderr", &report.stderr), ("raw.jsonl", &report.results)]
        {
            let path = directory.join(file);
            fs::write(&path, content).map_err(|e| CommandError::file("write", path, e))?;
        }
        let path = directory.join(COUNTS);
        let counts =
            fs::read_to_string(&path).map_err(|source| CountError::Missing { path, source })?;
        let segments = read_segments(&counts)?;
        check_turns(&segments, job.hardware.longest_wait())?;
        Ok(JobOutcome { report, segments })
    }
}
