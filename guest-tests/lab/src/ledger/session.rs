// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Measures the kernels of a ledger one after the other.

use std::{fs, path::Path};

use super::{
    LedgerOptions,
    file::LedgerFile,
    line::{Key, Line, Origin, Outcome, SCHEMA, figures},
    matrix,
    release::Release,
};
use crate::{
    error::{LabError, with_causes},
    file_lock::FileLock,
    jobs::{JobQueue, execute::Executor, matrix::PlannedJob, run_directory::RunDirectory},
    kernel::{
        build::KernelBuilder,
        lock_cache,
        recipe::Recipe,
        revisions::{Commit, UserTree},
        source_package::known_suite,
        sources::Source,
        toolchain::environment_remark,
    },
    measure::{self, Measurement},
    options::{Paths, RunPath},
    progress::Progress,
    shell::{Shell, absolute, sha256},
    values::LinuxVersion,
};

/// Empty file in the run directory of a ledger.
const MARKER: &str = ".ledger";

/// Kernel that a command requests.
#[derive(Debug, Clone)]
pub enum Request {
    Package(LinuxVersion),
    Revision { text: String, commit: Commit },
}

impl Request {
    /// Returns the requested kernels in order, after a look-up of all revisions.
    pub fn all(options: &LedgerOptions) -> Result<Vec<Self>, LabError> {
        let mut requests: Vec<Self> = options.base.iter().copied().map(Self::Package).collect();
        if let Some(tree) = &options.git {
            let tree = absolute(tree)?;
            for text in &options.revisions {
                let commit = UserTree(&tree).commit(text)?;
                requests.push(Self::Revision { text: text.clone(), commit });
            }
        }
        Ok(requests)
    }

    fn text(&self) -> String {
        match self {
            Self::Package(version) => version.to_string(),
            Self::Revision { text, .. } => text.clone(),
        }
    }
}

/// A run of the matrix on several kernels.
#[derive(Debug)]
pub struct Session<'a> {
    options: &'a LedgerOptions,
    shell: Shell,
    paths: Paths,
    progress: Progress,
    executor: Executor,
    jobs: Vec<PlannedJob>,
    /// Hash of the arm64 `granule` and the counting plugin.
    program: String,
    /// Directory of this run and its lock, created for the first kernel that is measured.
    run_directory: Option<(RunDirectory, Option<FileLock>)>,
}

/// Returns the start of the digest of the programs that run in the host. A program that cannot be read,
/// as in a dry run, is empty.
fn digest_of_programs(executor: &Executor) -> String {
    let programs = [&executor.init, &executor.plugin];
    let bytes = programs.map(|program| fs::read(program).unwrap_or_default()).concat();
    sha256(&bytes)[..16].to_owned()
}

impl<'a> Session<'a> {
    pub fn new(options: &'a LedgerOptions) -> Result<Self, LabError> {
        let common = options.serial.common(None);
        let mut paths = Paths::new(&common)?;
        match &paths.out {
            RunPath::Given(path) if is_of_ledger(path) => {}
            RunPath::Given(path) => {
                RunDirectory::check_unused(Shell::new(options.serial.output.dry_run), path)?;
            }
            RunPath::Numbered(_) => {
                paths.out = RunPath::Numbered(absolute("lab-runs/ledger".as_ref())?);
            }
        }
        let shell = Shell::new(options.serial.output.dry_run);
        let executor = Executor::new(shell, (&common, None), &paths)?;
        let progress = Progress::new(options.serial.output.dry_run);
        environment_remark().iter().for_each(|remark| progress.print_note(remark));
        let program = digest_of_programs(&executor);
        Ok(Self {
            options,
            shell,
            progress,
            executor,
            jobs: matrix::jobs(&common)?,
            program,
            run_directory: None,
            paths,
        })
    }

    pub fn finish(&self) {
        self.progress.finish();
        if let Some((run_directory, _)) =
            self.run_directory.as_ref().filter(|_| !self.shell.is_dry_run())
        {
            eprintln!("lab: run directory: {}", run_directory.path().display());
        }
    }

    /// Returns the line of a kernel: the one of the ledger if it has figures, otherwise the result
    /// of a measurement. Returns `None` in a dry run.
    pub fn line(&mut self, request: &Request, file: &LedgerFile) -> Result<Option<Line>, LabError> {
        let text = request.text();
        self.progress.start_stage(format!("source of {text}"));
        let (source, origin, recipe) = self.open(request)?;
        let makefile = match recipe.tree.is_placeholder() {
            true => String::new(),
            false => source.repository.read_file(&recipe.tree, "Makefile")?,
        };
        let key = self.key(&source, &recipe)?;
        if let Some(known) = file.find(&key).filter(|line| line.is_measured()) {
            self.progress.print_note(&format!("{text}: the ledger has its figures"));
            return Ok(Some(known.clone()));
        }
        self.progress.start_stage(format!("kernel of {text}"));
        let (image_sha256, outcome) = match self.measure(&source, &recipe)? {
            None => return Ok(None),
            Some(measured) => measured,
        };
        let linux = Release::of_makefile(&makefile).ok_or_else(|| {
            LabError::Unusable(format!("{text} is no Linux source: its Makefile has no version"))
        })?;
        Ok(Some(Line {
            schema: SCHEMA.to_owned(),
            revision: text,
            origin,
            linux,
            key,
            granule: env!("CARGO_PKG_VERSION").to_owned(),
            image_sha256,
            outcome,
        }))
    }

    fn open(&self, request: &Request) -> Result<(Source, Origin, Recipe), LabError> {
        let _lock = lock_cache(self.shell, &self.paths.cache)?;
        let cache = &self.paths.cache;
        match request {
            Request::Package(version) => {
                let suite = self.options.suite.as_deref();
                let suite = suite.filter(|_| known_suite(&version.to_string()).is_none());
                let source = Source::open_package(self.shell, cache, *version, suite)?;
                let name = format!("linux-{version}");
                let recipe = Recipe { name, ..Recipe::of_base(source.base.clone()) };
                let package = source.description.trim_end_matches("_all.deb").replace('_', " ");
                Ok((source, Origin::Package(package), recipe))
            }
            Request::Revision { commit, .. } => {
                let tree = self.options.git.as_deref().unwrap_or("".as_ref());
                let source = Source::open_git(self.shell, cache, tree, commit.tree.clone())?;
                let recipe = Recipe::of_commit(commit.short_hash().to_owned(), commit.clone());
                Ok((source, Origin::Commit(commit.hash.clone()), recipe))
            }
        }
    }

    fn key(&self, source: &Source, recipe: &Recipe) -> Result<Key, LabError> {
        let builder =
            KernelBuilder::new(self.shell, &self.paths, source, &self.options.serial.build)?;
        let build = builder.plan(recipe)?;
        Ok(Key {
            matrix: matrix::NAME.to_owned(),
            tree: recipe.tree.to_string(),
            compiler: build.compiler().to_owned(),
            configuration: build.settings().to_owned(),
            emulator: self.executor.emulator_version.clone(),
            machines: self.jobs.iter().map(|job| job.machine.describe()).collect(),
            program: self.program.clone(),
        })
    }

    /// Builds and measures a kernel. Returns the hash of its image and the outcome, or `None` in a
    /// dry run.
    fn measure(
        &mut self,
        source: &Source,
        recipe: &Recipe,
    ) -> Result<Option<(Option<String>, Outcome)>, LabError> {
        let build = &self.options.serial.build;
        let built = measure::build(self.shell, &self.paths, source, build, recipe, &self.progress)?;
        let kernel = match built {
            Ok(kernel) => kernel,
            Err(error) => {
                let text = with_causes(&error);
                self.progress.print_note(&text);
                let reason = format!("does not build: {}", reason(&text));
                return Ok(Some((None, Outcome::Failure(reason))));
            }
        };
        let open = match self.run_directory.take() {
            Some(open) => open,
            None => {
                let open = open_run_directory(self.shell, &self.paths.out)?;
                self.executor.copy_programs(self.shell, &open.0)?;
                if !self.shell.is_dry_run() && digest_of_programs(&self.executor) != self.program {
                    let text = "the lab's programs were built again meanwhile: run this again";
                    return Err(LabError::Unusable(text.to_owned()));
                }
                open
            }
        };
        let (run_directory, _) = self.run_directory.insert(open);
        let queue = JobQueue {
            executor: &self.executor,
            shell: self.shell,
            progress: &self.progress,
            run_directory,
            emulator_count: self.options.serial.host.emulator_count(),
        };
        let Some(Measurement { records, failures }) =
            measure::measure(&queue, &kernel, &self.paths.cache, &self.jobs)?
        else {
            return Ok(None);
        };
        let outcome = match failures.first() {
            Some(failed) => Outcome::Failure(format!("{}: {}", failed.job, reason(&failed.error))),
            None => Outcome::Results(figures(&records, &kernel.functions)),
        };
        Ok(Some((Some(kernel.image_sha256), outcome)))
    }
}

/// Reports whether a run directory is that of a ledger, whose jobs have their inputs in their outcomes.
fn is_of_ledger(path: &Path) -> bool {
    path.join(MARKER).is_file()
}

/// Creates the directory of a run, or opens that of an earlier one, and locks it unless the run is dry.
fn open_run_directory(
    shell: Shell,
    path: &RunPath,
) -> Result<(RunDirectory, Option<FileLock>), LabError> {
    let run_directory = match path {
        RunPath::Given(path) if is_of_ledger(path) => RunDirectory::of_path(path),
        path => RunDirectory::create(shell, path)?,
    };
    let lock = (!shell.is_dry_run()).then(|| run_directory.lock()).transpose()?;
    shell.write(&run_directory.path().join(MARKER), "")?;
    Ok((run_directory, lock))
}

/// Returns the event of an error and its first detail in one line, without paths of this machine.
fn reason(error: &str) -> String {
    const DETAILS: [&str; 6] = ["error:", "Error ", "panic", "BUG", "WARNING", "Unable to handle"];
    let mut lines = error.lines().map(|line| line.trim().trim_start_matches("because: "));
    let end = |line: &str| ["; log: ", "; console: "].iter().find_map(|mark| line.find(mark));
    let first = error.lines().next().unwrap_or_default();
    let Some((event, end)) = lines.find_map(|line| Some((line, end(line)?))) else {
        return first.trim().to_owned();
    };
    let event = &event[..end];
    let detail = lines.find(|line| DETAILS.iter().any(|word| line.contains(word)));
    match detail {
        // A compiler prints the absolute path of a file in the work tree of the cache.
        Some(detail) => {
            let detail = detail.rsplit_once("/tree/").map_or(detail, |(_, rest)| rest);
            format!("{event}: {detail}")
        }
        None => event.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_run_directory_of_an_interrupted_ledger_is_used_again() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("run");
        let open = || open_run_directory(Shell::new(false), &RunPath::Given(path.clone()));

        let first = open().unwrap();
        fs::create_dir(path.join("linux-5.10")).unwrap();
        let while_locked = open().unwrap_err().to_string();
        drop(first);

        assert!(while_locked.contains("another process"), "{while_locked}");
        assert_eq!(open().unwrap().0.path(), path);
        fs::remove_file(path.join(MARKER)).unwrap();
        assert!(with_causes(&open().unwrap_err()).contains("not empty"));
    }

    #[test]
    fn a_reason_has_the_event_and_its_detail_without_paths() {
        for (error, expected) in [
            (
                "cannot build the kernel 'x'\n  because: compiling failed (exit status: 2); log: \
                 /c/build.log\n  CC  mmu.o\n  /c/tree/arch/arm64/kvm/mmu.c:1:2: error: bad",
                "compiling failed (exit status: 2): arch/arm64/kvm/mmu.c:1:2: error: bad",
            ),
            (
                "the host ended without a report of PID 1; console: /r/console.log\n  [ 0.0] Boot",
                "the host ended without a report of PID 1",
            ),
            ("not run: this kernel does not boot", "not run: this kernel does not boot"),
            (
                "the host kernel crashed; console: /r/c\n  [ 1.0] Kernel panic - not syncing: x",
                "the host kernel crashed: [ 1.0] Kernel panic - not syncing: x",
            ),
        ] {
            assert_eq!(reason(error), expected);
        }
    }
}
