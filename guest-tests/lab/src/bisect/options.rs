// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of `granule lab bisect`, which `--resume` reads from the run directory.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::figure::FigureOptions;
use crate::{
    error::LabError,
    kernel::revisions::UserTree,
    measure::SerialOptions,
    options::{Matrix, Paths, pin_paths},
    plan::differing_keys,
    shell::{absolute, sha256},
};

/// Options of `granule lab bisect`.
#[derive(Debug, Clone, clap::Args, Serialize, Deserialize)]
#[command(
    mut_arg("backing", |arg| arg.help(
        "Backing of the memory; repeat the option for more jobs [default: hugetlb pages of a block, \
         2M with base pages of 4K]"
    )),
    mut_arg("seeds", |arg| arg.help(
        "Boots of each job, each with another schedule [default: 1, as counts are exact]"
    ))
)]
pub struct BisectOptions {
    /// Revision without the increase
    #[arg(value_name = "GOOD", required_unless_present = "resume")]
    pub(super) good: Option<String>,
    /// Later revision with the increase
    #[arg(value_name = "BAD", required_unless_present = "resume")]
    pub(super) bad: Option<String>,
    /// Git repository of the kernels, which is only read
    #[arg(long, value_name = "TREE", required_unless_present = "resume")]
    pub(super) git: Option<PathBuf>,
    /// Continue the interrupted bisection in the directory --out, with its options; a commit that
    /// was skipped is tried again
    #[arg(long, requires = "out", conflicts_with = "dry_run")]
    #[serde(skip)]
    pub(super) resume: bool,
    #[command(flatten)]
    pub(super) figure: FigureOptions,
    #[command(flatten)]
    pub(super) matrix: Matrix,
    #[command(flatten)]
    pub(super) serial: SerialOptions,
}

impl BisectOptions {
    /// Returns the paths of the bisection.
    pub(super) fn paths(&self) -> Result<Paths, LabError> {
        Paths::new(&self.serial.common(self.git.as_deref()))
    }

    /// Returns these options with hashes of the revisions and with absolute paths. `git` is the
    /// repository if these options name none.
    pub(super) fn pinned(mut self, git: Option<&Path>) -> Result<Self, LabError> {
        let paths = self.paths()?;
        pin_paths(&mut self.serial.locations, &mut self.serial.host, &paths);
        self.git = self.git.as_deref().map(absolute).transpose()?;
        if let Some(tree) = self.git.as_deref().or(git) {
            for revision in [&mut self.good, &mut self.bad].into_iter().flatten() {
                *revision = UserTree(tree).commit(revision)?.hash;
            }
        }
        for file in &mut self.serial.build.fragments {
            *file = absolute(file)?;
        }
        Ok(self)
    }

    /// Returns the options of an interrupted bisection with the output of these. Options that are
    /// set here must be equal.
    pub(super) fn resumed(&self, stored: Self, directory: &Path) -> Result<Self, LabError> {
        let given = serde_json::to_value(self.clone().pinned(stored.git.as_deref())?)?;
        let defaults = serde_json::to_value(Self::defaults().pinned(None)?)?;
        let set = differing_keys(&given, &defaults);
        let mut differences = differing_keys(&given, &serde_json::to_value(&stored)?);
        differences.retain(|key| set.contains(key));
        if !differences.is_empty() {
            return Err(LabError::Unusable(format!(
                "--resume: these options differ from those of the bisection in {}: {}; set only \
                 --out and --resume, or start another one in another directory",
                directory.display(),
                differences.join(", ")
            )));
        }
        let mut resumed = stored;
        resumed.resume = true;
        resumed.serial.output = self.serial.output.clone();
        resumed.serial.host.jobs = self.serial.host.jobs;
        Ok(resumed)
    }

    /// Returns the hashes of the files on which figures depend.
    pub(super) fn input_hashes(&self) -> Result<Vec<String>, LabError> {
        let paths = self.paths()?;
        let files = [&paths.init, &paths.plugin].into_iter();
        let files = files.chain(&self.serial.build.fragments).chain(&self.matrix.test_binary);
        Ok(files.map(|file| sha256(&fs::read(file).unwrap_or_default())).collect())
    }

    /// Returns the options of `granule lab bisect --resume`.
    pub(super) fn defaults() -> Self {
        #[derive(Debug, clap::Parser)]
        struct ResumeOnly {
            #[command(flatten)]
            options: BisectOptions,
        }
        let ResumeOnly { options } =
            clap::Parser::parse_from(["bisect", "--resume", "--out", "unused"]);
        options
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn options(line: &str) -> BisectOptions {
        #[derive(Debug, clap::Parser)]
        struct TestArgs {
            #[command(flatten)]
            options: BisectOptions,
        }
        let TestArgs { options } = clap::Parser::try_parse_from(line.split_whitespace()).unwrap();
        options
    }

    #[test]
    fn a_bisection_is_resumed_with_its_options() {
        let stored = BisectOptions {
            git: Some("/linux".into()),
            ..options("bisect --resume --out x --metric TLBI --above 7 -v 2").pinned(None).unwrap()
        };
        let resume = |line: &str| options(line).resumed(stored.clone(), Path::new("x"));

        let alone = resume("bisect --resume --out x --jobs 3").unwrap();
        let same = resume("bisect --resume --out x --metric TLBI -v 2").unwrap();
        let other =
            resume("bisect --resume --out x --metric elapsed -v 2").unwrap_err().to_string();

        let value = |options: &BisectOptions| serde_json::to_value(options).unwrap();
        assert_eq!([value(&alone), value(&same)], [value(&stored), value(&stored)]);
        assert_eq!(alone.serial.host.jobs, Some(3));
        assert!(other.contains("in x: metric; set only"), "{other}");
    }
}
