// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks the text of a series: its lists, its subjects and the kernel's checkpatch.

use std::path::Path;

use crate::{
    command::{Command, CommandError},
    kernel::series::{Patch, SeriesFile},
    shell::{self, Shell},
};

const MAX_SUBJECT_LENGTH: usize = 72;

/// Checkpatch of a kernel tree.
pub struct Checkpatch<'a> {
    /// Files of the base.
    pub tree: &'a Path,
    /// Directory for copies of the patches and for logs.
    pub scratch: &'a Path,
}

impl Checkpatch<'_> {
    /// Runs checkpatch on an untracked copy: checkpatch treats a tracked file as kernel source.
    pub fn problem(&self, patch: &Patch) -> Result<Option<String>, CommandError> {
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

/// Returns the problems of the lists of a series: the file `series` and the cover letter.
pub fn problems(
    directory: &Path,
    file: &SeriesFile,
    patches: &[Patch],
    cover: &str,
) -> Vec<String> {
    let mut problems = unlisted_patches(directory, file);
    problems.extend(subject_problems(patches, cover));
    problems
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

/// Compares the last line of the cover letter's diffstat, if it has one, with that of the changes.
pub fn summary_problem(cover: &str, summary: &str) -> Option<String> {
    let is_summary = |line: &&str| {
        let mut words = line.split(' ').skip(1);
        matches!(words.next(), Some("file" | "files")) && words.next() == Some("changed,")
    };
    let found = cover.lines().map(str::trim).find(is_summary)?;
    (found != summary.trim())
        .then(|| format!("cover-letter.txt: '{found}'; the changes are: {}", summary.trim()))
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

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
    fn the_cover_letter_sums_up_the_changes() {
        let cover = "A file changed once.\n a.c | 2 +-\n 1 file changed, 2 insertions(+)\n";

        assert_eq!(summary_problem(cover, "1 file changed, 2 insertions(+)"), None);
        assert_eq!(summary_problem("without diffstat", "1 file changed, 2 insertions(+)"), None);
        assert!(summary_problem(cover, "2 files changed, 2 insertions(+)").is_some());
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
