// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule lab`: runs the lab, or a subcommand that boots no kernel.

use std::path::PathBuf;

use clap::ArgGroup;
use granule_lab::{self as lab, HostPackages, Locations, Options, RunStatus, version};

use super::{CommandOutcome, CommandResult};

/// Options of `granule lab`.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    group(ArgGroup::new("program").args(["test", "selftests", "guest", "fetch"])),
    after_help = "Times are virtual: one nanosecond an instruction, summed over all CPUs. They are \
                  exact and repeatable, and not hardware time.\n\nExit code: 0 done; 1 a job \
                  failed, a phase is slower by more than --min-effect or selftest results differ; 2 \
                  the run could not be completed."
)]
pub struct Args {
    #[command(subcommand)]
    tool: Option<Tool>,
    #[command(flatten)]
    options: Options,
}

/// Subcommands of `granule lab`.
#[derive(Debug, clap::Subcommand)]
enum Tool {
    /// Build Debian packages of a host kernel for an arm64 server, without and with a series
    HostKernel(HostPackages),
    /// Check every series: list, subjects, application, checkpatch
    CheckSeries {
        /// Source that replaces those of all bases
        #[arg(long, value_name = "DIR")]
        source: Option<PathBuf>,
        #[command(flatten)]
        locations: Locations,
    },
    /// Print the paths of the patches of a series, after those of the series it requires
    #[command(hide = true)]
    Patches {
        /// Linux version of the base
        #[arg(long, value_name = "VERSION", value_parser = version)]
        base: String,
        /// The series
        #[arg(long, value_name = "NAME")]
        series: String,
        #[command(flatten)]
        locations: Locations,
    },
}

/// Runs `granule lab`.
///
/// # Errors
/// The run could not be completed.
pub fn run(args: Args) -> CommandResult {
    let passed = match args.tool {
        None => lab::run(&args.options)? == RunStatus::Passed,
        Some(Tool::HostKernel(options)) => {
            let packages = options.build()?;
            if !options.dry_run {
                println!("To install, and to boot in turn (docs/hardware.md):");
            }
            for package in packages {
                println!("sudo apt-get install {}", package.display());
            }
            true
        }
        Some(Tool::CheckSeries { source, locations }) => {
            lab::check_series(&locations.linux()?, &locations.cache()?, source.as_deref())?
        }
        Some(Tool::Patches { base, series, locations }) => {
            for path in lab::patches(&locations.linux()?, &base, &series)? {
                println!("{}", path.display());
            }
            true
        }
    };
    Ok(if passed { CommandOutcome::Done } else { CommandOutcome::Failed })
}
