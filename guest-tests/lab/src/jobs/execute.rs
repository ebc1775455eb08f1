// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Executes one job on one kernel: packs the initramfs, boots, and collects results and counts.
//!
//! All files stay in the job's directory, also after an error:
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
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use granule_types::host::HostFacts;

use crate::{
    command::{CommandError, quote, tail},
    host::{
        emulator::Boot,
        guest_init,
        initramfs::{self, Initramfs},
        job::{
            ENDING_FRAME, FACTS_PATH, FOREIGN_PATH, JOB_PATH, RESULTS_FRAME, STDERR_FRAME,
            STDOUT_FRAME, receive,
        },
    },
    jobs::{
        counts::{CountError, check_turns, read_segments},
        guest::Guest,
        matrix::PlannedJob,
        outcome::{JobError, JobOutcome, any_splat, oops},
    },
    kernel::Kernel,
    shell::{self, Shell},
};

/// Executes jobs; the properties that all jobs of a run share.
#[derive(Debug, Clone)]
pub struct Executor {
    /// QEMU's program for arm64.
    pub qemu: PathBuf,
    /// The static arm64 `granule`.
    pub init: PathBuf,
    /// The counting plugin.
    pub plugin: PathBuf,
    /// Version of the emulator.
    pub emulator: String,
    /// Real time after which an emulator is terminated.
    pub deadline: Duration,
    /// `true` if a job fails by any splat on its console.
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
        let boot = self.boot(kernel, job, directory);
        let command = boot.command();
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
        let contents = Contents { init: &self.init, kernel, job, job_text, facts_text };
        if shell.is_dry() {
            contents.print(shell, directory, &boot.initramfs)?;
            shell.run(&command)?;
            return Ok(None);
        }
        shell.write(&directory.join("job.json"), &contents.job_text)?;
        shell.write(&directory.join("facts.json"), &contents.facts_text)?;
        contents.pack(&boot.initramfs)?;
        shell.write(&directory.join("command"), format!("{command}\n"))?;
        let ended = shell.run(&command);
        // The archive is large, and its inputs are still available.
        let _ = fs::remove_file(&boot.initramfs);
        self.collect(&boot, directory, ended).map(Some)
    }

    fn boot(&self, kernel: &Kernel, job: &PlannedJob, directory: &Path) -> Boot {
        Boot {
            qemu: self.qemu.clone(),
            hardware: job.hardware.clone(),
            image: kernel.image.clone(),
            initramfs: directory.join("initramfs.cpio"),
            append: job.append.clone(),
            console: directory.join("console.log"),
            log: directory.join("emulator.log"),
            plugin: self.plugin.clone(),
            counts: directory.join("counts.jsonl"),
            functions: kernel.functions.clone(),
            instructions: job.guest.is_some(),
            seed: job.job.seed,
            deadline: self.deadline,
        }
    }

    /// Collects the outcome of a boot.
    fn collect(
        &self,
        boot: &Boot,
        directory: &Path,
        ended: Result<(), CommandError>,
    ) -> Result<JobOutcome, JobError> {
        let console = &boot.console;
        let bytes = fs::read(console).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let strict = || any_splat(&text).filter(|_| self.strict);
        if let Some((event, splat)) = oops(&text)
            .map(|splat| ("crashed", splat))
            .or_else(|| Some(("printed a splat", strict()?)))
        {
            return Err(JobError::Splat { event, console: console.clone(), splat });
        }
        match ended {
            // The reason is on the console, not in the emulator's log.
            Err(CommandError::Deadline { task, seconds, .. }) => {
                return Err(JobError::Command(CommandError::Deadline {
                    task,
                    seconds,
                    log: console.clone(),
                    tail: tail(console),
                }));
            }
            other => other?,
        }
        let frames = receive(&bytes)
            .map_err(|source| JobError::Frame { console: console.clone(), source })?;
        for (frame, file) in
            [(STDOUT_FRAME, "stdout"), (STDERR_FRAME, "stderr"), (RESULTS_FRAME, "raw.jsonl")]
        {
            if let Some(payload) = frames.get(frame) {
                let path = directory.join(file);
                fs::write(&path, payload).map_err(|e| CommandError::file("write", path, e))?;
            }
        }
        let Some(ending) = frames.get(ENDING_FRAME) else {
            return Err(JobError::NoEnding { console: console.clone(), tail: tail(console) });
        };
        let ending = serde_json::from_slice(ending).map_err(JobError::Ending)?;
        let counts = &boot.counts;
        let counts = fs::read_to_string(counts)
            .map_err(|source| CountError::Missing { path: counts.clone(), source })?;
        let segments = read_segments(&counts)?;
        check_turns(&segments, boot.hardware.longest_wait())?;
        Ok(JobOutcome::new(ending, frames, segments))
    }
}

/// Contents of an initramfs.
struct Contents<'a> {
    init: &'a Path,
    kernel: &'a Kernel,
    job: &'a PlannedJob,
    job_text: String,
    facts_text: String,
}

impl Contents<'_> {
    fn has_own_guest(&self) -> bool {
        self.job.guest == Some(Guest::Own)
    }

    /// Writes the archive.
    fn pack(&self, initramfs: &Path) -> Result<(), CommandError> {
        let init = shell::read(self.init)?;
        let foreign = self.job.foreign.as_deref().map(shell::read).transpose()?;
        let own_guest = self.has_own_guest();
        let image = own_guest.then(|| shell::read(&self.kernel.image)).transpose()?;
        let files = self.job.guest.iter().flat_map(Guest::files);
        let files = files
            .map(|(file, path)| Ok((shell::read(&file)?, path)))
            .collect::<Result<Vec<_>, CommandError>>()?;
        let pack = || -> io::Result<()> {
            let mut archive = Initramfs::new(Vec::new())?;
            archive.program("/init", &init)?;
            if let Some(image) = image {
                archive.file(Guest::IMAGE, &image)?;
                let mut inner = Initramfs::new(Vec::new())?;
                inner.program("/init", &init)?;
                inner.file(guest_init::MARKER, b"")?;
                archive.file(Guest::INITRD, &inner.finish()?)?;
            }
            for (content, path) in &files {
                archive.file(path, content)?;
            }
            if let Some(foreign) = foreign {
                archive.program(FOREIGN_PATH, &foreign)?;
            }
            archive.file(JOB_PATH, self.job_text.as_bytes())?;
            archive.file(FACTS_PATH, self.facts_text.as_bytes())?;
            initramfs::write_sparse(&archive.finish()?, initramfs)
        };
        pack().map_err(|e| CommandError::file("write", initramfs, e))
    }

    /// Prints how to build an equivalent archive from a directory.
    fn print(&self, shell: Shell, directory: &Path, initramfs: &Path) -> Result<(), CommandError> {
        let root = directory.join("initramfs");
        let create_dirs = |root: &Path| {
            ["dev", "proc", "sys", "tmp"]
                .iter()
                .try_for_each(|name| shell.create_dir(&root.join(name)))
        };
        create_dirs(&root)?;
        shell.copy(self.init, &root.join("init"))?;
        if let Some(program) = &self.job.foreign {
            shell.copy(program, &root.join("test"))?;
        }
        if self.has_own_guest() {
            let guest = root.join("guest");
            create_dirs(&guest)?;
            shell.copy(self.init, &guest.join("init"))?;
            shell.write(&guest.join("guest"), "")?;
            shell.print(format_args!(
                "(cd {} && find . | LC_ALL=C sort | cpio -o -H newc -R 0:0) >{}",
                quote(&guest),
                quote(root.join("guest.cpio"))
            ));
            shell.copy(&self.kernel.image, &root.join("guest.image"))?;
        }
        for (file, path) in self.job.guest.iter().flat_map(Guest::files) {
            shell.copy(&file, &root.join(path.trim_start_matches('/')))?;
        }
        shell.write(&root.join("job.json"), &self.job_text)?;
        shell.write(&root.join("facts.json"), &self.facts_text)?;
        shell.print(format_args!(
            "(cd {} && find . | LC_ALL=C sort | cpio -o -H newc --reproducible -R 0:0) >{}",
            quote(&root),
            quote(initramfs)
        ));
        Ok(())
    }
}
