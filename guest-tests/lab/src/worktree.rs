// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Patches in and out of the cached tree.
//!
//! All kernels of one source are built from one tree at one path, so that objects stay valid from
//! one kernel to the next and only what a patch touches is compiled again. Before a patch is
//! applied the files it touches are kept beside the tree:
//!
//! ```text
//! sources/ID/tree/…        the tree
//! sources/ID/originals/…   files that patches touch, as they came
//! sources/ID/touched       their names; written once all of them are kept, before any is changed
//! ```
//!
//! Taking patches out puts every file named in `touched` back with its old time (or removes it,
//! where there was none), then forgets them. Each step can be repeated, so a run that was
//! interrupted anywhere is put right by the next.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use super::{
    series::Patch,
    sources::Tree,
    step::{Shell, Step, StepError},
};

/// Makes the tree the plain source with these patches.
///
/// # Errors
/// A patch does not apply (the tree is plain again then), or a file cannot be changed.
pub fn switch_to(shell: Shell, tree: &Tree, patches: &[Patch]) -> Result<(), StepError> {
    restore(shell, tree)?;
    if patches.is_empty() {
        return Ok(());
    }
    keep_originals(shell, tree, patches)?;
    for patch in patches {
        let name = patch.path.file_name().unwrap_or_default();
        let log = tree.folder.join("patch.log");
        if !shell.is_dry() {
            let _ = fs::remove_file(&log);
        }
        let apply = Step::new(format!("applying {}", name.display()), "patch")
            .args([
                "-p1",
                "-N",
                "-F0",
                "--no-backup-if-mismatch",
                "-r",
                "-",
                "-i",
            ])
            .arg(&patch.path)
            .dir(&tree.path)
            .log(&log);
        if let Err(error) = shell.run(&apply) {
            restore(shell, tree)?;
            return Err(error);
        }
    }
    Ok(())
}

fn keep_originals(shell: Shell, tree: &Tree, patches: &[Patch]) -> Result<(), StepError> {
    let files: BTreeSet<PathBuf> = patches.iter().flat_map(Patch::files).collect();
    let originals = tree.folder.join("originals");
    shell.remove_dir(&originals)?;
    let mut list = String::new();
    for file in &files {
        list.push_str(&format!("{}\n", file.display()));
        let from = tree.path.join(file);
        if !from.exists() {
            continue;
        }
        let to = originals.join(file);
        shell.make_dir(to.parent().unwrap_or(&originals))?;
        copy_with_time(shell, &from, &to)?;
    }
    let partial = tree.folder.join("touched.partial");
    shell.write(&partial, list)?;
    shell.rename(&partial, &tree.folder.join("touched"))
}

/// Makes the tree the plain source.
///
/// # Errors
/// A file cannot be put back.
pub fn restore(shell: Shell, tree: &Tree) -> Result<(), StepError> {
    let touched = tree.folder.join("touched");
    let list = match fs::read_to_string(&touched) {
        Ok(list) => list,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(StepError::file("read", touched, error)),
    };
    for file in list.lines() {
        let original = tree.folder.join("originals").join(file);
        let path = tree.path.join(file);
        if original.exists() {
            copy_with_time(shell, &original, &path)?;
        } else if path.exists() {
            shell.run(&Step::new("removing a patch's file", "rm").arg(&path))?;
        }
    }
    shell.run(&Step::new("forgetting the patches", "rm").arg(&touched))?;
    shell.remove_dir(&tree.folder.join("originals"))
}

fn copy_with_time(shell: Shell, from: &Path, to: &Path) -> Result<(), StepError> {
    let copy = Step::new(format!("copying {}", from.display()), "cp")
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
        _folder: tempfile::TempDir,
        tree: Tree,
        patch: Patch,
    }

    fn fixture(patch: &str) -> Fixture {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_owned();
        let tree = Tree {
            id: "x".to_owned(),
            path: root.join("tree"),
            folder: root.clone(),
        };
        fs::create_dir(&tree.path).unwrap();
        fs::write(tree.path.join("one.c"), "old\n").unwrap();
        let path = root.join("0001.patch");
        fs::write(&path, patch).unwrap();
        Fixture {
            _folder: folder,
            tree,
            patch: Patch {
                path,
                content: patch.into(),
            },
        }
    }

    fn content(fixture: &Fixture) -> (String, bool) {
        let one = fs::read_to_string(fixture.tree.path.join("one.c")).unwrap();
        (one, fixture.tree.path.join("two.c").exists())
    }

    #[test]
    fn patches_go_in_and_out_with_the_old_times() {
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
    fn an_interrupted_run_is_put_right_by_the_next() {
        let fixture = fixture(PATCH);
        let shell = Shell::new(false);
        let patches = std::slice::from_ref(&fixture.patch);
        switch_to(shell, &fixture.tree, patches).unwrap();
        fs::remove_file(fixture.tree.path.join("one.c")).unwrap(); // killed while putting back

        switch_to(shell, &fixture.tree, patches).unwrap();

        assert_eq!(content(&fixture), ("new\n".to_owned(), true));
    }

    #[test]
    fn a_patch_that_does_not_apply_leaves_the_plain_tree() {
        let fixture = fixture(&PATCH.replace("-old", "-other"));

        let error = switch_to(
            Shell::new(false),
            &fixture.tree,
            std::slice::from_ref(&fixture.patch),
        )
        .unwrap_err();

        assert!(error.to_string().contains("0001.patch"), "{error}");
        assert_eq!(content(&fixture), ("old\n".to_owned(), false));
    }
}
