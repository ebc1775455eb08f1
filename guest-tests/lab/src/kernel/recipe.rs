// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Recipes of the kernels of a run: for each kernel a Git tree and the settings of its build.
//!
//! ```text
//! --git TREE BEFORE..AFTER [--each]      the commits BEFORE, (between,) AFTER
//! base + --series NAME | --patches MAIL  base, (patches 1..n,) all patches
//! --variant SETTING                      the last of these without and with the setting
//! ```
//!
//! The base is Debian's source (`--base`), a directory or tarball (`--source`), or a commit
//! (`--git TREE REVISION`).

use std::{fmt, path::PathBuf};

use granule_types::record::Series;

use crate::{
    error::LabError,
    kernel::{
        git::TreeId,
        mail::MailedSeries,
        revisions::{Commit, Order, UserTree},
        series::{self, DEFAULT_SERIES, stacks},
        sources::{Source, open_base},
    },
    options::{KernelOptions, Paths, SourceOptions},
    shell::{Shell, absolute},
    values::{BuildSetting, LinuxVersion, Revisions},
};

/// Name of the kernel without patches.
pub const BASE_NAME: &str = "base";
/// Directory of a run with copies of its programs.
pub const PROGRAMS_DIRECTORY: &str = "programs";
/// Directory of a run with the scripts and logs of Slurm's jobs.
pub const SLURM_DIRECTORY: &str = "slurm";
/// Names that mailed patches cannot have: that of the base, and of other directories of a run.
const RESERVED_NAMES: [&str; 3] = [BASE_NAME, PROGRAMS_DIRECTORY, SLURM_DIRECTORY];

/// Source and settings of one kernel.
#[derive(Debug, Clone)]
pub struct Recipe {
    /// Name of the kernel's directory.
    pub name: String,
    /// Subject of the last patch or commit, if there is one.
    pub title: Option<String>,
    pub tree: TreeId,
    /// Applied series; `None` for a commit, whose patches are not known.
    pub series: Option<Vec<Series>>,
    pub commit: Option<Commit>,
    pub settings: Vec<BuildSetting>,
}

impl Recipe {
    /// Returns the kernel without patches.
    pub fn of_base(tree: TreeId) -> Self {
        Self {
            name: BASE_NAME.to_owned(),
            title: None,
            tree,
            series: Some(Vec::new()),
            commit: None,
            settings: Vec::new(),
        }
    }

    pub fn of_commit(name: String, commit: Commit) -> Self {
        Self {
            name,
            title: Some(commit.subject.clone()),
            tree: commit.tree.clone(),
            series: None,
            commit: Some(commit),
            settings: Vec::new(),
        }
    }
}

impl Recipe {
    /// Describes commit or series, and settings, for the list of the cache.
    pub fn origin(&self) -> String {
        let commit = self.commit.as_ref().map(Commit::title);
        let series = granule_report::series_line(self.series.as_deref());
        let title = commit.or(series).or_else(|| self.title.clone());
        let settings = self.settings.iter().map(ToString::to_string);
        title.into_iter().chain(settings).collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.commit {
            Some(commit) => write!(f, "{}, commit {}", self.name, commit.title()),
            None => f.write_str(&self.name),
        }
    }
}

/// Kernels of a run, the base first, and their source.
#[derive(Debug)]
pub struct RecipeBook {
    pub source: Source,
    /// Version of the base; `None` in a dry run without the source.
    pub version: Option<LinuxVersion>,
    pub recipes: Vec<Recipe>,
    /// Revisions of `--git`, with each name replaced by the hash of its commit.
    pub revisions: Option<Revisions>,
    /// Message about a run without a comparison, or about the base of mailed patches.
    remark: Option<String>,
}

impl RecipeBook {
    /// Reads sources and patches, and resolves revisions.
    pub fn new(shell: Shell, paths: &Paths, kernels: &KernelOptions) -> Result<Self, LabError> {
        let mut book = match (&kernels.git, &kernels.patches) {
            (Some(tree), None) => of_revisions(shell, paths, kernels, UserTree(&absolute(tree)?))?,
            (_, Some(_)) => of_mail(shell, paths, kernels)?,
            (None, None) => {
                let source = open_base(shell, &paths.cache, &kernels.origin)?;
                of_series(source, paths, kernels, None)?
            }
        };
        if !kernels.variants.is_empty()
            && let Some(last) = book.recipes.pop()
        {
            let mut variant = last.clone();
            for (text, setting) in &kernels.variants {
                variant.name.push_str(&format!("+{}", directory_name(text)));
                variant.settings.push(setting.clone());
            }
            book.recipes = vec![last, variant];
        }
        book.retain_named(&kernels.only_kernels)?;
        Ok(book)
    }

    fn retain_named(&mut self, names: &[String]) -> Result<(), LabError> {
        if names.is_empty() {
            return Ok(());
        }
        let known: Vec<String> = self.recipes.iter().map(|recipe| recipe.name.clone()).collect();
        self.recipes.retain(|recipe| names.contains(&recipe.name));
        if let Some(unknown) = names.iter().find(|name| !known.contains(name)) {
            return Err(LabError::Unusable(format!(
                "unknown kernel '{unknown}' in --only; expected one of: {}",
                known.join(", ")
            )));
        }
        Ok(())
    }

    /// Describes in one line what the run compares.
    pub fn summary(&self) -> String {
        let source = &self.source.description;
        let version = self.version.map_or_else(String::new, |version| format!("Linux {version}, "));
        let mut line = match self.recipes.as_slice() {
            [] => "no kernel".to_owned(),
            [kernel] => format!("no comparison: only {kernel} ({version}{source})"),
            [before, between @ .., after] => {
                let between = match between.len() {
                    0 => String::new(),
                    count => format!(", and {count} between them one by one"),
                };
                format!("comparing {before} with {after}{between} ({version}{source})")
            }
        };
        if let Some(remark) = &self.remark {
            line.push_str(&format!("; {remark}"));
        }
        line
    }
}

fn of_revisions(
    shell: Shell,
    paths: &Paths,
    kernels: &KernelOptions,
    tree: UserTree<'_>,
) -> Result<RecipeBook, LabError> {
    let (before, after) = match &kernels.revisions {
        None => ("HEAD", None),
        Some(Revisions::One(revision)) => (revision.as_str(), None),
        Some(Revisions::Range { before, after }) => (before.as_str(), Some(after.as_str())),
    };
    let first = tree.commit(before)?;
    let source = Source::open_git(shell, &paths.cache, tree.0, first.tree.clone())?;
    let Some(after) = after else {
        return of_series(
            source,
            paths,
            kernels,
            Some(Recipe::of_commit(BASE_NAME.to_owned(), first)),
        );
    };
    if !kernels.series.is_empty() {
        return Err(LabError::Unusable(
            "--series applies to one revision: set one, or omit --series".to_owned(),
        ));
    }
    let last = tree.commit(after)?;
    if last.tree == first.tree {
        return Err(LabError::Unusable(format!(
            "{before} and {after} have the same files, so there is nothing to compare"
        )));
    }
    let remark = match tree.order(&first, &last) {
        Order::Ancestor => None,
        Order::Descendant => Some(format!("{after} is an ancestor of {before}")),
        Order::Diverged => Some(format!(
            "{before} is no ancestor of {after}: the kernels also differ in the commits of {before}"
        )),
    };
    let revisions = Some(Revisions::Range { before: first.hash.clone(), after: last.hash.clone() });
    let between = match kernels.each {
        true => tree.commits(&first, &last)?,
        false => vec![last],
    };
    let mut recipes = vec![Recipe::of_commit("before".to_owned(), first)];
    let count = between.len();
    for (index, commit) in between.into_iter().enumerate() {
        let name = match index + 1 == count {
            true => "after".to_owned(),
            false => format!("{}-{}", index + 1, commit.short_hash()),
        };
        recipes.push(Recipe::of_commit(name, commit));
    }
    let version = source.version(&source.base)?;
    Ok(RecipeBook { source, version, recipes, revisions, remark })
}

/// Returns the base and the kernels of `--series`.
fn of_series(
    source: Source,
    paths: &Paths,
    kernels: &KernelOptions,
    base: Option<Recipe>,
) -> Result<RecipeBook, LabError> {
    let version = source.version(&source.base)?;
    // A dry run cannot read a source that is not in the cache.
    let known = version.or(kernels.origin.base).unwrap_or(SourceOptions::DEFAULT_BASE);
    let mut request = kernels.clone();
    let names = series::series_names(&paths.linux, known);
    if request.series.is_empty() && base.is_none() {
        request.series = names.clone();
        request.series.retain(|name| name == DEFAULT_SERIES);
    }
    let mut recipes = Vec::new();
    for stack in stacks(&paths.linux, known, &request)? {
        let files: Vec<PathBuf> = stack.patches.iter().map(|patch| patch.path.clone()).collect();
        recipes.push(match (&base, files.is_empty()) {
            (Some(base), true) => base.clone(),
            _ => Recipe {
                title: stack.patches.last().map(series::Patch::subject),
                tree: source.repository.apply(&source.base, &files)?,
                name: stack.name,
                series: Some(stack.series),
                commit: None,
                settings: Vec::new(),
            },
        });
    }
    let is_single = recipes.len() == 1 && kernels.variants.is_empty();
    let remark = is_single.then(|| match (&base, names.as_slice()) {
        (Some(_), []) => "set BEFORE..AFTER, --patches or --variant".to_owned(),
        (Some(_), names) => format!(
            "set BEFORE..AFTER, --patches or --variant, or --series to one of: {}",
            names.join(", ")
        ),
        (None, []) => "set BEFORE..AFTER with --git, --patches or --variant".to_owned(),
        (None, names) => format!("set --series to one of: {}", names.join(", ")),
    });
    let commit = base.and_then(|base| base.commit);
    let revisions = commit.map(|commit| Revisions::One(commit.hash));
    Ok(RecipeBook { source, version, recipes, revisions, remark })
}

/// Returns the base and the kernels of `--patches`.
fn of_mail(shell: Shell, paths: &Paths, kernels: &KernelOptions) -> Result<RecipeBook, LabError> {
    let mail = MailedSeries::read(kernels.patches.as_deref().unwrap_or("".as_ref()))?;
    let mut remark = None;
    let (source, commit) = match &kernels.git {
        Some(path) => {
            let revision = match (&kernels.revisions, &mail.base_commit) {
                (Some(Revisions::One(revision)), _) => revision,
                (None, Some(hash)) => hash,
                (Some(Revisions::Range { .. }), _) => {
                    return Err(LabError::Unusable(
                        "--patches applies to one revision: set one instead of BEFORE..AFTER"
                            .into(),
                    ));
                }
                (None, None) => {
                    return Err(LabError::Unusable(
                        "the patches have no line 'base-commit:': set the revision to which they \
                         apply: --git TREE REVISION"
                            .to_owned(),
                    ));
                }
            };
            let path = absolute(path)?;
            let commit = UserTree(&path).commit(revision)?;
            let tree = commit.tree.clone();
            (Source::open_git(shell, &paths.cache, &path, tree)?, Some(commit))
        }
        None => {
            if let Some(hash) = &mail.base_commit {
                remark = Some(format!("the patches are for commit {hash}: --git sets its tree"));
            }
            (open_base(shell, &paths.cache, &kernels.origin)?, None)
        }
    };
    let name = mailed_name(&mail.name);
    // Without a revision, the patches name their base.
    let given = commit.as_ref().filter(|_| kernels.revisions.is_some());
    let revisions = given.map(|commit| Revisions::One(commit.hash.clone()));
    let mut recipes = vec![Recipe { commit, ..Recipe::of_base(source.base.clone()) }];
    let mut tree = source.base.clone();
    let all = mail.patches.len();
    for (index, patch) in mail.patches.iter().enumerate() {
        let count = index + 1;
        tree = source.repository.apply(&tree, std::slice::from_ref(&patch.path)).map_err(
            |source| {
                let message = format!("patch {count} of {all} does not apply: {}", patch.subject);
                LabError::Failed { message, source }
            },
        )?;
        if count < all && !kernels.each {
            continue;
        }
        let patches = u32::try_from(count).unwrap_or(u32::MAX);
        recipes.push(Recipe {
            name: if count < all { format!("{name}-{count}") } else { name.clone() },
            title: Some(patch.subject.clone()),
            tree: tree.clone(),
            series: Some(vec![Series { name: name.clone(), patches }]),
            commit: None,
            settings: Vec::new(),
        });
    }
    let version = source.version(&source.base)?;
    Ok(RecipeBook { source, version, recipes, revisions, remark })
}

/// Returns the name of the kernel with the patches of a file or directory of this name.
fn mailed_name(file: &str) -> String {
    match directory_name(file) {
        name if RESERVED_NAMES.contains(&name.as_str()) => "patched".to_owned(),
        name => name,
    }
}

/// Replaces the characters of a name that a directory name cannot have.
fn directory_name(text: &str) -> String {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._=+-".contains(c);
    let name: String = text.chars().map(|c| if allowed(c) { c } else { '-' }).collect();
    name.trim_start_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{jobs::matrix::tests::options, kernel::revisions::tests::repository};

    const PATCH: &str = "From: A <a@example>\nSubject: [PATCH 1/1] Change f\n\n---\n\
                         --- a/f\n+++ b/f\n@@ -1 +1 @@\n-3\n+4\n";

    /// Returns the recipes of a command line, and the directory in which `TREE` is a repository with
    /// three commits, and `MAIL` a directory with a patch for the last one.
    fn book(line: &str) -> Result<(RecipeBook, tempfile::TempDir), LabError> {
        let user = repository(&["1\n", "2\n", "3\n"]);
        let directory = tempfile::tempdir().unwrap();
        let mail = directory.path().join("mail");
        fs::create_dir(&mail).unwrap();
        fs::write(mail.join("1.patch"), PATCH).unwrap();
        let line = line
            .replace("TREE", &user.path().display().to_string())
            .replace("MAIL", &mail.display().to_string());
        let options = options(&format!("lab --cache {} {line}", directory.path().display()));
        let paths = Paths::new(&options.common).unwrap();

        RecipeBook::new(Shell::new(false), &paths, &options.common.kernels).map(|book| (book, user))
    }

    /// Returns the summary and the names of the kernels of a command line.
    fn plan(line: &str) -> Result<(String, String), LabError> {
        let (book, user) = book(line)?;
        let hash = |text: &str| {
            let is_hash =
                |word: &str| word.len() == 12 && word.bytes().all(|b| b.is_ascii_hexdigit());
            let words = text.split_inclusive([' ', '-']);
            words
                .map(|word| if is_hash(word.trim_end()) { "HASH " } else { word })
                .collect::<String>()
        };
        let names: Vec<&str> = book.recipes.iter().map(|recipe| recipe.name.as_str()).collect();
        let user = user.path().display().to_string();
        Ok((hash(&book.summary().replace(&user, "TREE")), hash(&names.join(" "))))
    }

    #[test]
    fn the_summary_states_what_is_compared() {
        for (line, summary, names) in [
            (
                "--git TREE HEAD~2..HEAD",
                "comparing before, commit HASH (\"Write 1\n\") with",
                "before after",
            ),
            ("--git TREE HEAD~2.. --each", "and 1 between them one by one", "before 1-HASH  after"),
            ("--git TREE HEAD", "no comparison: only base, commit HASH", "base"),
            ("--git TREE --variant LLVM=1", "with base+LLVM=1", "base base+LLVM=1"),
            ("--git TREE HEAD --patches MAIL", "with mail (Linux 6.12, TREE)", "base mail"),
            ("--git TREE HEAD~2..HEAD --only after", "no comparison: only after", "after"),
            ("--git TREE HEAD..HEAD~1", "HEAD~1 is an ancestor of HEAD", "before after"),
            (
                "--git TREE HEAD --patches MAIL --variant CONFIG_X=y",
                "comparing mail with mail+CONFIG_X=y",
                "mail mail+CONFIG_X=y",
            ),
        ] {
            let (found, kernels) = plan(line).unwrap();

            assert!(
                found.replace('\n', "").contains(&summary.replace('\n', "")),
                "{line}: {found}"
            );
            assert_eq!(kernels.replace("  ", " "), names.replace("  ", " "), "{line}");
        }
    }

    #[test]
    fn the_recipes_have_the_hashes_of_their_revisions() {
        for (line, expected) in [
            ("--git TREE HEAD~2..HEAD", Some("HEAD~2 HEAD")),
            ("--git TREE", Some("HEAD")),
            ("--git TREE HEAD~1", Some("HEAD~1")),
            ("--git TREE HEAD --patches MAIL", Some("HEAD")),
        ] {
            let (book, user) = book(line).unwrap();

            let found = match book.revisions {
                Some(Revisions::One(one)) => Some(one),
                Some(Revisions::Range { before, after }) => Some(format!("{before} {after}")),
                None => None,
            };
            let hash = |name: &str| UserTree(user.path()).commit(name).unwrap().hash;
            let hashes = |names: &str| names.split(' ').map(hash).collect::<Vec<_>>().join(" ");
            assert_eq!(found, expected.map(hashes), "{line}");
        }
    }

    #[test]
    fn mailed_patches_do_not_have_the_name_of_another_directory() {
        let names = ["topic", "base", "programs", "slurm"].map(mailed_name);

        assert_eq!(names, ["topic", "patched", "patched", "patched"]);
    }

    #[test]
    fn a_run_that_would_compare_nothing_is_refused_with_the_reason() {
        for (line, reason) in [
            ("--git TREE HEAD..HEAD", "have the same files"),
            ("--git TREE HEAD..HEAD~1 --each", "is an ancestor of"),
            ("--git TREE --patches MAIL", "base-commit"),
            ("--git TREE HEAD~1 --patches MAIL", "patch 1 of 1 does not apply: Change f"),
            ("--git TREE HEAD~1..HEAD --patches MAIL", "applies to one revision"),
            ("--git TREE HEAD~1..HEAD --series x", "applies to one revision"),
            ("--git TREE HEAD --only x", "unknown kernel 'x'"),
            ("--git TREE v1.0", "'v1.0' is no commit"),
        ] {
            let error = plan(line).unwrap_err().to_string();

            assert!(error.contains(reason), "{line}: {error}");
        }
    }
}
