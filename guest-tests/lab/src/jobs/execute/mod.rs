// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Executes a job on a kernel: packs the initramfs, boots the host, collects results and counts.
//!
//! All files remain in the job's directory, also after an error:
//!
//! | file | contents |
//! |---|---|
//! | `command` | command line of the emulator, as shell |
//! | `job.json`, `facts.json` | input of PID 1 |
//! | `console.log` | console |
//! | `emulator.log` | QEMU's own messages |
//! | `counts.jsonl` | segments of the plugin |
//! | `stdout`, `stderr`, `raw.jsonl` | output and results of the test |
//! | `defects.jsonl`, `trace.gz` | findings of a checked job, and its trace if it is kept |
//! | `outcome.json` | written last: the job ended |
//!
//! ```text
//! mod ─┬─ inputs            hashes of the inputs, job.json, facts.json
//!      ├─ emulator_command  command of the emulator and its plugin
//!      ├─ archive           contents of the initramfs
//!      └─ collect           outcome of the boot
//! ```

mod archive;
mod collect;
mod emulator_command;
mod inputs;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use granule_types::units::Bytes;

use self::archive::guest_text;
use crate::{
    command::CommandError,
    error::LabError,
    host::{
        emulator,
        hold::{GdbSocket, HoldError, ResolvedHold},
        initramfs,
    },
    jobs::{
        JobResult, boot,
        matrix::{self, PlannedJob},
        observed_kernel::ObservedKernel,
        outcome::{JobError, JobOutcome},
        outcome_file::{Failure, OutcomeFile},
        run_directory::RunDirectory,
    },
    kernel::{Kernel, image::function_address},
    observing_emulator::find_observing_emulator,
    options::{CheckOptions, CommonOptions, DEFAULT_QEMU, DefaultPrograms, Paths},
    shell::{self, FileHashes, Shell},
};

const CONSOLE_FILE: &str = "console.log";
const COUNTS_FILE: &str = "counts.jsonl";
const INITRAMFS_FILE: &str = "initramfs.cpio";

/// Executor of jobs, with the properties that all jobs of a run share.
#[derive(Debug)]
pub struct Executor {
    pub qemu: PathBuf,
    pub init: PathBuf,
    pub plugin: PathBuf,
    pub emulator_version: String,
    /// Real time after which an emulator is terminated.
    pub deadline: Duration,
    /// Indicates that any splat on the console fails the job.
    pub fails_on_splat: bool,
    /// Checks of the stage-2 tables, which take the place of counts.
    pub check: Option<CheckOptions>,
    pub hashes: FileHashes,
}

impl Executor {
    /// Returns the executor of a run, after a check of its programs. A dry run and a plan require
    /// only the programs that options name.
    pub fn new(
        shell: Shell,
        (options, check): (&CommonOptions, Option<&CheckOptions>),
        paths: &Paths,
    ) -> Result<Self, LabError> {
        let CommonOptions { kernels, host, .. } = options;
        let dry = shell.is_dry_run();
        check_programs(paths, dry)?;
        let qemu = match check {
            Some(_) => find_observing_emulator(shell, &paths.cache, &host.qemu)?,
            None => host.qemu.clone(),
        };
        let emulator_version = match emulator::version(&qemu) {
            Err(_) if dry && host.qemu == Path::new(DEFAULT_QEMU) => "QEMU".to_owned(),
            version => {
                let version = version.map_err(|error| {
                    LabError::Unusable(format!("--qemu {}: {error}", qemu.display()))
                })?;
                let machine = matrix::machine(host, 1, Bytes::mib(64));
                let plugin = Some(paths.plugin.as_path()).filter(|path| path.is_file());
                emulator::probe(&qemu, &machine, plugin)?;
                version
            }
        };
        Ok(Self {
            qemu,
            init: paths.init.clone(),
            plugin: paths.plugin.clone(),
            emulator_version,
            deadline: Duration::from_secs(host.deadline),
            fails_on_splat: kernels.build.debug_kernel,
            check: check.cloned(),
            hashes: FileHashes::default(),
        })
    }

    /// Copies the programs to the directory of a run, whose jobs use the copies.
    pub fn copy_programs(
        &mut self,
        shell: Shell,
        run_directory: &RunDirectory,
    ) -> Result<(), CommandError> {
        for program in [&mut self.init, &mut self.plugin] {
            *program = run_directory.copy_program(shell, program)?;
        }
        Ok(())
    }

    /// Uses the copies of the programs that an earlier process has made.
    pub fn use_copied_programs(&mut self, run_directory: &RunDirectory) {
        run_directory.use_copies([&mut self.init, &mut self.plugin]);
    }

    /// Executes a job in a directory, whose contents are removed, and records its result. Returns
    /// `None` in a dry run.
    pub fn run(
        &self,
        shell: Shell,
        kernel: &Kernel,
        job: &PlannedJob,
        directory: &Path,
    ) -> Result<Option<JobOutcome>, JobError> {
        if directory.exists() {
            shell.remove_dir(directory)?;
        }
        shell.create_dir(directory)?;
        let result = self.boot(shell, kernel, job, directory);
        if !shell.is_dry_run() {
            OutcomeFile::of_result(self.inputs(kernel, job)?, &result).write(directory)?;
        }
        result
    }

    /// Boots the host of a job in an empty directory. Returns `None` in a dry run.
    fn boot(
        &self,
        shell: Shell,
        kernel: &Kernel,
        job: &PlannedJob,
        directory: &Path,
    ) -> Result<Option<JobOutcome>, JobError> {
        let observed = self
            .check
            .as_ref()
            .map(|check| ObservedKernel::open(kernel, check.kernel()))
            .transpose()?;
        let socket = job.machine.hold.as_ref().map(|_| GdbSocket::new(shell.is_dry_run()));
        let socket = socket.transpose().map_err(HoldError::from)?;
        let addresses = match boot::address_arguments(kernel, job) {
            Err(_) if shell.is_dry_run() => String::new(),
            arguments => arguments?,
        };
        let mut command = self.command((kernel, job), directory, observed.as_ref(), &addresses);
        if let Some(socket) = &socket {
            command = command.args(socket.emulator_arguments());
        }
        let (job_text, facts_text) = self.texts(kernel, job)?;
        let archive = directory.join(INITRAMFS_FILE);
        let guest_text = guest_text(&job.work)?;
        let texts = (job_text.as_str(), facts_text.as_str());
        let contents = self.initramfs_contents(kernel, job, texts, &guest_text);
        if shell.is_dry_run() {
            initramfs::print_commands(shell, &contents, &directory.join("initramfs"), &archive)?;
            shell.run(&command)?;
            return Ok(None);
        }
        let hold = resolve_hold(kernel, job)?;
        shell.write(&directory.join("job.json"), &job_text)?;
        shell.write(&directory.join("facts.json"), &facts_text)?;
        let packed = initramfs::pack(&contents)?;
        initramfs::write_sparse(&packed, &archive)
            .map_err(|e| CommandError::file("write", &archive, e))?;
        drop(packed);
        shell.write(&directory.join("command"), format!("{command}\n"))?;
        let run = || match (&hold, &socket) {
            (Some(hold), Some(socket)) => hold.run(socket, || shell.run(&command)),
            _ => (shell.run(&command), Ok(())),
        };
        let (ended, held) = match (&self.check, &observed) {
            (Some(check), Some(observed)) => observed.run(job, directory, check.keep_trace, run)?,
            _ => run(),
        };
        // The archive is large and can be rebuilt from its inputs.
        let _ = fs::remove_file(&archive);
        let has_succeeded = ended.is_ok();
        let mut result = self.collect_outcome(job, directory, ended);
        // A hold that failed ends the host without a report; a failed emulator ends the hold.
        if let (true, Err(error)) = (has_succeeded, held) {
            result = Err(error.into());
        }
        result.map(Some)
    }

    /// Returns the recorded result of a job that ended with these inputs; `None` without one.
    pub fn recorded(
        &self,
        kernel: &Kernel,
        job: &PlannedJob,
        directory: &Path,
    ) -> Result<Option<JobResult>, CommandError> {
        let Some(outcome) = OutcomeFile::read(directory) else { return Ok(None) };
        if outcome.inputs != self.inputs(kernel, job)? {
            return Ok(None);
        }
        Ok(Some(match outcome.failure {
            None => Some(self.collect_outcome(job, directory, Ok(()))),
            Some(Failure::NoReport(message) | Failure::Error(message)) => {
                Some(Err(JobError::Recorded(message)))
            }
            Some(Failure::Skipped) => None,
        }))
    }
}

/// Checks that the required programs of this workspace exist, before the kernels are built. A dry run
/// requires only those that options name.
fn check_programs(paths: &Paths, dry: bool) -> Result<(), LabError> {
    let DefaultPrograms { init, plugin } = DefaultPrograms::new()?;
    for (program, path, option, default) in [
        ("the static arm64 `granule`", &paths.init, "--init", init),
        ("the counting plugin", &paths.plugin, "--plugin", plugin),
    ] {
        if !path.is_file() && (!dry || *path != default) {
            return Err(LabError::Unusable(format!(
                "{program} is missing at {}: run scripts/lab, which builds it, or set {option}",
                path.display()
            )));
        }
    }
    Ok(())
}

/// Returns the hold of a job, at the addresses of a kernel.
fn resolve_hold(kernel: &Kernel, job: &PlannedJob) -> Result<Option<ResolvedHold>, JobError> {
    let Some(hold) = &job.machine.hold else { return Ok(None) };
    let map = kernel.system_map.as_deref().map(shell::read).transpose()?.unwrap_or_default();
    let map = String::from_utf8_lossy(&map);
    Ok(Some(hold.resolve(|name| function_address(&map, name))?))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::{error::with_causes, jobs::matrix::tests::options, values::PageSize};

    pub fn executor() -> Executor {
        Executor {
            qemu: "/no/qemu".into(),
            init: "/no/init".into(),
            plugin: "/no/plugin".into(),
            emulator_version: "QEMU".to_owned(),
            deadline: Duration::from_secs(1),
            fails_on_splat: false,
            check: None,
            hashes: FileHashes::default(),
        }
    }

    #[test]
    fn an_error_before_the_boot_is_recorded() {
        let directory = tempfile::tempdir().unwrap();
        let job = matrix::jobs(&options("boot --memory 1G"), PageSize::Kib4, &[]).remove(0);
        let kernel = Kernel::placeholder("base".to_owned(), "/no/Image".into());
        let executor = executor();

        let error = executor.run(Shell::new(false), &kernel, &job, directory.path()).unwrap_err();

        let recorded = executor.recorded(&kernel, &job, directory.path()).unwrap().unwrap();
        assert_eq!(recorded.unwrap().unwrap_err().to_string(), with_causes(&error));
    }
}
