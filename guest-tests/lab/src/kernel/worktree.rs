// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Applies patches to the cached tree and reverts them.
//!
//! All kernels of one source are built from one tree at one path, so that objects remain valid and
//! `make` recompiles only files that depend on patched ones. Files are copied before a patch:
//!
//! ```text
//! sources/ID/tree/…        the tree
//! sources/ID/originals/…   copies of the files that patches change
//! sources/ID/touched       names of these files; written between the last copy and the first patch
//! ```
//!
//! A revert restores every file in `touched` with its original time, or removes it if a patch
//! created it, and then removes the list. The next run completes an interrupted revert.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    command::{Command, CommandError},
    kernel::{series::Patch, sources::Tree},
    shell::Shell,
};

/// Reverts the applied patches and applies `patches`. After an error, the tree is unpatched.
pub fn switch_to(shell: Shell, tree: &Tree, patches: &[Patch]) -> Result<(), CommandError> {
    revert(shell, tree)?;
    if patches.is_empty() {
        return Ok(());
    }
    copy_originals(shell, tree, patches)?;
    if let Err(error) = apply(shell, &tree.path, patches, &tree.directory.join("patch.log")) {
        revert(shell, tree)?;
        return Err(error);
    }
    Ok(())
}

/// Applies patches to a tree. The log contains the output of `patch` for the last patch only.
pub fn apply(shell: Shell, tree: &Path, patches: &[Patch], log: &Path) -> Result<(), CommandError> {
    for patch in patches {
        let name = patch.path.file_name().unwrap_or_default();
        if !shell.is_dry_run() {
            let _ = fs::remove_file(log);
        }
        let apply = Command::new(format!("applying {}", name.display()), "patch")
            .args(["--strip=1", "--forward", "--fuzz=0", "--no-backup-if-mismatch"])
            .args(["--reject-file=-", "-i"])
            .arg(&patch.path)
            .directory(tree)
            .log(log);
        shell.run(&apply)?;
    }
    Ok(())
}

fn copy_originals(shell: Shell, tree: &Tree, patches: &[Patch]) -> Result<(), CommandError> {
    let files: BTreeSet<PathBuf> = patches.iter().flat_map(Patch::files).collect();
    let originals = tree.directory.join("originals");
    shell.remove_dir(&originals)?;
    let mut list = String::new();
    for file in &files {
        list.push_str(&format!("{}\n", file.display()));
        let from = tree.path.join(file);
        if !from.exists() {
            continue;
        }
        let to = originals.join(file);
        shell.create_dir(to.parent().unwrap_or(&originals))?;
        copy_with_time(shell, &from, &to)?;
    }
    let partial = tree.directory.join("touched.partial");
    shell.write(&partial, list)?;
    shell.rename(&partial, &tree.directory.join("touched"))
}

pub fn revert(shell: Shell, tree: &Tree) -> Result<(), CommandError> {
    let touched = tree.directory.join("touched");
    let list = match fs::read_to_string(&touched) {
        Ok(list) => list,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(CommandError::file("read", touched, error)),
    };
    let originals = tree.directory.join("originals");
    for file in list.lines() {
        let original = originals.join(file);
        let path = tree.path.join(file);
        if original.exists() {
            copy_with_time(shell, &original, &path)?;
        } else if path.exists() {
            shell.run(&Command::new("removing the file of a patch", "rm").arg(&path))?;
        }
    }
    shell.run(&Command::new("removing the list of patched files", "rm").arg(&touched))?;
    shell.remove_dir(&originals)
}

fn copy_with_time(shell: Shell, from: &Path, to: &Path) -> Result<(), CommandError> {
    let copy = Command::new(format!("copying {}", from.display()), "cp")
        .args(["--preserve=mode,timestamps", "--remove-destination"])
        .args([from, to]);
    shell.run(&copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATCH: &str = "--- a/one.c\n+++ b/one.c\n@@ -1 +1 @@\n-old\n+new\n\
                         --- /dev/null\n+++ b/two.c\n@@ -0,0 +1 @@\n+added\n";

    struct Fixture {
        _directory: tempfile::TempDir,
        tree: Tree,
        patch: Patch,
    }

    fn fixture(patch: &str) -> Fixture {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().to_owned();
        let tree = Tree { id: "x".to_owned(), path: root.join("tree"), directory: root.clone() };
        fs::create_dir(&tree.path).unwrap();
        fs::write(tree.path.join("one.c"), "old\n").unwrap();
        let path = root.join("0001.patch");
        fs::write(&path, patch).unwrap();
        Fixture { _directory: directory, tree, patch: Patch { path, content: patch.into() } }
    }

    fn content(fixture: &Fixture) -> (String, bool) {
        let one = fs::read_to_string(fixture.tree.path.join("one.c")).unwrap();
        (one, fixture.tree.path.join("two.c").exists())
    }

    #[test]
    fn patches_are_applied_and_reverted_with_the_original_times() {
        let fixture = fixture(PATCH);
        let shell = Shell::new(false);
        let time = || {
            let metadata = fs::metadata(fixture.tree.path.join("one.c")).unwrap();
            metadata.modified().unwrap()
        };
        let before = time();

        switch_to(shell, &fixture.tree, std::slice::from_ref(&fixture.patch)).unwrap();
        let patched = content(&fixture);
        switch_to(shell, &fixture.tree, &[]).unwrap();

        assert_eq!(patched, ("new\n".to_owned(), true));
        assert_eq!(content(&fixture), ("old\n".to_owned(), false));
        assert_eq!(time(), before);
    }

    #[test]
    fn the_next_run_completes_an_interrupted_revert() {
        let fixture = fixture(PATCH);
        let shell = Shell::new(false);
        let patches = std::slice::from_ref(&fixture.patch);
        switch_to(shell, &fixture.tree, patches).unwrap();
        fs::remove_file(fixture.tree.path.join("one.c")).unwrap(); // killed during the revert

        switch_to(shell, &fixture.tree, patches).unwrap();

        assert_eq!(content(&fixture), ("new\n".to_owned(), true));
    }

    #[test]
    fn a_patch_that_does_not_apply_leaves_the_original_tree() {
        let fixture = fixture(&PATCH.replace("-old", "-other"));

        let error =
            switch_to(Shell::new(false), &fixture.tree, std::slice::from_ref(&fixture.patch))
                .unwrap_err();

        assert!(error.to_string().contains("0001.patch"), "{error}");
        assert_eq!(content(&fixture), ("old\n".to_owned(), false));
    }
}
