// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of `granule lab`: kernels, jobs on each kernel, the emulated host, output.

mod boot;
mod check;
mod execution;
mod host;
mod image;
mod kernels;
mod workload;
mod zap;

use std::{
    env, io,
    path::{Path, PathBuf, absolute},
};

use clap::{ValueEnum, builder::RangedI64ValueParser, value_parser};
use granule_report::{ComparisonOptions, FailOn, Metric, command_line};
use granule_types::{phase::Phase, units::parse_percentage};
use serde::{Deserialize, Serialize};

use crate::error::LabError;

pub use self::{
    boot::{BootMatrix, Rodata},
    check::{CheckArgs, CheckFormat, CheckOptions, FindingsOptions},
    execution::{ExecutionOptions, ExecutorKind},
    host::HostOptions,
    image::ImageOptions,
    kernels::{BuildOptions, KernelOptions, SourceOptions},
    workload::{
        GuestMatrix, Matrix, ProgramMatrix, ProgramOptions, SelftestOptions, TestProgram, Workload,
    },
    zap::ZapMatrix,
};
pub(crate) use host::DEFAULT_QEMU;
pub(crate) use workload::ProgramPlace;

/// A run: kernels, the jobs on each, and what becomes of the results.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Options {
    pub(crate) common: CommonOptions,
    pub(crate) workload: Workload,
    pub(crate) report: ReportOptions,
    /// Checks of the stage-2 tables, which take the place of counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) check: Option<CheckOptions>,
}

impl Options {
    /// Reports whether the results are records, which can be compared.
    pub(crate) const fn has_records(&self) -> bool {
        self.check.is_none() && self.workload.has_records()
    }

    /// Returns a run of the page-table test.
    pub const fn page_table_test(
        common: CommonOptions,
        matrix: Matrix,
        report: ReportOptions,
    ) -> Self {
        Self { common, workload: Workload::PageTableTest(matrix), report, check: None }
    }

    /// Returns a run of a tiny matrix, in which no regression is a failure.
    ///
    /// # Errors
    /// The page size of the kernels is unknown.
    pub fn smoke(common: CommonOptions) -> Result<Self, LabError> {
        let report = ReportOptions { fail_on: FailOn::Never, ..ReportOptions::default() };
        let page_size = common.kernels.build.page_size()?;
        Ok(Self::page_table_test(common, Matrix::smoke(page_size), report))
    }

    /// Returns boots of a Linux guest.
    pub fn guest(common: CommonOptions, matrix: GuestMatrix) -> Self {
        let workload = Workload::Guest(matrix);
        Self { common, workload, report: ReportOptions::default(), check: None }
    }

    /// Returns runs of a user's program with these arguments.
    ///
    /// # Errors
    /// The emulated host cannot execute the program.
    pub fn program(
        common: CommonOptions,
        program: ProgramOptions,
        arguments: Vec<String>,
        report: ReportOptions,
    ) -> Result<Self, LabError> {
        let matrix = program.open(arguments)?;
        if report.functions && matrix.place == ProgramPlace::Guest {
            return Err(LabError::Unusable(
                "--functions counts the host's kernel, whose addresses are those of the kernel in \
                 the guest: omit --in guest"
                    .to_owned(),
            ));
        }
        let workload = Workload::Program(matrix);
        Ok(Self { common, workload, report, check: None })
    }

    /// Returns a run of the kernel's KVM selftests.
    pub fn selftests(common: CommonOptions, tests: SelftestOptions) -> Self {
        let workload = Workload::Selftests(tests);
        Self { common, workload, report: ReportOptions::default(), check: None }
    }
}

impl Options {
    /// Returns the options of `granule lab` without arguments.
    pub(crate) fn defaults() -> Self {
        #[derive(Debug, clap::Parser)]
        struct NoArguments {
            #[command(flatten)]
            common: CommonOptions,
            #[command(flatten)]
            matrix: Matrix,
            #[command(flatten)]
            report: ReportOptions,
        }
        let NoArguments { common, matrix, report } = clap::Parser::parse_from(["lab"]);
        Self::page_table_test(common, matrix, report)
    }

    /// Returns these options with the paths that depend on the environment and on this program.
    pub(crate) fn with_paths(mut self, paths: &Paths) -> Self {
        let CommonOptions { kernels, host, .. } = &mut self.common;
        pin_paths(&mut kernels.origin.locations, host, paths);
        self
    }

    /// Replaces the options that have no effect on results by those of `other`.
    pub(crate) fn take_execution_of(&mut self, other: &Self) {
        self.common.output = other.common.output.clone();
        self.common.execution = other.common.execution.clone();
        self.common.host.jobs = other.common.host.jobs;
    }
}

/// Options of every run.
#[derive(Debug, Clone, clap::Args, Serialize, Deserialize)]
pub struct CommonOptions {
    #[command(flatten)]
    pub(crate) kernels: KernelOptions,
    #[command(flatten)]
    pub(crate) host: HostOptions,
    #[command(flatten)]
    pub(crate) output: OutputOptions,
    #[command(flatten)]
    #[serde(skip)]
    pub(crate) execution: ExecutionOptions,
}

/// Output of a run.
#[derive(Debug, Clone, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = "Output")]
pub struct OutputOptions {
    /// Run directory [default: the next unused one below lab-runs]
    #[arg(long, value_name = "DIR")]
    #[serde(skip)]
    pub(crate) out: Option<PathBuf>,
    /// Print the run as shell and execute nothing
    #[arg(long)]
    #[serde(skip)]
    pub(crate) dry_run: bool,
}

/// Report of a comparison.
#[derive(Debug, Clone, Default, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = "Report")]
pub struct ReportOptions {
    /// Format of the printed comparison; the run directory contains the text and the page
    #[arg(long, value_enum, default_value_t)]
    pub(crate) format: ReportFormat,
    /// Compare this phase only; repeat the option for more phases
    #[arg(long, value_name = "PHASE", value_parser = parse_phase)]
    phase: Vec<String>,
    /// Judge a count, such as guest_aborts or 'DC CIVAC', instead of the time; repeat the option to
    /// judge several, of which one may be time
    #[arg(long, value_name = "COUNT", value_parser = Metric::parse_of_lab)]
    metric: Vec<Metric>,
    /// Smallest slowdown that is a regression [default: 3]
    #[arg(long, value_name = "PERCENT", value_parser = parse_percentage)]
    min_effect: Option<f64>,
    /// Count the instructions of each kernel function, and list those that differ most
    #[arg(long)]
    #[serde(default)]
    pub(crate) functions: bool,
    /// Verdict for which the exit code is 1, in the comparison of any two kernels
    #[arg(long, value_enum, value_name = "VERDICT", default_value_t)]
    pub(crate) fail_on: FailOn,
}

/// Checks the name of a phase, which may be that of one round or step: `round-2`.
fn parse_phase(text: &str) -> Result<String, String> {
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let numbered = text.rsplit_once('-').filter(|(phase, number)| {
        matches!(*phase, "round" | "step") && !number.is_empty() && is_number(number)
    });
    let phase: Phase = numbered.map_or(text, |(phase, _)| phase).parse()?;
    debug_assert!(text.starts_with(phase.name()));
    Ok(text.to_owned())
}

/// Format of a printed comparison.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReportFormat {
    /// Plain text
    #[default]
    Text,
    /// Markdown tables
    Markdown,
    /// Text for a cover letter: at most 72 columns, a row for each kernel
    Cover,
}

impl ReportOptions {
    /// Reports whether `--phase` selects the phase or step with this name.
    pub(crate) fn shows(&self, phase: &str) -> bool {
        let is_numbered = |number: &str| number.starts_with('-');
        let selects = |selected: &String| {
            let rest = selected.strip_prefix(phase).or_else(|| phase.strip_prefix(&**selected));
            rest.is_some_and(|rest| rest.is_empty() || is_numbered(rest))
        };
        self.phase.is_empty() || self.phase.iter().any(selects)
    }

    /// Returns the options of a comparison.
    pub(crate) fn comparison(&self) -> ComparisonOptions {
        ComparisonOptions {
            min_effect: self.min_effect.map(|percent| percent / 100.0),
            metrics: self.metric.clone(),
            phases: self.phase.clone(),
            command: Some(command_line()),
            ..ComparisonOptions::default()
        }
    }
}

/// The repository and the cache.
#[derive(Debug, Clone, Default, clap::Args, Serialize, Deserialize)]
pub struct Locations {
    /// Repository [default: $GRANULE_ROOT, or the one that contains the current directory or this
    /// program]
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Directory for sources, objects and kernels [default: $XDG_CACHE_HOME/granule]
    #[arg(long, value_name = "DIR", env = "GRANULE_CACHE")]
    cache: Option<PathBuf>,
}

impl Locations {
    /// Returns `stage2/linux` of the repository.
    ///
    /// # Errors
    /// No repository is found.
    pub fn linux(&self) -> Result<PathBuf, LabError> {
        let variable = || env::var_os("GRANULE_ROOT").map(PathBuf::from);
        if let Some(root) = self.root.clone().or_else(variable) {
            return Ok(absolute(root.join("stage2/linux"))?);
        }
        env::current_dir()?
            .ancestors()
            .chain(env::current_exe()?.ancestors())
            .map(|directory| directory.join("stage2/linux"))
            .find(|linux| linux.join("config/lab.config").is_file())
            .ok_or_else(|| LabError::Unusable("no repository found: set it with --root".into()))
    }

    /// Returns the path of the cache.
    ///
    /// # Errors
    /// Neither `--cache` nor the environment sets a directory.
    pub fn cache(&self) -> Result<PathBuf, LabError> {
        let home = |variable: &str| {
            env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
        };
        let cache = (self.cache.clone())
            .or_else(|| Some(home("XDG_CACHE_HOME")?.join("granule")))
            .or_else(|| Some(home("HOME")?.join(".cache/granule")));
        match cache {
            Some(cache) => Ok(absolute(cache)?),
            None => {
                let reason = "no cache directory found: set it with --cache";
                Err(LabError::Unusable(reason.to_owned()))
            }
        }
    }
}

/// Path of a run directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RunPath {
    Given(PathBuf),
    /// The first unused one of `PATH-001`, `PATH-002` …
    Numbered(PathBuf),
}

/// Paths of the programs that no option sets.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DefaultPrograms {
    pub init: PathBuf,
    pub plugin: PathBuf,
}

impl DefaultPrograms {
    pub fn new() -> io::Result<Self> {
        let program = env::current_exe()?;
        let built = program.parent().unwrap_or(Path::new(""));
        let target = built.parent().unwrap_or(Path::new(""));
        Ok(Self {
            init: target.join("aarch64-unknown-linux-musl/release/granule"),
            plugin: built.join("libgranule_qemu_plugin.so"),
        })
    }
}

/// Paths of a run.
#[derive(Debug)]
pub(crate) struct Paths {
    /// Directory of the repository's series and configuration fragments.
    pub linux: PathBuf,
    pub init: PathBuf,
    pub plugin: PathBuf,
    /// Cache of sources, objects and kernels.
    pub cache: PathBuf,
    pub out: RunPath,
}

impl Paths {
    /// Returns the paths of a run. By default, `init` and plugin are beside this program.
    pub fn new(options: &CommonOptions) -> Result<Self, LabError> {
        let CommonOptions { kernels, host, output, .. } = options;
        let DefaultPrograms { init, plugin } = DefaultPrograms::new()?;
        let or =
            |path: &Option<PathBuf>, default: PathBuf| absolute(path.clone().unwrap_or(default));
        Ok(Self {
            linux: kernels.origin.locations.linux()?,
            init: or(&host.init, init)?,
            plugin: or(&host.plugin, plugin)?,
            cache: kernels.origin.locations.cache()?,
            out: match &output.out {
                Some(path) => RunPath::Given(absolute(path)?),
                None => RunPath::Numbered(absolute("lab-runs")?.join(kernels.run_name())),
            },
        })
    }
}

/// Sets the paths that depend on the environment and on this program.
pub(crate) fn pin_paths(locations: &mut Locations, host: &mut HostOptions, paths: &Paths) {
    locations.root = paths.linux.ancestors().nth(2).map(Path::to_owned);
    locations.cache = Some(paths.cache.clone());
    host.init = Some(paths.init.clone());
    host.plugin = Some(paths.plugin.clone());
}

/// Returns the parser of a CPU count, up to the maximum of the lab's kernels.
fn cpu_count_parser() -> RangedI64ValueParser<u32> {
    value_parser!(u32).range(1..=256)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_selects_its_rounds_and_steps() {
        let shows = |selected: &[&str], phase: &str| {
            let phases = selected.iter().map(|phase| (*phase).to_owned()).collect();
            ReportOptions { phase: phases, ..ReportOptions::default() }.shows(phase)
        };

        assert!(shows(&[], "create"));
        assert!(shows(&["create", "update"], "update") && !shows(&["create"], "update"));
        assert!(shows(&["step"], "step-1") && !shows(&["step-1"], "step-10"));
        assert!(shows(&["round-2"], "round"), "rounds are added up");
        assert!(!shows(&["logging-on"], "logging-off"));
    }
}
