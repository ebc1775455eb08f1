// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options that select the kernels of a run.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Locations;
use crate::{
    error::LabError,
    shell,
    values::{BuildSetting, LinuxVersion, MakeVariable, PageSize, Revisions, parse_variant},
};

/// Kernels under test.
#[derive(Debug, Clone, Default, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = "Kernel")]
pub struct KernelOptions {
    /// Git repository of the kernels, which is only read: compare BEFORE with AFTER
    #[arg(long, value_name = "TREE", conflicts_with_all = ["base", "source", "suite"])]
    pub(crate) git: Option<PathBuf>,
    /// Revisions for --git: BEFORE..AFTER, or one as the base of --patches, --series or --variant
    #[arg(value_name = "BEFORE..AFTER", help_heading = None::<&str>)]
    pub(crate) revisions: Option<Revisions>,
    /// Patches to apply: an mbox file (b4 am), or a directory of git format-patch. With --git, the
    /// base is the revision, or the commit in the line base-commit
    #[arg(long, value_name = "MBOX|DIR", conflicts_with_all = ["series", "first"])]
    pub(crate) patches: Option<PathBuf>,
    /// Build and run a kernel for every commit or patch, and compare each with the one before it
    #[arg(long)]
    pub(crate) each: bool,
    /// Compare the last kernel with itself under this setting: VARIABLE=VALUE of make (LLVM=1), or
    /// CONFIG_SYMBOL=VALUE
    #[arg(long = "variant", value_name = "SETTING", value_parser = parse_variant,
          conflicts_with = "each")]
    pub(crate) variants: Vec<(String, BuildSetting)>,
    #[command(flatten)]
    pub(crate) origin: SourceOptions,
    /// Series of this repository to apply, in order [default: stage2-fault-path, if the version has
    /// it]
    #[arg(long, value_name = "NAME")]
    pub(crate) series: Vec<String>,
    /// Apply only the first N patches of the last series; 0 runs the base alone
    #[arg(long, value_name = "N")]
    pub(crate) first: Option<usize>,
    /// Run this kernel image instead of building one; repeat the option to compare several
    #[arg(long = "image", value_name = "IMAGE",
          conflicts_with_all = ["base", "source", "git", "revisions", "series", "first", "patches", "each",
                                "variants", "page_size", "fragments", "variables", "debug_kernel",
                                "only_kernels"])]
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
    /// Base page size of the host kernel [default: that of --config, or 4k]
    #[arg(long, value_enum)]
    pub(crate) page_size: Option<PageSize>,
    /// Build with all debug checkers; any kernel splat is a failure
    #[arg(long)]
    pub(crate) debug_kernel: bool,
}

impl BuildOptions {
    /// Returns the base page size of kernels without a variant.
    ///
    /// # Errors
    /// A fragment cannot be read, or contradicts `--page-size`.
    pub(crate) fn page_size(&self) -> Result<PageSize, LabError> {
        let mut text = String::new();
        for fragment in &self.fragments {
            text += &format!("{}\n", String::from_utf8_lossy(&shell::read(fragment)?));
        }
        match (self.page_size, PageSize::of_config(&text)) {
            (Some(size), Some(other)) if size != other => Err(LabError::Unusable(format!(
                "--page-size is {}, and {}=y is in a fragment of --config: omit one of them",
                size.base(),
                other.symbol()
            ))),
            (size, other) => Ok(size.or(other).unwrap_or_default()),
        }
    }
}

impl KernelOptions {
    /// Refuses options that have no effect together, or whose effects a comparison cannot separate.
    pub(crate) fn check(&self) -> Result<(), LabError> {
        let refuse = |message: &str| Err(LabError::Unusable(message.to_owned()));
        let is_range = matches!(self.revisions, Some(Revisions::Range { .. }));
        let SourceOptions { base, source, .. } = &self.origin;
        // clap ignores a requirement of --git if --base or --source is set.
        if self.revisions.is_some() && self.git.is_none() {
            return refuse(
                "BEFORE..AFTER and REVISION are revisions of a Git repository: set it with --git, \
                 and omit --base, --source and --image",
            );
        }
        if is_range && !self.variants.is_empty() {
            return refuse(
                "--variant compares one revision with itself: set one instead of BEFORE..AFTER, or \
                 apply the setting to both kernels with --make or --config",
            );
        }
        if self.patches.is_some() && self.git.is_none() && base.is_none() && source.is_none() {
            return refuse(
                "--patches requires the source to which the patches apply: set --git, --base or \
                 --source",
            );
        }
        if self.first.is_some() && self.git.is_some() && self.series.is_empty() {
            return refuse(
                "--first is the number of patches of a series: set --series, or omit it",
            );
        }
        Ok(())
    }

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::matrix::tests::{options, parse};

    #[test]
    fn options_without_effect_are_refused_with_the_remedy() {
        for (line, remedy) in [
            ("lab v6.12..topic --base 5.10", "set it with --git"),
            ("lab v6.12..topic --source linux", "set it with --git"),
            ("lab v6.12..topic", "set it with --git"),
            ("lab --git t a..b --variant LLVM=1", "set one instead of BEFORE..AFTER"),
            ("lab --patches topic.mbx", "set --git, --base or --source"),
            ("lab --git t a..b --first 1", "set --series"),
        ] {
            let checked = match parse(line) {
                Ok(options) => options.common.kernels.check().map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };

            let error = checked.unwrap_err();
            assert!(error.contains(remedy), "{line}: {error}");
        }
        for line in ["lab", "lab --base 6.1 --patches x", "lab --git t a..b --each", "lab --git t"]
        {
            options(line).common.kernels.check().unwrap();
        }
    }

    #[test]
    fn the_page_size_is_that_of_a_fragment_unless_the_option_contradicts_it() {
        let directory = tempfile::tempdir().unwrap();
        let fragment = directory.path().join("64k.config");
        std::fs::write(&fragment, "CONFIG_ARM64_64K_PAGES=y\n").unwrap();
        let size = |line: &str| {
            let line = line.replace("FRAGMENT", &fragment.display().to_string());
            options(&line).common.kernels.build.page_size()
        };

        assert_eq!(size("lab").unwrap(), PageSize::Kib4);
        assert_eq!(size("lab --config FRAGMENT").unwrap(), PageSize::Kib64);
        assert_eq!(size("lab --page-size 16k").unwrap(), PageSize::Kib16);
        let error = size("lab --config FRAGMENT --page-size 4k").unwrap_err().to_string();
        assert!(error.contains("--page-size is 4K, and CONFIG_ARM64_64K_PAGES=y"), "{error}");
    }

    #[test]
    fn an_option_of_a_build_conflicts_with_an_image() {
        for option in ["--make LLVM=1", "--config x", "--debug-kernel", "--first 1", "--only base"]
        {
            let line = format!("lab --image Image {option}");

            let error = parse(&line).unwrap_err();

            assert_eq!(error.kind(), clap::error::ErrorKind::ArgumentConflict, "{line}");
        }
    }
}
