// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Commits of a user's Git repository, which is only read.

use std::path::Path;

use crate::{
    command::Command,
    error::LabError,
    kernel::git::{TreeId, git},
    options::KernelOptions,
    values::Revisions,
};

/// Commit of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Commit {
    pub hash: String,
    pub subject: String,
    pub tree: TreeId,
    /// Hashes of the parents; a merge has several.
    pub parents: Vec<String>,
}

impl Commit {
    /// Returns the first 12 digits of the hash, as kernel developers quote it.
    pub fn short_hash(&self) -> &str {
        self.hash.get(..12).unwrap_or(&self.hash)
    }

    /// Formats hash and subject as in a `Fixes:` line.
    pub fn title(&self) -> String {
        format!("{} (\"{}\")", self.short_hash(), self.subject)
    }
}

/// Returns the revisions with each name replaced by the hash of its commit, so that they do not move.
pub fn pinned(kernels: &KernelOptions) -> Result<Option<Revisions>, LabError> {
    let Some(tree) = &kernels.git else { return Ok(None) };
    let hash = |revision: &str| Ok::<_, LabError>(UserTree(tree).commit(revision)?.hash);
    Ok(Some(match &kernels.revisions {
        // The patches name their base.
        None if kernels.patches.is_some() => return Ok(None),
        None => Revisions::One(hash("HEAD")?),
        Some(Revisions::One(revision)) => Revisions::One(hash(revision)?),
        Some(Revisions::Range { before, after }) => {
            Revisions::Range { before: hash(before)?, after: hash(after)? }
        }
    }))
}

/// Place of a commit in the history of another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// It is in the history of the other one.
    Ancestor,
    /// The other one is in its history.
    Descendant,
    Diverged,
}

/// A user's repository.
#[derive(Debug, Clone, Copy)]
pub struct UserTree<'a>(pub &'a Path);

impl UserTree<'_> {
    fn git(self, task: &str) -> Command {
        git(task).arg("-C").arg(self.0)
    }

    /// Returns the commit of a revision.
    pub fn commit(self, revision: &str) -> Result<Commit, LabError> {
        self.git("opening the Git repository").args(["rev-parse", "--git-dir"]).query()?;
        let commits = self.log(&["-1", revision]).ok();
        commits.and_then(|mut commits| commits.pop()).ok_or_else(|| {
            LabError::Unusable(format!(
                "'{revision}' is no commit of {}: fetch it, or set another revision",
                self.0.display()
            ))
        })
    }

    /// Returns the commits after `before` up to `after` on the first-parent line, oldest first.
    pub fn commits(self, before: &Commit, after: &Commit) -> Result<Vec<Commit>, LabError> {
        let (one, other) = (before.title(), after.title());
        let reason = match self.order(before, after) {
            Order::Ancestor => return self.first_parents(&before.hash, &after.hash),
            Order::Descendant => format!("{other} is an ancestor of {one}: swap them"),
            Order::Diverged => format!(
                "{one} is no ancestor of {other}: set their common ancestor instead (git merge-base)"
            ),
        };
        Err(LabError::Unusable(reason))
    }

    /// Returns the place of `commit` in the history of `other`.
    pub fn order(self, commit: &Commit, other: &Commit) -> Order {
        let base = self
            .git("finding the common ancestor")
            .args(["merge-base", &commit.hash, &other.hash])
            .query();
        // Git fails for commits without a common ancestor.
        let base = base.unwrap_or_default();
        match base.trim() {
            base if base == commit.hash => Order::Ancestor,
            base if base == other.hash => Order::Descendant,
            _ => Order::Diverged,
        }
    }

    /// Returns the commits on the first-parent line of `after` that `before` does not contain,
    /// oldest first.
    pub fn first_parents(self, before: &str, after: &str) -> Result<Vec<Commit>, LabError> {
        Ok(self.log(&["--reverse", "--first-parent", &format!("{before}..{after}")])?)
    }

    fn log(self, arguments: &[&str]) -> Result<Vec<Commit>, crate::command::CommandError> {
        let text = self
            .git("reading the commits")
            .args(["log", "--no-show-signature", "--no-color", "--format=%H%x09%T%x09%P%x09%s"])
            .args(&arguments[..arguments.len() - 1])
            .arg("--end-of-options")
            .args(arguments.last())
            .arg("--")
            .query()?;
        let commit = |line: &str| {
            let mut fields = line.splitn(4, '\t');
            let (hash, tree) = (fields.next()?.to_owned(), TreeId::new(fields.next()?));
            let parents = fields.next()?.split_ascii_whitespace().map(str::to_owned).collect();
            Some(Commit { hash, tree, parents, subject: fields.next()?.to_owned() })
        };
        Ok(text.lines().filter_map(commit).collect())
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Creates a repository with one commit for each content of the file `f`.
    pub fn repository(contents: &[&str]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let git = |args: &[&str]| {
            let identity = ["-c", "user.name=A", "-c", "user.email=a@example"];
            git("x").args(identity).arg("-C").arg(directory.path()).args(args).query().unwrap()
        };
        git(&["init", "-q"]);
        std::fs::create_dir_all(directory.path().join("arch/arm64")).unwrap();
        for name in ["Makefile", "arch/arm64/Kconfig"] {
            let makefile = "VERSION = 6\nPATCHLEVEL = 12\n";
            std::fs::write(directory.path().join(name), makefile).unwrap();
        }
        for content in contents {
            std::fs::write(directory.path().join("f"), content).unwrap();
            git(&["add", "--all"]);
            git(&["commit", "-q", "-m", &format!("Write {content}")]);
        }
        directory
    }

    #[test]
    fn commits_of_a_range_are_listed_oldest_first() {
        let directory = repository(&["1", "2", "3"]);
        let tree = UserTree(directory.path());
        let (before, after) = (tree.commit("HEAD~2").unwrap(), tree.commit("HEAD").unwrap());

        let commits = tree.commits(&before, &after).unwrap();

        let subjects: Vec<_> = commits.iter().map(|commit| commit.subject.as_str()).collect();
        assert_eq!(subjects, ["Write 2", "Write 3"]);
        assert_eq!(commits[1], after);
        let swapped = tree.commits(&after, &before).unwrap_err().to_string();
        assert!(
            swapped.contains("(\"Write 1\") is an ancestor of") && swapped.contains("swap them")
        );
    }

    #[test]
    fn an_unknown_revision_is_refused_by_name() {
        let directory = repository(&["1"]);

        let error = UserTree(directory.path()).commit("v9.9").unwrap_err();

        assert!(error.to_string().contains("'v9.9' is no commit of"), "{error}");
    }
}
