// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule lab`: runs the lab, or a subcommand that boots no kernel.

use std::path::PathBuf;

use clap::ArgGroup;
use granule_lab::{self as lab, HostPackages, LinuxVersion, Locations, Options, RunStatus};

use super::{CommandOutcome, CommandResult};

/// Options of `granule lab`.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    group(ArgGroup::new("program").args(["test", "selftests", "guest", "fetch"])),
    after_help = "Times are virtual: one nanosecond an instruction, summed over all CPUs. They are \
                  exact and repeatable, but not hardware time.\n\nExit code: 0 done; 1 a job \
                  failed, a phase is slower by more than --min-effect or selftest results differ; 2 \
                  the run could not be completed."
)]
pub struct Args {
    #[command(subcommand)]
    command: Option<LabCommand>,
    #[command(flatten)]
    options: Options,
}

/// Subcommands of `granule lab`.
#[derive(Debug, clap::Subcommand)]
enum LabCommand {
    /// Build Debian packages of a host kernel with and without a series, for an arm64 server
    HostKernel(HostPackages),
    /// Check every series: list, subjects, application, checkpatch
    CheckSeries {
        /// Kernel source for all bases, instead of Debian's
        #[arg(long, value_name = "DIR")]
        source: Option<PathBuf>,
        #[command(flatten)]
        locations: Locations,
    },
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
    let passed = match args.command {
        None => lab::run(&args.options)? == RunStatus::Passed,
        Some(LabCommand::HostKernel(options)) => {
            let packages = options.build()?;
            if !options.dry_run {
                println!("To install, and to boot in turn (docs/hardware.md):");
            }
            for package in packages {
                println!("sudo apt-get install {}", package.display());
            }
            true
        }
        Some(LabCommand::CheckSeries { source, locations }) => {
            lab::check_series(&locations.linux()?, &locations.cache()?, source.as_deref())?
        }
        Some(LabCommand::Patches { base, series, locations }) => {
            for path in lab::patches(&locations.linux()?, base, &series)? {
                println!("{}", path.display());
            }
            true
        }
    };
    Ok(if passed { CommandOutcome::Done } else { CommandOutcome::Failed })
}
