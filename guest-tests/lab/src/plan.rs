// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The plan of a run as JSON (`granule.lab-plan/1`): kernels, jobs and the inputs of each by hash, and
//! one command line for each step.
//!
//! ```text
//! build KERNEL ─▶ build KERNEL ─▶ job KERNEL/JOB … ─▶ collect
//! ```
//!
//! `plan.json` in the run directory describes a run that was started. `--plan` prints the plan of a
//! run and changes nothing. A step takes all inputs from the plan, so that another machine with the
//! same file system can execute it.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
};

use granule_report::command_line;
use granule_types::units::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    command::{CommandError, quote},
    error::LabError,
    jobs::{execute::Executor, matrix, matrix::PlannedJob, run_directory::RunDirectory},
    kernel::{planned::PlannedKernel, selftests::Invocation},
    options::{ExecutorKind, Options, Paths},
    report::print,
    shell::Shell,
};

const SCHEMA: &str = "granule.lab-plan/1";
const FILE: &str = "plan.json";

#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    schema: String,
    /// Command line that started the run, for reports.
    pub command: String,
    /// Directory of relative paths in `options`.
    working_directory: PathBuf,
    /// The run directory.
    pub directory: PathBuf,
    /// Version of the emulator.
    pub emulator: String,
    pub executor: ExecutorKind,
    pub kernels: Vec<PlannedKernel>,
    /// Programs to run from the kernel tree.
    pub tests: Vec<Invocation>,
    pub steps: Vec<PlannedStep>,
    pub options: Options,
}

/// A command, which executes one step of a run.
#[derive(Debug, Serialize, Deserialize)]
pub struct PlannedStep {
    pub name: String,
    pub command: String,
    /// Names of the steps that must have ended.
    after: Vec<String>,
    #[serde(flatten)]
    job: Option<JobStep>,
}

/// Requirements and inputs of a job.
#[derive(Debug, Serialize, Deserialize)]
struct JobStep {
    directory: PathBuf,
    cpus: u32,
    memory: Bytes,
    /// Git tree or SHA-256 of each input.
    inputs: BTreeMap<String, Option<String>>,
}

/// A job of a plan: indices of its kernel and of its job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobIndex {
    pub kernel: usize,
    pub job: usize,
}

impl Plan {
    /// Returns the plan of a run in `directory`, whose options are `options`. `file` is the plan's
    /// path in the commands.
    pub fn new(
        options: Options,
        kind: ExecutorKind,
        (directory, file): (&Path, &Path),
        executor: &Executor,
        (kernels, tests): (Vec<PlannedKernel>, Vec<Invocation>),
    ) -> Result<Self, LabError> {
        let mut plan = Self {
            schema: SCHEMA.to_owned(),
            command: command_line(),
            working_directory: env::current_dir()?,
            directory: directory.to_owned(),
            emulator: executor.emulator_version.clone(),
            executor: kind,
            kernels,
            tests,
            steps: Vec::new(),
            options,
        };
        plan.steps = plan.steps(file, executor)?;
        Ok(plan)
    }

    fn steps(&self, file: &Path, executor: &Executor) -> Result<Vec<PlannedStep>, LabError> {
        let program = env::current_exe()?;
        let command = |step: &str, index: &str| {
            let line = format!("{} lab step {step} --plan {}", quote(&program), quote(file));
            format!("{line} {index}").trim_end().to_owned()
        };
        let mut steps: Vec<PlannedStep> = Vec::new();
        for (index, kernel) in self.kernels.iter().enumerate().filter(|(_, one)| one.is_to_build())
        {
            steps.push(PlannedStep {
                name: format!("build {}", kernel.name),
                command: command("build", &index.to_string()),
                // Kernels of one source are built incrementally in one directory.
                after: steps.last().map(|step| step.name.clone()).into_iter().collect(),
                job: None,
            });
        }
        let built: Vec<String> = steps.last().map(|step| step.name.clone()).into_iter().collect();
        let jobs = self.jobs();
        let run_directory = RunDirectory::of_path(&self.directory);
        let mut names = Vec::new();
        for (index, JobIndex { kernel, job }) in self.job_indices(jobs.len()).enumerate() {
            let (kernel, job) = (&self.kernels[kernel], &jobs[job]);
            let mut inputs = executor.job_inputs(job)?;
            inputs.insert("kernel".to_owned(), kernel.source_hash());
            let name = format!("job {}/{}", kernel.name, job.name);
            names.push(name.clone());
            steps.push(PlannedStep {
                name,
                command: command("job", &index.to_string()),
                after: built.clone(),
                job: Some(JobStep {
                    directory: run_directory.job_path(&kernel.name, &job.name),
                    cpus: 1,
                    memory: job.machine.process_memory(),
                    inputs,
                }),
            });
        }
        let command = command("collect", "");
        steps.push(PlannedStep { name: "collect".to_owned(), command, after: names, job: None });
        Ok(steps)
    }

    /// Returns the jobs of each kernel.
    pub fn jobs(&self) -> Vec<PlannedJob> {
        let page_size = self.kernels.first().map(|kernel| kernel.page_size).unwrap_or_default();
        matrix::jobs(&self.options, page_size, &self.tests)
    }

    /// Returns all jobs in the order in which they start.
    pub fn job_indices(&self, jobs: usize) -> impl Iterator<Item = JobIndex> + use<> {
        let kernels = self.kernels.len();
        (0..jobs * kernels)
            .map(move |index| JobIndex { kernel: index % kernels, job: index / kernels })
    }

    fn text(&self) -> Result<String, LabError> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// Writes the plan to a file, or to standard output for `-`.
    pub fn write_to(&self, target: &Path) -> Result<(), LabError> {
        if self.kernels.iter().any(|kernel| kernel.is_to_build() && kernel.image.is_none()) {
            eprintln!(
                "lab: the cache does not contain the source, so the plan has no Git trees and its \
                 steps cannot be executed: `granule lab fetch` fetches the source"
            );
        }
        match target.as_os_str() == "-" {
            true => {
                let file = Self::path_in(&self.directory);
                eprintln!(
                    "lab: to execute the steps, save this plan as {}, or set --plan=FILE",
                    file.display()
                );
                print(&self.text()?)
            }
            false => Ok(Shell::new(false).write(target, self.text()?)?),
        }
    }

    /// Returns the path of the plan in a run directory.
    pub fn path_in(directory: &Path) -> PathBuf {
        directory.join(FILE)
    }

    /// Writes `plan.json` in the run directory.
    pub fn write_in(&self, run_directory: &RunDirectory) -> Result<(), LabError> {
        Ok(Shell::new(false).replace(&Self::path_in(run_directory.path()), self.text()?)?)
    }

    /// Reads a plan and changes to its working directory.
    pub fn enter(file: &Path) -> Result<Self, LabError> {
        let plan = Self::read(file)?;
        env::set_current_dir(&plan.working_directory).map_err(|error| {
            CommandError::file("change to the directory", &plan.working_directory, error)
        })?;
        granule_report::set_command_line(plan.command.clone());
        Ok(plan)
    }

    fn read(file: &Path) -> Result<Self, LabError> {
        let unusable = |reason: String| {
            LabError::Unusable(format!("{} is no plan of a run: {reason}", file.display()))
        };
        let text = fs::read_to_string(file).map_err(|error| unusable(error.to_string()))?;
        let value: Value =
            serde_json::from_str(&text).map_err(|error| unusable(error.to_string()))?;
        if value["schema"] != SCHEMA {
            return Err(unusable(format!("its schema is {}, not \"{SCHEMA}\"", value["schema"])));
        }
        serde_json::from_value(value).map_err(|error| {
            unusable(format!("it was written by another version of granule ({error})"))
        })
    }

    /// Reads the plan of the run to resume in `directory`. Its options replace `given`, except for
    /// those that have no effect on results; `given` must be equal to them, or to `defaults`.
    pub fn resume(directory: &Path, given: &Options, defaults: &Options) -> Result<Self, LabError> {
        if !Self::path_in(directory).is_file() {
            return Err(LabError::Unusable(format!(
                "--resume: {} has no run to resume, because it has no {FILE}: set --out to the \
                 directory of a run, or omit --resume",
                directory.display()
            )));
        }
        let mut plan = Self::enter(&Self::path_in(directory))?;
        let deadlines = [given, defaults].map(|options| options.common.host.deadline);
        if deadlines[0] != deadlines[1] {
            plan.options.common.host.deadline = deadlines[0];
        }
        let as_value = |options: &Options| {
            let mut options = options.clone();
            options.common.host.deadline = plan.options.common.host.deadline;
            serde_json::to_value(options)
        };
        let given_as_value = as_value(given)?;
        let differences = match given_as_value != as_value(defaults)? {
            true => differing_keys(&as_value(&plan.options)?, &given_as_value),
            false => Vec::new(),
        };
        if !differences.is_empty() {
            return Err(LabError::Unusable(format!(
                "--resume: these options differ from those of the run in {}: {}; set only --out, \
                 --resume and --deadline of granule lab without a subcommand, or start another run \
                 in another directory",
                directory.display(),
                differences.join(", ")
            )));
        }
        plan.options.take_execution_of(given);
        plan.directory = directory.to_owned();
        Ok(plan)
    }

    /// Refuses to continue this run with other kernels.
    pub fn check_kernels(&self, found: &[PlannedKernel]) -> Result<(), LabError> {
        let differs = |(planned, found): &(&PlannedKernel, &PlannedKernel)| {
            (&planned.name, &planned.tree) != (&found.name, &found.tree)
        };
        if let Some((planned, found)) = self.kernels.iter().zip(found).find(differs) {
            let tree = |kernel: &PlannedKernel| {
                format!("'{}' of tree {}", kernel.name, kernel.tree.as_deref().unwrap_or("?"))
            };
            return Err(LabError::Unusable(format!(
                "the source changed since the run in {} was planned: the kernel {} is {}; start \
                 another run",
                self.directory.display(),
                tree(planned),
                tree(found)
            )));
        }
        Ok(())
    }

    /// Returns the executor of jobs on this machine, which must have the emulator of the plan. It uses
    /// the copies of the programs that the start of the run has made.
    pub fn job_executor(&self) -> Result<Executor, LabError> {
        let mut paths = Paths::new(&self.options.common)?;
        RunDirectory::of_path(&self.directory).use_copies([&mut paths.init, &mut paths.plugin]);
        let options = (&self.options.common, self.options.check.as_ref());
        let executor = Executor::new(Shell::new(false), options, &paths)?;
        if executor.emulator_version != self.emulator {
            return Err(LabError::Unusable(format!(
                "this machine has {}, but the run was planned with {}: install the same version, or \
                 set --qemu to a program that all machines share",
                executor.emulator_version, self.emulator
            )));
        }
        Ok(executor)
    }
}

/// Returns the names of options whose values differ.
pub fn differing_keys(left: &Value, right: &Value) -> Vec<String> {
    match (left, right) {
        (Value::Object(left), Value::Object(right)) => {
            let keys: std::collections::BTreeSet<_> = left.keys().chain(right.keys()).collect();
            let of = |map: &serde_json::Map<String, Value>, key: &str| {
                map.get(key).cloned().unwrap_or(Value::Null)
            };
            let compare = |key: &String| {
                let found = differing_keys(&of(left, key), &of(right, key));
                let named = |inner: String| if inner.is_empty() { key.clone() } else { inner };
                found.into_iter().map(named).collect::<Vec<_>>()
            };
            keys.into_iter().flat_map(compare).collect()
        }
        (left, right) if left == right => Vec::new(),
        _ => vec![String::new()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::matrix::tests::options;

    /// Writes the plan of a run with these options to `directory`.
    fn write_plan(directory: &Path, line: &str) -> Options {
        let mut options = options(line);
        options.common.kernels.images = vec!["Image".into()];
        let plan = Plan {
            schema: SCHEMA.to_owned(),
            command: "granule lab".to_owned(),
            working_directory: env::current_dir().unwrap(),
            directory: directory.to_owned(),
            emulator: "QEMU".to_owned(),
            executor: ExecutorKind::Local,
            kernels: Vec::new(),
            tests: Vec::new(),
            steps: Vec::new(),
            options: options.clone(),
        };
        plan.write_in(&RunDirectory::of_path(directory)).unwrap();
        options
    }

    #[test]
    fn a_run_is_resumed_with_its_options_only() {
        let directory = tempfile::tempdir().unwrap();
        let of_run = write_plan(directory.path(), "lab -s 2m -v 8 --seeds 2 --costs kunpeng920");
        let resume = |given: &Options| Plan::resume(directory.path(), given, &options("lab"));
        let mut more_jobs = options("lab");
        more_jobs.common.host.jobs = Some(7);
        let longer = options("lab --deadline 3600");

        let same = resume(&of_run).unwrap();
        let none = resume(&more_jobs).unwrap();
        let longer = resume(&longer).unwrap();
        let other = resume(&options("lab -s 2m -v 4")).unwrap_err().to_string();

        let value = |options: &Options| serde_json::to_value(options).unwrap();
        assert_eq!(value(&same.options), value(&of_run));
        assert_eq!(value(&none.options), value(&of_run));
        assert_eq!(none.options.common.host.jobs, Some(7));
        assert_eq!(
            (longer.options.common.host.deadline, none.options.common.host.deadline),
            (3600, 900)
        );
        for name in ["vcpus", "seeds", "images", "costs"] {
            assert!(other.contains(name), "{other}");
        }
        assert!(!other.contains("backing"), "{other}");
    }

    #[test]
    fn a_directory_without_a_plan_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let resume = || Plan::resume(directory.path(), &options("lab"), &options("lab"));

        let missing = resume().unwrap_err().to_string();
        fs::write(directory.path().join(FILE), "{\"schema\": \"granule.lab-plan/9\"}").unwrap();
        let unknown = resume().unwrap_err().to_string();

        assert!(missing.contains("no run to resume"), "{missing}");
        assert!(unknown.contains("granule.lab-plan/9"), "{unknown}");
    }
}
