// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks every Linux series against the source of its base.
//!
//! The file `series` lists every patch in its directory, the cover letter lists all subjects,
//! subjects have at most 72 characters, the patches apply in order, and the kernel's checkpatch
//! reports nothing except missing sign-offs.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    LabError,
    command::{Command, CommandError},
    kernel::{
        lock_cache,
        series::{self, Patch, SeriesFile, all_patches},
        sources::Source,
    },
    shell::{self, Shell},
    values::LinuxVersion,
};

const MAX_SUBJECT_LENGTH: usize = 72;

/// Checks all series below `linux` and prints their problems; returns whether all are free of
/// problems. `source` replaces the source of every base.
///
/// # Errors
/// A source is not available, or a program cannot be run.
pub fn check_all(linux: &Path, cache: &Path, source: Option<&Path>) -> Result<bool, LabError> {
    let shell = Shell::new(false);
    let _lock = lock_cache(shell, cache)?;
    let mut clean = true;
    for base in series::bases(linux) {
        let source = match source {
            Some(path) => Source::open_path(shell, cache, path)?,
            None => Source::open_package(shell, cache, base, None)?,
        };
        let tree = source.repository.switch_to(&source.base)?.path;
        let checkpatch = tree.join("scripts/checkpatch.pl");
        fs::metadata(&checkpatch).map_err(|e| CommandError::file("find", checkpatch, e))?;
        for name in series::series_names(linux, base) {
            let scratch = tempfile::tempdir()?;
            let check = SeriesCheck {
                linux,
                base,
                name: &name,
                source: &source,
                tree: &tree,
                scratch: scratch.path(),
            };
            let patches = series::patches(linux, base, &name)?;
            println!("{base}/{name}: {} patches against {}", patches.len(), source.description);
            let problems = check.find_problems(&patches)?;
            clean &= problems.is_empty();
            for problem in problems {
                println!("{base}/{name}: {problem}");
            }
        }
    }
    Ok(clean)
}

struct SeriesCheck<'a> {
    linux: &'a Path,
    base: LinuxVersion,
    name: &'a str,
    source: &'a Source,
    /// Files of the base.
    tree: &'a Path,
    /// Directory for copies of the patches and for logs.
    scratch: &'a Path,
}

impl SeriesCheck<'_> {
    fn find_problems(&self, patches: &[Patch]) -> Result<Vec<String>, LabError> {
        let directory = self.linux.join(self.base.to_string()).join(self.name);
        let file = SeriesFile::read(self.linux, self.base, self.name)?;
        let cover = fs::read_to_string(directory.join("cover-letter.txt")).unwrap_or_default();
        let mut problems = unlisted_patches(&directory, &file);
        problems.extend(subject_problems(patches, &cover));
        let all = all_patches(self.linux, self.base, self.name)?;
        let files: Vec<PathBuf> = all.into_iter().map(|patch| patch.path).collect();
        let applied = self.source.repository.apply(&self.source.base, &files);
        problems.extend(applied.err().map(|error| error.to_string()));
        for patch in patches {
            problems.extend(self.checkpatch_problem(patch)?);
        }
        Ok(problems)
    }

    /// Runs checkpatch on an untracked copy: checkpatch treats a tracked file as kernel source.
    fn checkpatch_problem(&self, patch: &Patch) -> Result<Option<String>, LabError> {
        let name = patch.path.file_name().unwrap_or_default();
        let copy = self.scratch.join(name);
        Shell::new(false).copy(&patch.path, &copy)?;
        let log = copy.with_extension("log");
        let check = Command::new(format!("checkpatch of {}", name.display()), "perl")
            .arg(self.tree.join("scripts/checkpatch.pl"))
            .arg(format!("--root={}", self.tree.display()))
            .args(["--quiet", "--show-types", "--no-signoff"])
            // The repository of the source has no history, in which a `Fixes:` line could be found.
            .args(["--ignore", "FILE_PATH_CHANGES,UNKNOWN_COMMIT_ID"])
            .arg(copy)
            .directory(self.scratch)
            .log(log);
        Ok(check.run().err().map(|error| error.to_string()))
    }
}

/// Returns the patches in the directory that the file `series` does not list.
fn unlisted_patches(directory: &Path, file: &SeriesFile) -> Vec<String> {
    let unlisted = |name: &String| name.ends_with(".patch") && !file.patches.contains(name);
    let entries = shell::sorted_entries(directory).into_iter().filter(unlisted);
    entries.map(|name| format!("'series' does not list {name}")).collect()
}

/// Compares the subjects of the patches with the list in the cover letter.
fn subject_problems(patches: &[Patch], cover: &str) -> Vec<String> {
    let subjects: Vec<String> = patches.iter().map(Patch::subject).collect();
    let mut problems: Vec<String> = subjects
        .iter()
        .filter(|subject| subject.len() > MAX_SUBJECT_LENGTH)
        .map(|subject| format!("subject of more than {MAX_SUBJECT_LENGTH} characters: {subject}"))
        .collect();
    let listed: Vec<&str> = cover
        .lines()
        .skip_while(|line| !line.starts_with("Granule developers"))
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.strip_prefix(' '))
        .collect();
    if listed != subjects {
        problems.push(format!(
            "cover-letter.txt does not list the subjects of the patches in order; expected:\n {}",
            subjects.join("\n ")
        ));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patch(subject: &str) -> Patch {
        Patch {
            path: PathBuf::new(),
            content: format!("From: x\nSubject: [PATCH 1/2] {subject}\n\nbody\n").into_bytes(),
        }
    }

    #[test]
    fn the_cover_letter_lists_all_subjects_in_order() {
        let patches = [patch("KVM: arm64: One\n that is folded"), patch("KVM: Two")];
        let cover = "x\n\nGranule developers (2):\n KVM: arm64: One that is folded\n KVM: Two\n\n";

        assert_eq!(subject_problems(&patches, cover), [""; 0]);
        assert_eq!(subject_problems(&patches[..1], cover).len(), 1);
        let long = [patch(&"x".repeat(MAX_SUBJECT_LENGTH + 1))];
        assert_eq!(subject_problems(&long, "").len(), 2);
    }

    #[test]
    fn an_unlisted_patch_is_a_problem() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("1.patch"), "").unwrap();
        let file =
            |patch: &str| SeriesFile { required_series: None, patches: vec![patch.to_owned()] };

        assert_eq!(unlisted_patches(directory.path(), &file("1.patch")), [""; 0]);
        assert_eq!(unlisted_patches(directory.path(), &file("../x/1.patch")).len(), 1);
    }
}
