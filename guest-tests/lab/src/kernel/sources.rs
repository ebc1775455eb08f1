// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernel sources in the cache: Debian's `linux-source-VERSION`, or the source set by `--source`.
//!
//! ```text
//! CACHE/sources/ID/tree/   the unpacked tree; ID is the package and its version, or a hash
//! ```

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use crate::{
    LabError,
    command::{Command, CommandError},
    kernel::source_package::download,
    options::KernelOptions,
    shell::{self, Shell, sha256},
};

/// Kernel tree in the cache, possibly with patches applied.
#[derive(Debug, Clone)]
pub struct Tree {
    /// Package and version, or a hash.
    pub id: String,
    /// Directory in the cache that contains the tree.
    pub directory: PathBuf,
    pub path: PathBuf,
}

/// Downloads and unpacks the source, unless it is in the cache.
pub fn cached_tree(shell: Shell, cache: &Path, kernels: &KernelOptions) -> Result<Tree, LabError> {
    let (id, origin) = match &kernels.source {
        Some(source) => (source_id(source)?, source.clone()),
        None => {
            let package = download(shell, cache, &kernels.base, kernels.suite.as_deref())?;
            let stem = package.file_stem().unwrap_or_default();
            (stem.to_string_lossy().into_owned(), package)
        }
    };
    let directory = cache.join("sources").join(&id);
    let path = directory.join("tree");
    let tree = Tree { id, directory, path };
    if !tree.path.is_dir() {
        unpack(shell, &tree, &origin)?;
    }
    let is_linux = ["Makefile", "arch/arm64"].iter().all(|name| tree.path.join(name).exists());
    if !shell.is_dry_run() && !is_linux {
        let _ = fs::remove_dir_all(&tree.directory);
        return Err(LabError::Unusable(format!(
            "{} is not a Linux source: it has no Makefile and arch/arm64",
            origin.display()
        )));
    }
    Ok(tree)
}

/// Returns the ID of the source set by `--source`: a hash of the file's content, or of the
/// tree's file names, sizes and times.
fn source_id(source: &Path) -> Result<String, CommandError> {
    let name = source.file_name().unwrap_or_default().to_string_lossy();
    if source.is_file() {
        let sum = sha256(&shell::read(source)?);
        return Ok(format!("{name}-{}", &sum[..16]));
    }
    let mut hasher = DefaultHasher::new();
    hash_tree(source, &mut hasher).map_err(|e| CommandError::file("read", source, e))?;
    Ok(format!("{name}-{:016x}", hasher.finish()))
}

fn hash_tree(directory: &Path, hasher: &mut DefaultHasher) -> std::io::Result<()> {
    let mut entries: Vec<_> = fs::read_dir(directory)?.collect::<Result<_, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        if entry.file_name() == ".git" {
            continue;
        }
        let metadata = entry.metadata()?;
        entry.file_name().hash(hasher);
        if metadata.is_dir() {
            hash_tree(&entry.path(), hasher)?;
        } else {
            metadata.len().hash(hasher);
            let time = metadata.modified()?.duration_since(UNIX_EPOCH);
            time.unwrap_or_default().hash(hasher);
        }
    }
    Ok(())
}

/// Unpacks the source to a temporary path and renames it, so that an existing tree is complete.
fn unpack(shell: Shell, tree: &Tree, origin: &Path) -> Result<(), CommandError> {
    let partial = tree.directory.join("partial");
    let log = tree.directory.join("unpack.log");
    shell.remove_dir(&partial)?;
    shell.create_dir(&partial)?;
    let unpacked = partial.join("tree");
    if origin.is_dir() {
        let copy =
            Command::new("copying the source", "cp").arg("-a").args([origin, &unpacked]).log(&log);
        shell.run(&copy)?;
    } else {
        let mut tarball = origin.to_owned();
        if origin.extension().is_some_and(|e| e == "deb") {
            let extract = Command::new("opening the package", "dpkg-deb")
                .arg("-x")
                .args([origin, &partial.join("package")])
                .log(&log);
            shell.run(&extract)?;
            tarball = inner_tarball(&partial.join("package/usr/src"));
        }
        shell.create_dir(&unpacked)?;
        let unpack = Command::new("unpacking the source", "tar")
            .args(["--strip-components=1", "-xf"])
            .arg(&tarball)
            .arg("-C")
            .arg(&unpacked)
            .log(&log);
        shell.run(&unpack)?;
    }
    shell.rename(&unpacked, &tree.path)?;
    shell.remove_dir(&partial)
}

/// Returns the path of the tarball in an unpacked source package.
fn inner_tarball(directory: &Path) -> PathBuf {
    let names = shell::sorted_entries(directory);
    let tarball = names.into_iter().find(|name| name.contains(".tar."));
    directory.join(tarball.as_deref().unwrap_or("linux-source-*.tar.xz"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernels(source: PathBuf) -> KernelOptions {
        KernelOptions { source: Some(source), ..KernelOptions::of_base("5.10") }
    }

    fn small_tree(at: &Path) {
        fs::create_dir_all(at.join("arch/arm64")).unwrap();
        fs::write(at.join("Makefile"), "VERSION = 5\n").unwrap();
    }

    #[test]
    fn a_given_tree_is_copied_and_recognized() {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("linux");
        small_tree(&source);
        let cache = directory.path().join("cache");
        let options = kernels(source.clone());

        let first = cached_tree(Shell::new(false), &cache, &options).unwrap();
        let again = cached_tree(Shell::new(false), &cache, &options).unwrap();
        fs::write(source.join("Makefile"), "VERSION = 55\n").unwrap();
        let changed = cached_tree(Shell::new(false), &cache, &options).unwrap();

        assert_eq!(first.id, again.id);
        assert_ne!(first.id, changed.id);
        assert!(first.path.join("Makefile").is_file());
    }

    #[test]
    fn a_tarball_is_unpacked_without_its_top_directory() {
        let directory = tempfile::tempdir().unwrap();
        small_tree(&directory.path().join("linux-5.10"));
        let tarball = directory.path().join("linux.tar");
        let pack = Command::new("packing", "tar").arg("-cf").arg(&tarball).args([
            "-C".as_ref(),
            directory.path(),
            "linux-5.10".as_ref(),
        ]);
        pack.run().unwrap();

        let cache = directory.path().join("cache");
        let tree = cached_tree(Shell::new(false), &cache, &kernels(tarball)).unwrap();

        assert!(tree.path.join("arch/arm64").is_dir());
    }

    #[test]
    fn a_source_that_is_not_linux_is_refused_and_removed() {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("empty");
        fs::create_dir(&source).unwrap();
        let cache = directory.path().join("cache");

        let error = cached_tree(Shell::new(false), &cache, &kernels(source)).unwrap_err();

        assert!(error.to_string().contains("is not a Linux source"), "{error}");
        assert_eq!(fs::read_dir(cache.join("sources")).unwrap().count(), 0);
    }
}
