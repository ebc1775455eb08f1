// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Subcommands of `granule lab` that boot nothing: packages for a server, and the series.

use std::{path::PathBuf, thread::available_parallelism};

use clap::ValueEnum;
use granule_lab::{self as lab, PackageOptions};

use super::{options, version};
use crate::{CommandResult, Outcome};

/// Subcommands of `granule lab`.
#[derive(Debug, clap::Subcommand)]
pub enum Tool {
    /// Build Debian packages of a host kernel for an arm64 server, without and with a series
    HostKernel(HostKernelArgs),
    /// Check every series: list, subjects, application, checkpatch
    #[command(hide = true)]
    CheckSeries(CheckSeriesArgs),
    /// Print the paths of the patches of a series, after those of the series it requires
    #[command(hide = true)]
    Patches(PatchesArgs),
}

/// Options of `granule lab host-kernel`.
#[derive(Debug, clap::Args)]
pub struct HostKernelArgs {
    /// Linux version of the base
    #[arg(long, default_value = "5.10", value_name = "VERSION", value_parser = version)]
    base: String,
    /// Series to apply
    #[arg(long, default_value = options::DEFAULT_SERIES, value_name = "NAME")]
    series: String,
    /// Clean tree of the base [default: Debian's source]
    #[arg(long, value_name = "TREE")]
    source: Option<PathBuf>,
    /// Configuration; required unless this machine is arm64 [default: that of the running kernel]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Output directory
    #[arg(long, value_name = "DIR", default_value = "host-kernels")]
    out: PathBuf,
    /// Compilers at a time [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    jobs: Option<u32>,
    /// Build only this kernel
    #[arg(long, value_name = "KERNEL", value_enum)]
    only: Option<HostKernel>,
    /// Print the build as shell and execute nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    paths: ToolPaths,
}

/// A kernel for a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum HostKernel {
    /// The base
    Plain,
    /// The base with the series
    Series,
}

/// Options of `granule lab check-series`.
#[derive(Debug, clap::Args)]
pub struct CheckSeriesArgs {
    /// Source that replaces those of all bases
    #[arg(long, value_name = "DIR")]
    source: Option<PathBuf>,
    #[command(flatten)]
    paths: ToolPaths,
}

/// Options of `granule lab patches`.
#[derive(Debug, clap::Args)]
pub struct PatchesArgs {
    /// Linux version of the base
    #[arg(long, value_name = "VERSION", value_parser = version)]
    base: String,
    /// The series
    #[arg(long, value_name = "NAME")]
    series: String,
    #[command(flatten)]
    paths: ToolPaths,
}

/// Paths of a subcommand.
#[derive(Debug, clap::Args)]
struct ToolPaths {
    /// Repository [default: the one of the current directory, or of this program]
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Directory for sources [default: $XDG_CACHE_HOME/granule]
    #[arg(long, value_name = "DIR", env = "GRANULE_CACHE")]
    cache: Option<PathBuf>,
}

/// Runs a subcommand.
///
/// # Errors
/// The subcommand could not be completed.
pub fn run(tool: Tool) -> CommandResult {
    match tool {
        Tool::HostKernel(args) => host_kernel(args),
        Tool::CheckSeries(args) => {
            let linux = options::repository(args.paths.root.as_deref())?.join("stage2/linux");
            let cache = options::cache(args.paths.cache.as_deref())?;
            Ok(match lab::check_series(&linux, &cache, args.source.as_deref())? {
                true => Outcome::Done,
                false => Outcome::Failed,
            })
        }
        Tool::Patches(args) => {
            let linux = options::repository(args.paths.root.as_deref())?.join("stage2/linux");
            for path in lab::patches(&linux, &args.base, &args.series)? {
                println!("{}", path.display());
            }
            Ok(Outcome::Done)
        }
    }
}

fn host_kernel(args: HostKernelArgs) -> CommandResult {
    let cpus = available_parallelism().map_or(1, |cpus| u32::try_from(cpus.get()).unwrap_or(1));
    let packages = lab::build_packages(&PackageOptions {
        root: options::repository(args.paths.root.as_deref())?,
        cache: options::cache(args.paths.cache.as_deref())?,
        base: args.base,
        series: args.series,
        source: args.source,
        config: args.config,
        out: args.out,
        jobs: args.jobs.unwrap_or(cpus),
        plain: args.only != Some(HostKernel::Series),
        patched: args.only != Some(HostKernel::Plain),
        dry_run: args.dry_run,
    })?;
    if !args.dry_run {
        println!("To install, and to boot in turn (docs/hardware.md):");
    }
    for package in packages {
        println!("sudo apt-get install {}", package.display());
    }
    Ok(Outcome::Done)
}
