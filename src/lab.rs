// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule lab`: runs the lab, or a subcommand that boots no kernel.

use granule_lab::{
    self as lab, BisectOptions, BootMatrix, CheckArgs, CommonOptions, GuestMatrix, HostPackages,
    ImageOptions, LinuxVersion, Locations, Matrix, Options, ProgramOptions, ReportOptions,
    RunStatus, SelftestOptions, SeriesCheckOptions, SourceOptions, Step, ZapMatrix,
};

use super::{CommandOutcome, CommandResult};

/// Options of `granule lab`.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Times are virtual: one nanosecond an instruction without --costs. Elapsed time is \
                  that of CPUs in parallel, work the sum over all CPUs. They are exact and \
                  repeatable, but not hardware time.\n\nExit code: 0 done; 1 a job \
                  failed, a verdict of --fail-on occurs or selftest results differ; 2 the run could \
                  not be completed."
)]
pub struct Args {
    #[command(subcommand)]
    command: Option<LabCommand>,
    #[command(flatten)]
    common: CommonOptions,
    #[command(flatten)]
    matrix: Matrix,
    #[command(flatten)]
    report: ReportOptions,
}

/// Subcommands of `granule lab`.
#[derive(Debug, clap::Subcommand)]
enum LabCommand {
    /// Run a tiny matrix: 4 vCPUs, 16M, 4K pages and hugetlb 2M, one seed; a regression is no
    /// failure
    Smoke {
        #[command(flatten)]
        common: CommonOptions,
    },
    /// Boot a Linux guest on each backing with `granule run`, and report aborts, CMOs, TLBIs and
    /// times of the boot
    Guest {
        #[command(flatten)]
        common: CommonOptions,
        #[command(flatten)]
        matrix: GuestMatrix,
    },
    /// Boot each kernel with several sizes of memory, and report what the page tables that it builds
    /// for itself cost (docs/kernel-boot.md)
    #[command(after_help = "Exit code: 0 done; 1 a boot failed, or a kernel maps the linear map \
                            differently; 2 the run could not be completed.")]
    Boot {
        #[command(flatten)]
        common: CommonOptions,
        #[command(flatten)]
        matrix: BootMatrix,
    },
    /// Remove anonymous memory from the page tables of a process, and report what the calls cost
    /// (docs/zap.md)
    #[command(after_help = "Exit code: 0 done; 1 a job failed; 2 the run could not be completed.")]
    Zap {
        #[command(flatten)]
        common: CommonOptions,
        #[command(flatten)]
        matrix: ZapMatrix,
    },
    /// Run your own static arm64 program in the emulated host or in a guest, and compare its
    /// counts (docs/workloads.md)
    Workload {
        #[command(flatten)]
        program: ProgramOptions,
        #[command(flatten)]
        common: CommonOptions,
        #[command(flatten)]
        report: ReportOptions,
        /// Arguments of the program
        #[arg(last = true, value_name = "ARGUMENTS")]
        arguments: Vec<String>,
    },
    /// Check the stage-2 tables of each kernel against the rules of the architecture while a test
    /// runs, and report each defect with its function (docs/checking-linux.md). Without options:
    /// the page-table test with 4 vCPUs, 16M, base pages and hugetlb pages of a block, one seed
    #[command(
        after_help = "Exit code: 0 no finding; 1 findings; 2 a job failed, no guest of a kernel \
                      changed its tables, or the run could not be completed."
    )]
    Check {
        #[command(flatten)]
        common: CommonOptions,
        #[command(flatten)]
        args: CheckArgs,
    },
    /// Run a hypervisor without Linux, and check the stage-2 tables of its guests against the rules of
    /// the architecture (docs/checking-other-hypervisors.md)
    #[command(
        after_help = "Exit code: 0 no finding; 1 findings; 2 the image could not be run or has no \
                      guest."
    )]
    CheckImage(Box<ImageOptions>),
    /// Run the kernel's KVM selftests, and compare their verdicts
    Selftests {
        #[command(flatten)]
        common: CommonOptions,
        #[command(flatten)]
        tests: SelftestOptions,
    },
    /// Find the commit that raised a count
    Bisect(Box<BisectOptions>),
    /// Fetch and unpack the source of the base, and print the path of its tree
    Fetch {
        #[command(flatten)]
        origin: SourceOptions,
    },
    /// Build Debian packages of a host kernel with and without a series, for an arm64 server
    HostKernel(HostPackages),
    /// Execute one step of a plan, for executors
    #[command(hide = true)]
    Step {
        #[command(subcommand)]
        step: Step,
    },
    /// Check every series: list, subjects, application, checkpatch, and with --compile the objects
    /// of each patch
    #[command(
        after_help = "Exit code: 0 no problem; 1 a series has a problem; 2 the check could not \
                            be completed."
    )]
    CheckSeries(SeriesCheckOptions),
    /// Print the paths of the patches of a series and of its required series, in order
    #[command(hide = true)]
    Patches {
        /// Linux version of the base
        #[arg(long, value_name = "VERSION")]
        base: LinuxVersion,
        /// The series
        #[arg(long, value_name = "NAME")]
        series: String,
        #[command(flatten)]
        locations: Locations,
    },
}

/// Runs `granule lab`.
pub fn run(args: Args) -> CommandResult {
    lab::interrupt::announce_resume()?;
    let Some(command) = args.command else {
        return execute(&Options::page_table_test(args.common, args.matrix, args.report));
    };
    match command {
        LabCommand::Smoke { common } => return execute(&Options::smoke(common)?),
        LabCommand::Guest { common, matrix } => return execute(&Options::guest(common, matrix)),
        LabCommand::Boot { common, matrix } => return execute(&Options::boot(common, matrix)?),
        LabCommand::Zap { common, matrix } => return execute(&Options::zap(common, matrix)),
        LabCommand::Workload { program, common, report, arguments } => {
            return execute(&Options::program(common, program, arguments, report)?);
        }
        LabCommand::Check { common, args } => return execute(&Options::check(common, args)?),
        LabCommand::CheckImage(options) => return Ok(outcome(lab::check_image(&options)?)),
        LabCommand::Selftests { common, tests } => {
            return execute(&Options::selftests(common, tests));
        }
        LabCommand::Bisect(options) => return Ok(outcome(lab::bisect(*options)?)),
        LabCommand::Fetch { origin } => println!("{}", lab::fetch(&origin)?.display()),
        LabCommand::Step { step } => return Ok(outcome(lab::step(&step)?)),
        LabCommand::HostKernel(options) => {
            let packages = options.build()?;
            if !options.dry_run {
                println!("To install, and to boot in turn (docs/hardware.md):");
            }
            for package in packages {
                println!("sudo apt-get install {}", package.display());
            }
        }
        LabCommand::CheckSeries(options) => {
            if !options.check()? {
                return Ok(CommandOutcome::Failed);
            }
        }
        LabCommand::Patches { base, series, locations } => {
            for path in lab::patches(&locations.linux()?, base, &series)? {
                println!("{}", path.display());
            }
        }
    }
    Ok(CommandOutcome::Done)
}

fn execute(options: &Options) -> CommandResult {
    lab::run(options).map(outcome).map_err(Into::into)
}

const fn outcome(status: RunStatus) -> CommandOutcome {
    match status {
        RunStatus::Passed => CommandOutcome::Done,
        RunStatus::Failed => CommandOutcome::Failed,
    }
}
