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

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use granule_types::{host::HostFacts, units::Bytes};

use crate::{
    command::{Command, CommandError, log_tail},
    error::LabError,
    host::{
        emulator::{self, kernel_command_line, path_option},
        guest_init,
        hold::{GdbSocket, HoldError, ResolvedHold},
        initramfs::{self, ArchiveEntry},
        job::{FACTS_PATH, JOB_PATH, KERNEL_TEST_PATH, receive_report},
        program::Program,
    },
    jobs::{
        JobResult, boot,
        counts::{CountError, check_waits, read_segments},
        guest::LinuxGuest,
        matrix::{self, PlannedJob},
        observed_kernel::ObservedKernel,
        outcome::{JobError, JobOutcome, find_oops, find_splat, find_unknown_parameter},
        outcome_file::{Failure, OutcomeFile},
        run_directory::RunDirectory,
    },
    kernel::{Kernel, image::function_address},
    observing_emulator::find_observing_emulator,
    options::{CheckOptions, CommonOptions, DEFAULT_QEMU, DefaultPrograms, Paths, Rodata},
    shell::{self, FileHashes, Shell, sha256},
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
        let guest_text = guest_text(job)?;
        let contents = self.initramfs_contents(kernel, job, &job_text, &facts_text, &guest_text);
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

    /// Returns the hash of everything that the results of a job depend on.
    pub fn inputs(&self, kernel: &Kernel, job: &PlannedJob) -> Result<String, CommandError> {
        let (job_text, facts_text) = self.texts(kernel, job)?;
        let plugin = job.machine.plugin_option(Path::new(""), Path::new(""));
        let text = format!(
            "{job_text}\n{facts_text}\n{:?}\n{:?}\n{plugin}\n{:?}\n{}\n{}",
            self.job_inputs(job)?,
            job.program,
            kernel.functions,
            job.kernel_parameters,
            self.fails_on_splat
        );
        let text = match &self.check {
            // The findings depend on the checker, which is in this program. The link refers to it
            // even after it was rebuilt.
            Some(check) => {
                let program = Path::new("/proc/self/exe");
                format!("{text}\n{check:?} {}", self.hashes.sha256(program)?)
            }
            None => text,
        };
        let measured = job.guest.as_ref().and_then(|guest| guest.paging_function);
        let text = measured.map_or_else(|| text.clone(), |address| format!("{text}\n{address:x}"));
        Ok(sha256(text.as_bytes()))
    }

    /// Returns the SHA-256 of each input of a job, except for the kernel; `None` for a missing file.
    pub fn job_inputs(
        &self,
        job: &PlannedJob,
    ) -> Result<BTreeMap<String, Option<String>>, CommandError> {
        let text = serde_json::to_string(&job.job).map_err(unserializable)?;
        let mut inputs = BTreeMap::from([("job".to_owned(), Some(sha256(text.as_bytes())))]);
        let guest = job.guest.iter().flat_map(|guest| &guest.files);
        let files = [("init", &self.init), ("plugin", &self.plugin)]
            .into_iter()
            .chain(job.kernel_test.iter().map(|test| ("test", test)))
            .chain(job.program.iter().flat_map(|run| run.program.sources()))
            .chain(job.vmm.iter().flat_map(Program::sources))
            .chain(guest.map(|(file, path)| (*path, file)));
        for (name, file) in files {
            let hash = file.is_file().then(|| self.hashes.sha256(file)).transpose()?;
            inputs.insert(name.to_owned(), hash);
        }
        Ok(inputs)
    }

    /// Returns the contents of `job.json` and `facts.json`.
    fn texts(&self, kernel: &Kernel, job: &PlannedJob) -> Result<(String, String), CommandError> {
        let facts = HostFacts {
            series: kernel.series.clone(),
            commit: kernel.commit.clone(),
            compiler: kernel.compiler.clone(),
            image_sha256: Some(kernel.image_sha256.clone()),
            emulator: Some(format!("{} {}", self.emulator_version, job.machine.describe())),
            cpu: Some(job.machine.cpu.clone()),
            ..HostFacts::default()
        };
        let job = serde_json::to_string(&job.job).map_err(unserializable)?;
        Ok((job, serde_json::to_string(&facts).map_err(unserializable)?))
    }

    /// Returns the command of the emulator with additional arguments of the plugin.
    fn command(
        &self,
        (kernel, job): (&Kernel, &PlannedJob),
        directory: &Path,
        observed: Option<&ObservedKernel>,
        plugin_arguments: &str,
    ) -> Command {
        let machine = &job.machine;
        let mut plugin = machine.plugin_option(&self.plugin, &directory.join(COUNTS_FILE));
        plugin += &format!(",seed={}", job.job.seed);
        if job.boot.is_some() || job.zap().is_some() {
            plugin += ",instructions=on,stores=on,barriers=on";
        } else if job.guest.is_some() && job.program.is_none() {
            plugin += ",instructions=on";
        }
        plugin += plugin_arguments;
        for (name, address) in &kernel.functions {
            plugin += &format!(",at={name}:{address:x}");
        }
        if let Some(observed) = observed {
            plugin += &observed.plugin_arguments(directory);
        }
        let console = path_option("file,id=console,path=", &directory.join(CONSOLE_FILE));
        machine
            .emulator(&self.qemu)
            .args(["-chardev", &console, "-serial", "chardev:console", "-plugin", &plugin])
            .arg("-kernel")
            .arg(&kernel.image)
            .arg("-initrd")
            .arg(directory.join(INITRAMFS_FILE))
            .args(["-append", &kernel_command_line(&job.kernel_parameters)])
            .log(directory.join("emulator.log"))
            .deadline(self.deadline)
    }

    fn initramfs_contents<'a>(
        &self,
        kernel: &Kernel,
        job: &PlannedJob,
        job_text: &'a str,
        facts_text: &'a str,
        guest_text: &'a str,
    ) -> Vec<ArchiveEntry<'a>> {
        let init = || ArchiveEntry::program("/init", &self.init);
        let mut contents = vec![init()];
        if job.guest.as_ref().is_some_and(|guest| guest.files.is_empty()) {
            let mut inner = vec![init()];
            inner.extend(job.program.iter().flat_map(|run| run.program.entries()));
            inner.push(ArchiveEntry::text(guest_init::MARKER_PATH, guest_text));
            contents.push(ArchiveEntry::file(LinuxGuest::IMAGE_PATH, &kernel.image));
            contents.push(ArchiveEntry::archive(LinuxGuest::INITRD_PATH, inner));
        }
        for (file, path) in job.guest.iter().flat_map(|guest| &guest.files) {
            contents.push(ArchiveEntry::file(*path, file));
        }
        if let (Some(run), None) = (&job.program, &job.guest) {
            contents.extend(run.program.entries());
        }
        contents.extend(job.vmm.iter().flat_map(Program::entries));
        contents.extend(
            job.kernel_test.iter().map(|test| ArchiveEntry::program(KERNEL_TEST_PATH, test)),
        );
        contents.push(ArchiveEntry::text(JOB_PATH, job_text));
        contents.push(ArchiveEntry::text(FACTS_PATH, facts_text));
        contents
    }

    fn collect_outcome(
        &self,
        job: &PlannedJob,
        directory: &Path,
        ended: Result<(), CommandError>,
    ) -> Result<JobOutcome, JobError> {
        let console = directory.join(CONSOLE_FILE);
        let bytes = fs::read(&console).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        if let Some(boot) = job.boot
            && text.contains(&format!("Invalid option string for rodata: '{}'", boot.rodata))
            && boot.rodata != Rodata::Full
        {
            return Err(JobError::UnknownRodata(boot.rodata));
        }
        if let Some(parameter) = find_unknown_parameter(&text, &job.kernel_parameters) {
            return Err(JobError::UnknownParameter(parameter));
        }
        let splat_if_fatal = || find_splat(&text).filter(|_| self.fails_on_splat);
        if let Some((event, splat)) = find_oops(&text)
            .map(|splat| ("crashed", splat))
            .or_else(|| Some(("printed a splat", splat_if_fatal()?)))
        {
            return Err(JobError::Splat { machine: "host", event, console, splat });
        }
        match ended {
            // The console shows the reason, not the emulator's log.
            Err(CommandError::Deadline { task, seconds, .. }) => {
                let tail = log_tail(&console);
                let error = CommandError::Deadline { task, seconds, log: Some(console), tail };
                return Err(JobError::Command(error));
            }
            other => other?,
        }
        let report = match receive_report(&text) {
            Ok(Some(report)) => report,
            Ok(None) => return Err(JobError::NoReport { tail: log_tail(&console), console }),
            Err(source) => return Err(JobError::Report { console, source }),
        };
        for (file, content) in
            [("stdout", &report.stdout), ("stderr", &report.stderr), ("raw.jsonl", &report.results)]
        {
            let path = directory.join(file);
            fs::write(&path, content).map_err(|e| CommandError::file("write", path, e))?;
        }
        let in_guest = self.fails_on_splat && job.guest.is_some();
        if let Some(splat) = in_guest.then(|| find_splat(&report.stdout)).flatten() {
            let (machine, event, console) = ("guest", "printed a splat", directory.join("stdout"));
            return Err(JobError::Splat { machine, event, console, splat });
        }
        if self.check.is_some() {
            return Ok(JobOutcome { report, segments: Vec::new() });
        }
        let path = directory.join(COUNTS_FILE);
        let counts =
            fs::read_to_string(&path).map_err(|source| CountError::Missing { path, source })?;
        let segments = read_segments(&counts)?;
        check_waits(&segments, job.machine.max_wait())?;
        Ok(JobOutcome { report, segments })
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

/// Returns the content of the file that identifies the initramfs of a guest.
fn guest_text(job: &PlannedJob) -> Result<String, CommandError> {
    if job.guest.as_ref().is_some_and(|guest| guest.reports_kernel_tables) {
        return Ok(guest_init::KERNEL_TABLES.to_owned());
    }
    if job.vmm.is_some() {
        return Ok(guest_init::MARKED_INIT.to_owned());
    }
    let program = job.program.as_ref().map(|run| serde_json::to_string(&run.argv));
    Ok(program.transpose().map_err(unserializable)?.unwrap_or_default())
}

fn unserializable(error: serde_json::Error) -> CommandError {
    CommandError::file("write", "job.json", error.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{error::with_causes, jobs::matrix::tests::options, values::PageSize};

    fn executor() -> Executor {
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
