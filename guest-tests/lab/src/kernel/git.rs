// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A Git repository of the cache: kernel trees as Git tree objects, and a work tree for builds.
//!
//! ```text
//! CACHE/sources/ID/git/    repository with its own index
//! CACHE/sources/ID/tree/   work tree, which contains one Git tree
//! ```
//!
//! The work tree is switched between Git trees. Git writes only files that differ, so `make`
//! compiles only what depends on them. A user's repository is never written: this repository reads
//! its objects through `objects/info/alternates`.
//!
//! Patches are applied to an index, without the work tree, so the Git tree of a patched kernel is
//! known before its build. A dry run applies them in a temporary repository.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

use crate::{
    command::{Command, CommandError},
    in_use,
    shell::{self, Shell},
};

/// Hash of a Git tree, which identifies the content of a kernel source.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TreeId(String);

impl TreeId {
    pub fn new(hash: &str) -> Self {
        Self(hash.trim().to_owned())
    }

    /// Returns the ID of a tree that a dry run cannot know.
    pub fn placeholder() -> Self {
        Self("TREE".to_owned())
    }

    pub fn is_placeholder(&self) -> bool {
        self.0 == "TREE"
    }
}

impl fmt::Display for TreeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Configuration that a user's configuration must not replace, because it changes files.
const CONFIGURATION: &str = "[core]\n\trepositoryformatversion = 0\n\tbare = true\n\
                             \tautocrlf = false\n\tfsmonitor = false\n\
                             \tattributesFile = /dev/null\n\thooksPath = /dev/null\n\
                             [gc]\n\tauto = 0\n";

/// Returns a `git` command that takes no lock unless it must.
pub fn git(task: impl Into<String>) -> Command {
    Command::new(task, "git").env("GIT_OPTIONAL_LOCKS", "0")
}

#[derive(Debug)]
pub struct Repository {
    shell: Shell,
    git_dir: PathBuf,
    work_tree: PathBuf,
    /// Temporary repository of a dry run, which can read the objects of `git_dir`.
    dry: Option<TempDir>,
}

impl Repository {
    /// Opens the repository in `directory`, and creates it if it is missing. It reads the objects
    /// of the repository with the object directory `objects`.
    pub fn open(
        shell: Shell,
        directory: &Path,
        objects: Option<&Path>,
    ) -> Result<Self, CommandError> {
        let git_dir = directory.join("git");
        let work_tree = directory.join("tree");
        let dry = shell.is_dry_run().then(tempfile::tempdir).transpose();
        let dry = dry.map_err(|e| CommandError::file("create", "a temporary directory", e))?;
        let repository = Self { shell, git_dir, work_tree, dry };
        let create = |shell: Shell, path: &Path| {
            let init = git("creating a repository").args(["init", "-q", "--bare", "--template="]);
            shell.run(&init.arg(path))?;
            shell.create_dir(&path.join("objects/info"))?;
            shell.write(&path.join("config"), CONFIGURATION)
        };
        if let Some(dry) = &repository.dry {
            let really = Shell::new(false);
            create(really, dry.path())?;
            let own = repository.git_dir.join("objects");
            let alternates = objects.into_iter().chain(own.is_dir().then_some(own.as_path()));
            let list: String = alternates.map(|path| format!("{}\n", path.display())).collect();
            really.write(&dry.path().join("objects/info/alternates"), list)?;
        }
        if !repository.git_dir.join("HEAD").is_file() {
            shell.create_dir(&repository.work_tree)?;
            create(shell, &repository.git_dir)?;
        }
        if !shell.is_dry_run() {
            in_use::touch(directory);
        }
        if let Some(objects) = objects {
            let alternates = repository.git_dir.join("objects/info/alternates");
            shell.write(&alternates, format!("{}\n", objects.display()))?;
        }
        Ok(repository)
    }

    pub fn work_tree(&self) -> &Path {
        &self.work_tree
    }

    pub fn git_dir(&self) -> &Path {
        &self.git_dir
    }

    /// Returns a `git` command on this repository.
    pub fn git(&self, task: impl Into<String>) -> Command {
        git(task).arg("--git-dir").arg(&self.git_dir)
    }

    /// Returns a `git` command without effect on the cache, also in a dry run.
    pub fn query(&self, task: impl Into<String>) -> Command {
        git(task).arg("--git-dir").arg(self.query_dir())
    }

    fn query_dir(&self) -> &Path {
        self.dry.as_ref().map_or(&self.git_dir, TempDir::path)
    }

    /// Adds all files of a directory, and returns their Git tree. With `seed`, begins with the
    /// files of this tree, and adds no other file that `.gitignore` excludes.
    pub fn add_directory(
        &self,
        directory: &Path,
        seed: Option<&TreeId>,
    ) -> Result<TreeId, CommandError> {
        let index = self.git_dir.join("added.index");
        self.remove_lock(&index);
        let task = "reading the source";
        if let Some(seed) = seed {
            // The times of files that are equal in both remain, so they are not read again.
            let read = self.git(task).env("GIT_INDEX_FILE", &index);
            self.shell.run(&read.args(["read-tree", "--reset"]).arg(seed.to_string()))?;
        }
        // Large files are written to one pack, so the threshold makes a pack of all files.
        let add = git(task)
            .env("GIT_INDEX_FILE", &index)
            .args(["-c", "core.bigFileThreshold=1", "-c", "core.compression=1"])
            .arg("--git-dir")
            .arg(&self.git_dir)
            .arg("--work-tree")
            .arg(directory)
            .args(["add", "--all"])
            .args(seed.is_none().then_some("--force"))
            .arg(".")
            .directory(directory);
        self.shell.run(&add)?;
        let write = self.git(task).env("GIT_INDEX_FILE", &index).arg("write-tree");
        if self.shell.is_dry_run() {
            self.shell.print(&write);
            return Ok(TreeId::placeholder());
        }
        Ok(TreeId::new(&write.query()?))
    }

    /// Applies patches to a tree, in order, and returns the Git tree of the result.
    pub fn apply(&self, tree: &TreeId, patches: &[PathBuf]) -> Result<TreeId, CommandError> {
        if patches.is_empty() {
            return Ok(tree.clone());
        }
        let task = "applying patches";
        if tree.is_placeholder() {
            for patch in patches {
                self.shell.print(self.git(task).args(["apply", "--cached"]).arg(patch));
            }
            return Ok(TreeId::placeholder());
        }
        let run = |task: String, args: &[&str], patch: Option<&Path>| {
            let with_index = |command: Command, directory: &Path| {
                let index = directory.join("apply.index");
                command.env("GIT_INDEX_FILE", index).args(args).args(patch)
            };
            self.shell.print(with_index(self.git(task.clone()), &self.git_dir));
            with_index(self.query(task), self.query_dir()).query()
        };
        self.remove_lock(&self.query_dir().join("apply.index"));
        run(task.to_owned(), &["read-tree", &tree.to_string()], None)?;
        for patch in patches {
            let name = patch.file_name().unwrap_or_default().display();
            let args = ["apply", "--cached", "--whitespace=nowarn"];
            run(format!("applying {name}"), &args, Some(patch))?;
        }
        Ok(TreeId::new(&run(task.to_owned(), &["write-tree"], None)?))
    }

    /// Returns the numbers of files and lines that differ between two trees, as the last line of a
    /// diffstat has them.
    pub fn change_summary(&self, from: &TreeId, to: &TreeId) -> Result<String, CommandError> {
        self.query("summarizing the changes")
            .args(["diff-tree", "--shortstat", "-M", "--diff-algorithm=myers"])
            .args([from.to_string(), to.to_string()])
            .query()
    }

    /// Removes the lock that a killed run has left; the lock of the cache excludes another run.
    fn remove_lock(&self, index: &Path) {
        if !self.shell.is_dry_run() {
            let _ = std::fs::remove_file(index.with_added_extension("lock"));
        }
    }

    /// Writes the files of a Git tree to the work tree, and removes all other files.
    pub fn switch_to(&self, tree: &TreeId) -> Result<Checkout, CommandError> {
        self.remove_lock(&self.git_dir.join("index"));
        let task = "switching the work tree";
        let command = || self.git(task).arg("--work-tree").arg(&self.work_tree);
        let read = command().args(["read-tree", "-u", "--reset"]).arg(tree.to_string());
        self.shell.run(&read.directory(&self.work_tree))?;
        let clean = command().args(["clean", "-ffdxq"]).directory(&self.work_tree);
        self.shell.run(&clean)?;
        Ok(Checkout { path: self.work_tree.clone() })
    }

    /// Reports whether a tree has a file or directory of this path.
    pub fn has_entry(&self, tree: &TreeId, path: &str) -> bool {
        let entry = format!("{tree}:{path}");
        self.query(format!("finding {path}")).args(["cat-file", "-e", &entry]).query().is_ok()
    }

    /// Returns the content of a file of a tree.
    pub fn read_file(&self, tree: &TreeId, path: &str) -> Result<String, CommandError> {
        self.query(format!("reading {path}"))
            .args(["cat-file", "blob"])
            .arg(format!("{tree}:{path}"))
            .query()
    }
}

/// Files of a Git tree in a work tree.
#[derive(Debug, Clone)]
pub struct Checkout {
    pub path: PathBuf,
}

/// Returns the object directory of the user's repository that contains `tree`.
pub fn object_directory(tree: &Path) -> Result<PathBuf, CommandError> {
    let path = git("finding the Git repository")
        .arg("-C")
        .arg(tree)
        .args(["rev-parse", "--path-format=absolute", "--git-path", "objects"])
        .query()?;
    shell::absolute(Path::new(path.trim_end_matches('\n')))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::kernel::revisions::{UserTree, tests::repository};

    #[test]
    fn the_work_tree_has_the_files_of_the_last_tree_only() {
        let user = repository(&["1", "2"]);
        let commit = |revision| UserTree(user.path()).commit(revision).unwrap();
        let cache = tempfile::tempdir().unwrap();
        let objects = object_directory(user.path()).unwrap();
        let repository = Repository::open(Shell::new(false), cache.path(), Some(&objects)).unwrap();

        let checkout = repository.switch_to(&commit("HEAD").tree).unwrap();
        fs::write(checkout.path.join("f"), "edited").unwrap();
        fs::write(checkout.path.join("result.o"), "").unwrap();
        fs::write(repository.git_dir().join("index.lock"), "").unwrap(); // of a killed run
        repository.switch_to(&commit("HEAD~1").tree).unwrap();

        assert_eq!(fs::read_to_string(checkout.path.join("f")).unwrap(), "1");
        assert!(!checkout.path.join("result.o").exists());
    }

    #[test]
    fn an_unchanged_file_keeps_its_time_when_the_tree_is_switched() {
        let user = repository(&["1", "2"]);
        let commit = |revision| UserTree(user.path()).commit(revision).unwrap();
        let cache = tempfile::tempdir().unwrap();
        let objects = object_directory(user.path()).unwrap();
        let repository = Repository::open(Shell::new(false), cache.path(), Some(&objects)).unwrap();
        let time = |name: &str| {
            let file = fs::metadata(repository.work_tree().join(name)).unwrap();
            file.modified().unwrap()
        };

        repository.switch_to(&commit("HEAD").tree).unwrap();
        let before = (time("Makefile"), time("f"));
        repository.switch_to(&commit("HEAD~1").tree).unwrap();

        assert_eq!(time("Makefile"), before.0);
        assert!(time("f") > before.1);
    }

    #[test]
    fn patches_are_applied_to_a_tree_and_a_dry_run_writes_nothing() {
        let user = repository(&["old\n"]);
        let base = UserTree(user.path()).commit("HEAD").unwrap().tree;
        let directory = tempfile::tempdir().unwrap();
        let patch = directory.path().join("1.patch");
        fs::write(&patch, "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-old\n+new\n").unwrap();
        let objects = object_directory(user.path()).unwrap();
        let cache = directory.path().join("cache");
        let apply = |dry_run| {
            let repository = Repository::open(Shell::new(dry_run), &cache, Some(&objects)).unwrap();
            (repository.apply(&base, std::slice::from_ref(&patch)).unwrap(), repository)
        };

        let (planned, _) = apply(true);
        let untouched = !cache.exists();
        let (patched, repository) = apply(false);
        let refused = repository.apply(&patched, std::slice::from_ref(&patch)).unwrap_err();

        assert!(untouched);
        assert_eq!(planned, patched);
        assert_eq!(repository.read_file(&patched, "f").unwrap(), "new\n");
        assert!(refused.to_string().contains("applying 1.patch failed"), "{refused}");
    }
}
