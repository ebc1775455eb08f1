// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options that select the kernels of a run.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Locations;
use crate::values::{BuildSetting, LinuxVersion, MakeVariable, PageSize, Revisions, parse_variant};

/// Kernels under test.
#[derive(Debug, Clone, Default, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = "Kernel")]
pub struct KernelOptions {
    #[command(flatten)]
    pub(crate) origin: SourceOptions,
    /// Git repository of the kernels, which is only read: compare BEFORE with AFTER
    #[arg(long, value_name = "TREE", conflicts_with_all = ["base", "source", "suite"])]
    pub(crate) git: Option<PathBuf>,
    /// Revisions for --git: BEFORE..AFTER, or one as the base of --patches, --series or --variant
    #[arg(value_name = "BEFORE..AFTER", requires = "git")]
    pub(crate) revisions: Option<Revisions>,
    /// Patches to apply: an mbox file (b4 am), or a directory of git format-patch. With --git, the
    /// base is the revision, or the commit in the line base-commit
    #[arg(long, value_name = "MBOX|DIR", conflicts_with_all = ["series", "first"])]
    pub(crate) patches: Option<PathBuf>,
    /// Build and run a kernel for every commit or patch, and compare each with the one before it
    #[arg(long)]
    pub(crate) each: bool,
    /// Build the last kernel also with this setting, and compare: VARIABLE=VALUE of make (LLVM=1),
    /// or CONFIG_SYMBOL=VALUE
    #[arg(long = "variant", value_name = "SETTING", value_parser = parse_variant)]
    pub(crate) variants: Vec<(String, BuildSetting)>,
    /// Series of this repository to apply, in order [default: stage2-fault-path, if the version has
    /// it]
    #[arg(long, value_name = "NAME")]
    pub(crate) series: Vec<String>,
    /// Apply only the first N patches of the last series; 0 runs the base alone
    #[arg(long, value_name = "N")]
    pub(crate) first: Option<usize>,
    /// Run this kernel image instead of building one; repeat the option to compare two
    #[arg(long = "image", value_name = "IMAGE",
          conflicts_with_all = ["source", "git", "series", "patches", "each", "variants", "page_size"])]
    pub(crate) images: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) build: BuildOptions,
    /// Run only the kernel of this name (base, or a series; before, after)
    #[arg(long = "only", value_name = "KERNEL")]
    pub(crate) only_kernels: Vec<String>,
}

/// Source of the base.
#[derive(Debug, Clone, Default, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = "Kernel")]
pub struct SourceOptions {
    /// Linux version of the base: Debian's linux-source-VERSION [default: 5.10]
    #[arg(long, value_name = "VERSION")]
    pub(crate) base: Option<LinuxVersion>,
    /// Kernel source that replaces Debian's: a directory with all its changes, a tarball or a Debian
    /// linux-source package
    #[arg(long, value_name = "PATH", conflicts_with = "suite")]
    pub(crate) source: Option<PathBuf>,
    /// Debian suite of the source package [default: that of the version]
    #[arg(long)]
    pub(crate) suite: Option<String>,
    #[command(flatten)]
    pub(crate) locations: Locations,
}

impl SourceOptions {
    /// Base if neither `--base` nor a source sets one.
    pub(crate) const DEFAULT_BASE: LinuxVersion = LinuxVersion { major: 5, minor: 10 };
}

/// Build of the kernels.
#[derive(Debug, Clone, Default, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = "Kernel")]
pub struct BuildOptions {
    /// Additional configuration fragment
    #[arg(long = "config", value_name = "FRAGMENT")]
    pub(crate) fragments: Vec<PathBuf>,
    /// Variable of make for all kernels, such as LLVM=1 or KCFLAGS=-fno-inline
    #[arg(long = "make", value_name = "VARIABLE=VALUE")]
    pub(crate) variables: Vec<MakeVariable>,
    /// Base page size of the host kernel
    #[arg(long, value_enum, default_value_t)]
    pub(crate) page_size: PageSize,
    /// Build with all debug checkers; any kernel splat is a failure
    #[arg(long)]
    pub(crate) debug_kernel: bool,
}

impl KernelOptions {
    /// Returns the start of the name of a run directory.
    pub(super) fn run_name(&self) -> String {
        let of_path = |path: &PathBuf| {
            let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.clone());
            path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
        };
        match (&self.patches, &self.git, &self.origin.source, self.origin.base) {
            (Some(path), ..) | (_, Some(path), ..) => of_path(path),
            (.., Some(base)) => base.to_string(),
            (.., Some(path), None) => of_path(path),
            _ => SourceOptions::DEFAULT_BASE.to_string(),
        }
    }
}
