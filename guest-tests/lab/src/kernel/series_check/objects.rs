// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Compiles objects of patched trees in one configuration, and compares their messages with those of
//! the base.
//!
//! ```text
//! DIRECTORY/           objects
//! DIRECTORY/warnings   messages of the objects as they are, and of the base's with its tree, as JSON
//! DIRECTORY/unfinished exists while objects are compiled
//! ```
//!
//! All trees are compiled in the same directory, so `make` compiles only what a patch changes, and
//! sparse checks the files that are compiled (`C=1`). The messages of all other objects are those of
//! their last compilation.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::warnings::{Message, Warnings};
use crate::{
    command::{Command, CommandError},
    kernel::{
        build::{configure, mismatches},
        git::TreeId,
        toolchain::{Toolchain, is_installed, is_of_sources, parallel_jobs},
    },
    shell::{self, Shell, sha256},
    values::{MakeVariable, PageSize},
};

/// Kernel configuration in which patches are compiled. KVM compiles its code for VHE, nVHE and pKVM
/// in each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Configuration {
    /// Lab's configuration, pages of 4K
    #[value(name = "4k")]
    Kib4,
    /// Lab's configuration, pages of 16K
    #[value(name = "16k")]
    Kib16,
    /// Lab's configuration, pages of 64K
    #[value(name = "64k")]
    Kib64,
    /// Pages of 4K, all debug checkers, and code that the lab does not configure
    #[value(name = "debug")]
    Debug,
    /// Pages of 16K and addresses of 52 bits; Linux 6.12 and newer
    #[value(name = "lpa2")]
    Lpa2,
}

impl Configuration {
    /// Configurations without `--configuration`.
    pub const DEFAULT: [Self; 4] = [Self::Kib4, Self::Kib16, Self::Kib64, Self::Debug];

    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    const fn page_size(self) -> PageSize {
        match self {
            Self::Kib4 | Self::Debug => PageSize::Kib4,
            Self::Kib16 | Self::Lpa2 => PageSize::Kib16,
            Self::Kib64 => PageSize::Kib64,
        }
    }

    /// Returns the fragment on top of `allnoconfig`. `config` is the directory of fragments.
    pub fn fragment(self, config: &Path) -> Result<String, CommandError> {
        let files: &[&str] = match self {
            Self::Kib4 | Self::Kib16 | Self::Kib64 => &["lab.config"],
            Self::Debug => &["lab.config", "debug.config", "check.config"],
            Self::Lpa2 => &["lab.config", "lpa2.config"],
        };
        let mut fragment = String::new();
        for name in files {
            let text = shell::read(&config.join(name))?;
            fragment += &format!("{}\n", String::from_utf8_lossy(&text).trim_end());
        }
        fragment += &format!("{}\n", self.page_size().fragment());
        Ok(fragment)
    }

    /// Returns the symbols without which the configuration is another one.
    fn symbols(self) -> Vec<&'static str> {
        let lpa2 = (self == Self::Lpa2).then_some("CONFIG_ARM64_VA_BITS_52");
        [self.page_size().symbol(), "CONFIG_KVM"].into_iter().chain(lpa2).collect()
    }
}

/// Programs of the check, and how many run at the same time.
#[derive(Debug)]
pub struct Programs {
    toolchain: Toolchain,
    pub has_sparse: bool,
    /// Inputs of the messages, besides the sources and the configuration.
    pub identity: String,
    jobs: usize,
}

impl Programs {
    pub fn new(variables: &[MakeVariable], jobs: Option<u32>) -> Result<Self, CommandError> {
        let toolchain = Toolchain::new(Shell::new(false), variables)?;
        let has_sparse = is_installed("sparse");
        let mut identity = toolchain.version.clone();
        if has_sparse {
            let version = Command::new("querying sparse", "sparse").arg("--version").query()?;
            identity += &format!("\nsparse {}", version.trim());
        }
        variables.iter().for_each(|variable| identity += &format!("\n{variable}"));
        let jobs = jobs.map_or_else(parallel_jobs, |jobs| jobs as usize);
        Ok(Self { toolchain, has_sparse, identity, jobs })
    }
}

/// Messages that remain between runs.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Memory {
    current: Warnings,
    /// Git tree of the base. The files of a directory may change between runs.
    #[serde(default)]
    base_tree: String,
    base: Warnings,
    /// Targets that were compiled for the base.
    base_targets: BTreeSet<String>,
    /// Targets of which the base has no object in this configuration.
    unavailable: BTreeSet<String>,
}

impl Memory {
    /// Removes what is known of another base; the objects and their messages remain those of the last
    /// compilation.
    fn with_base(self, base: &TreeId) -> Self {
        let base_tree = base.to_string();
        match self.base_tree == base_tree {
            true => self,
            false => Self { current: self.current, base_tree, ..Self::default() },
        }
    }
}

/// Objects of one source in one configuration.
#[derive(Debug)]
pub struct ObjectCheck<'a> {
    pub configuration: Configuration,
    pub fragment: String,
    programs: &'a Programs,
    tree: &'a Path,
    directory: PathBuf,
    memory: Memory,
    /// Patches of the configured tree that change symbols; `None` before the first configuration.
    configured: Option<String>,
}

impl<'a> ObjectCheck<'a> {
    /// Opens the objects of a base in a directory below `parent`, which are compiled in `tree`; removes
    /// those of a build that did not end.
    pub fn open(
        configuration: Configuration,
        fragment: String,
        programs: &'a Programs,
        (base, tree, parent): (&TreeId, &'a Path, &Path),
    ) -> Result<Self, CommandError> {
        let key = sha256(format!("{}\n{fragment}", programs.identity).as_bytes());
        let directory = parent.join(format!("{}-{}", configuration.name(), &key[..16]));
        let text = fs::read_to_string(directory.join("warnings")).unwrap_or_default();
        let memory: Option<Memory> = serde_json::from_str(&text).ok();
        if memory.is_none() || directory.join("unfinished").exists() {
            Shell::new(false).remove_dir(&directory)?;
        }
        let memory = memory.filter(|_| directory.exists()).unwrap_or_default().with_base(base);
        Ok(Self { configuration, fragment, programs, tree, directory, memory, configured: None })
    }

    /// Configures the tree, unless it was configured with equal symbols. `kconfig` identifies the
    /// changes of the symbols. Returns a message if the base lacks this configuration.
    pub fn configure(&mut self, kconfig: &str) -> Result<Option<String>, CommandError> {
        if self.configured.as_deref() == Some(kconfig) {
            return Ok(None);
        }
        let shell = Shell::new(false);
        shell.create_dir(&self.directory)?;
        let log = self.directory.join("configure.log");
        let _ = fs::remove_file(&log);
        let programs = (&self.programs.toolchain, self.tree);
        configure(shell, programs, &self.directory, &self.fragment, &log)?;
        let config = shell::read(&self.directory.join(".config"))?;
        let config = String::from_utf8_lossy(&config);
        let symbols = self.configuration.symbols();
        let missing = mismatches(&self.fragment, &config);
        if let Some((_, message)) =
            missing.into_iter().find(|(symbol, _)| symbols.contains(&symbol.as_str()))
        {
            return Ok(Some(message));
        }
        self.configured = Some(kconfig.to_owned());
        Ok(None)
    }

    /// Reports whether targets of the base are missing.
    pub fn needs_base(&self, targets: &BTreeSet<String>) -> bool {
        !targets.is_subset(&self.memory.base_targets)
    }

    /// Compiles objects of the base, which the tree contains.
    pub fn compile_base(&mut self, targets: &BTreeSet<String>) -> Result<(), CommandError> {
        let missing: BTreeSet<String> =
            targets.difference(&self.memory.base_targets).cloned().collect();
        if self.make("the base's ", &missing).is_err() {
            for target in &missing {
                match self.make("the base's ", &[target.clone()].into()) {
                    Err(error) if !target.ends_with('/') && is_of_sources(&error, &self.log()) => {
                        self.memory.unavailable.insert(target.clone());
                    }
                    result => result?,
                }
            }
        }
        let is_in_base = |object: &str| {
            [".c", ".S"]
                .iter()
                .any(|extension| self.tree.join(format!("{object}{extension}")).exists())
        };
        let compiled = self.memory.current.of_targets(&missing, is_in_base);
        self.memory.base.update(compiled);
        self.memory.base_targets.extend(missing);
        self.save()
    }

    /// Returns the targets that the base does not compile in this configuration, if it compiles none.
    pub fn unavailable(&self, targets: &BTreeSet<String>) -> Option<String> {
        let is_none_left = !targets.is_empty() && targets.is_subset(&self.memory.unavailable);
        is_none_left.then(|| join(targets))
    }

    /// Compiles objects of the patched tree. Returns the messages that the base lacks.
    ///
    /// # Errors
    /// An object does not compile.
    pub fn compile(
        &mut self,
        targets: &BTreeSet<String>,
    ) -> Result<BTreeSet<Message>, CommandError> {
        let targets = targets.difference(&self.memory.unavailable).cloned().collect();
        self.make("", &targets)?;
        Ok(self.memory.current.new_since(&self.memory.base, &targets))
    }

    /// Runs `make`, and records the messages of the objects that it compiled.
    fn make(&mut self, owner: &str, targets: &BTreeSet<String>) -> Result<(), CommandError> {
        let targets = &outermost(targets);
        if targets.is_empty() {
            return Ok(());
        }
        let unfinished = self.directory.join("unfinished");
        let log = self.log();
        let _ = fs::remove_file(&log);
        Shell::new(false).write(&unfinished, "")?;
        let task = format!("compiling {owner}{} ({})", join(targets), self.configuration.name());
        let make = self.programs.toolchain.verbose_make(&task, self.tree);
        let made = make
            // Messages of the same language and quotes in each run; the kernel's Makefile unsets LC_ALL.
            .env("LC_MESSAGES", "C")
            .env("LC_CTYPE", "C")
            .arg(format!("O={}", self.directory.display()))
            .arg(format!("-j{}", self.programs.jobs))
            .arg("W=1")
            .args(self.programs.has_sparse.then_some("C=1"))
            .args(targets)
            .log(&log)
            .run();
        let text = shell::read(&log)?;
        let tree = self.tree.display().to_string();
        let compiled = Warnings::of_log(&String::from_utf8_lossy(&text), &tree);
        self.memory.current.update(compiled);
        self.save()?;
        fs::remove_file(&unfinished)
            .map_err(|error| CommandError::file("remove", &unfinished, error))?;
        made
    }

    fn log(&self) -> PathBuf {
        self.directory.join("check.log")
    }

    fn save(&self) -> Result<(), CommandError> {
        let text = serde_json::to_string(&self.memory).unwrap_or_default();
        Shell::new(false).write(&self.directory.join("warnings"), text)
    }
}

/// Removes targets inside of other ones: beside an object of a directory, kbuild does not compile the
/// directory itself.
fn outermost(targets: &BTreeSet<String>) -> BTreeSet<String> {
    let is_inside = |target: &str, other: &str| {
        other.ends_with('/') && target != other && target.starts_with(other)
    };
    let is_outermost = |target: &&String| !targets.iter().any(|other| is_inside(target, other));
    targets.iter().filter(is_outermost).cloned().collect()
}

fn join(targets: &BTreeSet<String>) -> String {
    targets.iter().map(String::as_str).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_inside_of_a_directory_are_removed() {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let targets: BTreeSet<String> = set(&["kvm/", "kvm/hyp/", "kvm/mmu.o", "kvm.o", "mm/a.o"]);

        assert_eq!(outermost(&targets), set(&["kvm/", "kvm.o", "mm/a.o"]));
    }
}
