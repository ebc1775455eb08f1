// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks the patches of a series in order.
//!
//! A passed check is an empty file, whose name is the hash of everything that its result depends on.
//! Failed checks are repeated.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use super::{
    list::{self, Checkpatch},
    objects::{ObjectCheck, Programs},
    targets::{change_kconfig, changed_files, diff, directories, objects},
    warnings::Tool,
};
use crate::{
    command::CommandError,
    error::LabError,
    kernel::{
        git::{Repository, TreeId},
        series::{self, Patch, SeriesFile, all_patches},
    },
    shell::{Shell, sha256},
    values::LinuxVersion,
};

/// Changes when equal inputs have another result.
const FORMAT: u32 = 1;

/// Hashes of the inputs of passed checks.
#[derive(Debug)]
pub struct PassedChecks {
    directory: PathBuf,
    /// Base and programs.
    inputs: String,
    has_sparse: bool,
}

impl PassedChecks {
    pub fn new(directory: &Path, base: &TreeId, programs: Option<&Programs>) -> Self {
        let identity = programs.map_or("", |programs| &programs.identity);
        Self {
            directory: directory.to_owned(),
            inputs: format!("{FORMAT}\n{base}\n{identity}"),
            has_sparse: programs.is_some_and(|programs| programs.has_sparse),
        }
    }

    fn file(&self, inputs: &str) -> PathBuf {
        let key = sha256(format!("{}\n{inputs}", self.inputs).as_bytes());
        self.directory.join(&key[..32])
    }

    fn has(&self, inputs: &str) -> bool {
        self.file(inputs).is_file()
    }

    fn add(&self, inputs: &str) -> Result<(), CommandError> {
        Shell::new(false).create_dir(&self.directory)?;
        Shell::new(false).write(&self.file(inputs), "")
    }
}

/// Work tree that is switched when another tree is required.
#[derive(Debug)]
pub struct WorkTree<'a> {
    repository: &'a Repository,
    base: &'a TreeId,
    current: Option<TreeId>,
}

impl<'a> WorkTree<'a> {
    pub const fn new(repository: &'a Repository, base: &'a TreeId) -> Self {
        Self { repository, base, current: None }
    }

    fn switch_to(&mut self, tree: &TreeId) -> Result<(), CommandError> {
        if self.current.as_ref() != Some(tree) {
            self.current = None;
            self.repository.switch_to(tree)?;
            self.current = Some(tree.clone());
        }
        Ok(())
    }

    fn has_file(&self, path: &str) -> bool {
        self.repository.work_tree().join(path).is_file()
    }
}

/// Verdicts of a patch, and its problems.
#[derive(Debug, Default)]
struct Verdicts {
    columns: Vec<String>,
    problems: Vec<String>,
}

impl Verdicts {
    fn add(&mut self, name: &str, problems: Vec<String>) {
        let verdict = if problems.is_empty() { "ok" } else { "FAIL" };
        self.columns.push(format!("{name} {verdict}"));
        self.problems.extend(problems);
    }

    fn skip(&mut self, name: &str, reason: &str) {
        self.columns.push(format!("{name} SKIP ({reason})"));
    }
}

/// Check of one series.
#[derive(Debug)]
pub struct SeriesCheck<'a> {
    pub linux: &'a Path,
    pub base: LinuxVersion,
    pub name: &'a str,
    pub objects_only: bool,
    pub passed: PassedChecks,
}

/// Patches of a series, and the files that are compiled for it.
struct Compilation {
    /// Patches of the required series and of this one.
    all: Vec<Patch>,
    /// Number of patches of the required series.
    below: usize,
    /// Files that the series changes.
    files: BTreeSet<String>,
    objects_only: bool,
    /// Git trees below the series and after each of its patches, once one is required.
    trees: Option<Vec<TreeId>>,
}

impl SeriesCheck<'_> {
    /// Prints a line for each patch, and the problems. Returns the number of patches and of problems.
    pub fn run(
        &self,
        work_tree: &mut WorkTree<'_>,
        checks: &mut [ObjectCheck<'_>],
    ) -> Result<(usize, usize), LabError> {
        let directory = self.linux.join(self.base.to_string()).join(self.name);
        let file = SeriesFile::read(self.linux, self.base, self.name)?;
        let cover = fs::read_to_string(directory.join("cover-letter.txt")).unwrap_or_default();
        let patches = series::patches(self.linux, self.base, self.name)?;
        let mut count = 0;
        let mut print = |label: &str, problems: &[String]| {
            count += problems.len();
            for problem in problems {
                println!("{label}: {}", problem.trim_end());
            }
        };
        let series = format!("{}/{}", self.base, self.name);
        print(&series, &list::problems(&directory, &file, &patches, &cover));
        let all = all_patches(self.linux, self.base, self.name)?;
        let mut compilation = Compilation {
            below: all.len() - patches.len(),
            files: changed_files(&patches),
            objects_only: self.objects_only,
            all,
            trees: None,
        };
        let diffs = diff_hashes(&compilation.all);
        let letter = format!("letter {}\n{diffs:?}", sha256(cover.as_bytes()));
        let is_applied_elsewhere =
            !checks.is_empty() && self.passed.has(&letter) && self.is_known(&compilation, checks);
        if !is_applied_elsewhere {
            match compilation.change_summary(work_tree) {
                Ok(summary) => {
                    let problem = list::summary_problem(&cover, &summary);
                    print(&series, problem.as_slice());
                    if problem.is_none() {
                        self.passed.add(&letter)?;
                    }
                }
                Err(error) => {
                    print(&series, &[error.to_string()]);
                    return Ok((patches.len(), count));
                }
            }
        }
        let scratch = tempfile::tempdir()?;
        for (index, patch) in patches.iter().enumerate() {
            let mut verdicts = Verdicts::default();
            let checkpatch = self.checkpatch(patch, work_tree, scratch.path())?;
            verdicts.add("checkpatch", checkpatch.into_iter().collect());
            self.compile(&mut compilation, index, work_tree, checks, &mut verdicts)?;
            let label = format!("{series} {}/{}", index + 1, patches.len());
            println!("{label}: {}: {}", verdicts.columns.join(", "), patch.subject());
            print(&label, &verdicts.problems);
        }
        Ok((patches.len(), count))
    }

    fn checkpatch(
        &self,
        patch: &Patch,
        work_tree: &mut WorkTree<'_>,
        scratch: &Path,
    ) -> Result<Option<String>, CommandError> {
        let inputs = format!("checkpatch {}", sha256(&patch.content));
        if self.passed.has(&inputs) {
            return Ok(None);
        }
        if work_tree.current.is_none() {
            work_tree.switch_to(work_tree.base)?;
        }
        let tree = work_tree.repository.work_tree();
        let problem = Checkpatch { tree, scratch }.problem(patch)?;
        if problem.is_none() {
            self.passed.add(&inputs)?;
        }
        Ok(problem)
    }

    /// Reports whether all compilations of the series passed before.
    fn is_known(&self, compilation: &Compilation, checks: &[ObjectCheck<'_>]) -> bool {
        let count = compilation.all.len() - compilation.below;
        (0..count).all(|index| {
            let known = |(number, check): (usize, &ObjectCheck<'_>)| {
                self.passed.has(&compilation.inputs(index, check, number == 0))
            };
            checks.iter().enumerate().all(known)
        })
    }

    /// Compiles the objects of a patch in each configuration.
    fn compile(
        &self,
        compilation: &mut Compilation,
        index: usize,
        work_tree: &mut WorkTree<'_>,
        checks: &mut [ObjectCheck<'_>],
        verdicts: &mut Verdicts,
    ) -> Result<(), CommandError> {
        if checks.is_empty() {
            return Ok(());
        }
        if !compilation.has_objects() {
            verdicts.skip("objects", "none of the kernel is changed");
            return Ok(());
        }
        let mut sparse = Vec::new();
        let mut is_compiled = false;
        for (number, check) in checks.iter_mut().enumerate() {
            let name = check.configuration.name();
            let inputs = compilation.inputs(index, check, number == 0);
            if self.passed.has(&inputs) {
                is_compiled = true;
                verdicts.add(&name, Vec::new());
                continue;
            }
            let compiled = compilation.compile(index, work_tree, check, number == 0);
            let messages = match compiled {
                Ok(Compiled::Unavailable(reason)) => {
                    verdicts.skip(&name, &reason);
                    continue;
                }
                Ok(Compiled::Messages(messages)) => messages,
                Err(error @ CommandError::Failed { .. }) => {
                    verdicts.add(&name, vec![error.to_string()]);
                    continue;
                }
                Err(error) => return Err(error),
            };
            is_compiled = true;
            if messages.is_empty() {
                self.passed.add(&inputs)?;
            }
            let text =
                |message: &super::warnings::Message| format!("{name}: new: {}", message.text);
            let (of_sparse, of_compiler): (Vec<_>, Vec<_>) =
                messages.iter().partition(|message| message.tool == Tool::Sparse);
            verdicts.add(&name, of_compiler.into_iter().map(text).collect());
            sparse.extend(of_sparse.into_iter().map(text));
        }
        if is_compiled && self.passed.has_sparse {
            verdicts.add("sparse", sparse);
        } else if is_compiled {
            verdicts.skip("sparse", "not installed");
        }
        Ok(())
    }
}

fn diff_hashes(patches: &[Patch]) -> Vec<String> {
    patches.iter().map(|patch| sha256(diff(patch))).collect()
}

/// Result of the compilation of a patch.
enum Compiled {
    /// The base lacks the configuration; contains the reason.
    Unavailable(String),
    /// Messages that the base lacks.
    Messages(BTreeSet<super::warnings::Message>),
}

impl Compilation {
    /// Applies the patches in order.
    fn apply(&mut self, work_tree: &WorkTree<'_>) -> Result<&[TreeId], CommandError> {
        if self.trees.is_none() {
            let mut tree = work_tree.base.clone();
            let mut trees = vec![tree.clone()];
            for patch in &self.all {
                tree = work_tree.repository.apply(&tree, std::slice::from_ref(&patch.path))?;
                trees.push(tree.clone());
            }
            self.trees = Some(trees.split_off(self.below));
        }
        Ok(self.trees.as_deref().unwrap_or_default())
    }

    /// Applies the patches, and returns the summary of all changes of the series.
    fn change_summary(&mut self, work_tree: &WorkTree<'_>) -> Result<String, CommandError> {
        match self.apply(work_tree)? {
            [below, .., last] => work_tree.repository.change_summary(below, last),
            _ => Ok(String::new()),
        }
    }

    /// Reports whether the series changes a file that is compiled.
    fn has_objects(&self) -> bool {
        !objects(&self.files, |_| true).is_empty()
    }

    /// Returns the patches up to a patch of the series.
    fn up_to(&self, index: usize) -> &[Patch] {
        &self.all[..=self.below + index]
    }

    /// Reports whether directories are compiled too.
    fn is_complete(&self, index: usize, is_first: bool) -> bool {
        is_first && !self.objects_only && self.below + index + 1 == self.all.len()
    }

    /// Returns what the result of a patch depends on, besides base and programs.
    fn inputs(&self, index: usize, check: &ObjectCheck<'_>, is_first: bool) -> String {
        let diffs = diff_hashes(self.up_to(index));
        let is_complete = self.is_complete(index, is_first);
        format!("{diffs:?}\n{:?}\n{is_complete}\n{}", self.files, check.fragment)
    }

    /// Compiles a patch in a configuration; in the first one, also the directories that the complete
    /// series affects.
    fn compile(
        &mut self,
        index: usize,
        work_tree: &mut WorkTree<'_>,
        check: &mut ObjectCheck<'_>,
        is_first: bool,
    ) -> Result<Compiled, CommandError> {
        let tree = self.apply(work_tree)?[index + 1].clone();
        let is_complete = self.is_complete(index, is_first);
        let whole = if is_complete { directories(&self.files) } else { BTreeSet::new() };
        let kconfig: Vec<String> = (self.up_to(index).iter())
            .filter(|patch| change_kconfig(std::slice::from_ref(*patch)))
            .map(|patch| sha256(diff(patch)))
            .collect();
        work_tree.switch_to(&tree)?;
        let mut targets = objects(&self.files, |path| work_tree.has_file(path));
        targets.extend(whole.clone());
        let base = work_tree.base;
        // The files of the base that this patch adds have no object there.
        let is_in_base = |path: &str| work_tree.repository.has_entry(base, path);
        let mut targets_of_base = objects(&self.files, is_in_base);
        targets_of_base.extend(whole);
        if check.needs_base(&targets_of_base) {
            work_tree.switch_to(base)?;
            if let Some(reason) = check.configure("")? {
                return Ok(Compiled::Unavailable(reason));
            }
            check.compile_base(&targets_of_base)?;
            work_tree.switch_to(&tree)?;
        }
        if let Some(missing) = check.unavailable(&targets) {
            return Ok(Compiled::Unavailable(format!("the base does not compile {missing}")));
        }
        if let Some(reason) = check.configure(&kconfig.join(" "))? {
            return Ok(Compiled::Unavailable(reason));
        }
        Ok(Compiled::Messages(check.compile(&targets)?))
    }
}
