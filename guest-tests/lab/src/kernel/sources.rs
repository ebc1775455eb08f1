// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernel sources: Debian's `linux-source-VERSION`, a source set by `--source`, or commits of the
//! Git repository set by `--git`.
//!
//! ```text
//! CACHE/sources/ID/git/, tree/   repository and work tree (see `git`)
//! CACHE/sources/ID/base          Git tree of a package or tarball; exists after the import
//! ```
//!
//! A package or tarball is unpacked and imported once. The files of a `--source` directory are read
//! in each run; Git's index skips unchanged files. Objects of a `--git` repository are not copied.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    command::{Command, CommandError},
    error::LabError,
    kernel::{
        git::{Repository, TreeId, git, object_directory},
        revisions::UserTree,
        source_package::download,
    },
    options::SourceOptions,
    shell::{self, Shell, absolute, sha256},
    values::LinuxVersion,
};

/// Repository of a source and the Git tree of its base.
#[derive(Debug)]
pub struct Source {
    pub repository: Repository,
    /// Git tree without patches.
    pub base: TreeId,
    /// Origin, for messages: a package, a path, or a path and a commit.
    pub description: String,
    /// Version of a directory whose files a dry run does not import.
    version_of_directory: Option<LinuxVersion>,
    /// Indicates that the repository of `--git` may lack objects that its remote has.
    is_partial_clone: bool,
}

impl Source {
    const fn new(repository: Repository, base: TreeId, description: String) -> Self {
        Self { repository, base, description, version_of_directory: None, is_partial_clone: false }
    }

    /// Opens Debian's source of a version.
    pub fn open_package(
        shell: Shell,
        cache: &Path,
        version: LinuxVersion,
        suite: Option<&str>,
    ) -> Result<Self, LabError> {
        let package = download(shell, cache, &version.to_string(), suite)?;
        let id = package.file_stem().unwrap_or_default().to_string_lossy();
        Self::open_file(shell, &cache.join("sources").join(&*id), &package)
    }

    /// Opens the source that `--source` sets.
    pub fn open_path(shell: Shell, cache: &Path, path: &Path) -> Result<Self, LabError> {
        let path = absolute(path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_file() {
            let id = format!("{name}-{}", &sha256(&shell::read(&path)?)[..16]);
            return Self::open_file(shell, &cache.join("sources").join(id), &path);
        }
        check_linux(&path, |file| path.join(file).exists())?;
        let makefile = String::from_utf8_lossy(&shell::read(&path.join("Makefile"))?).into_owned();
        let directory = cache.join("sources").join(path_id(&path));
        // The files of a Git work tree are those of its commit and new ones; build results are not.
        let objects = path.join(".git").exists().then(|| object_directory(&path)).transpose()?;
        if objects.is_none() && path.join("vmlinux").exists() {
            return Err(LabError::Unusable(format!(
                "{} contains build results: set a clean tree with --source",
                path.display()
            )));
        }
        let commit = objects.as_ref().map(|_| UserTree(&path).commit("HEAD")).transpose()?;
        let repository = Repository::open(shell, &directory, objects.as_deref())?;
        let base = repository.add_directory(&path, commit.map(|commit| commit.tree).as_ref())?;
        Ok(Self {
            version_of_directory: LinuxVersion::of_makefile(&makefile),
            ..Self::new(repository, base, path.display().to_string())
        })
    }

    /// Opens the repository that `--git` sets, with the tree of a commit as its base.
    pub fn open_git(
        shell: Shell,
        cache: &Path,
        path: &Path,
        base: TreeId,
    ) -> Result<Self, LabError> {
        let path = absolute(path)?;
        let objects = object_directory(&path)?;
        let directory = cache.join("sources").join(path_id(&objects));
        let repository = Repository::open(shell, &directory, Some(&objects))?;
        let description = path.display().to_string();
        let source = Self {
            is_partial_clone: is_partial_clone(&path),
            ..Self::new(repository, base, description)
        };
        source.check_objects(&source.base)?;
        check_linux(&path, |file| source.repository.has_entry(&source.base, file))?;
        Ok(source)
    }

    /// Refuses a tree of which a partial clone lacks files. The objects of a user's repository are
    /// only read, so Git does not fetch them.
    fn check_objects(&self, tree: &TreeId) -> Result<(), LabError> {
        if !self.is_partial_clone || tree.is_placeholder() {
            return Ok(());
        }
        let list = self
            .repository
            .query("listing the objects of the source")
            .args(["rev-list", "--objects", "--missing=print", &tree.to_string()])
            .query()?;
        match list.lines().filter(|line| line.starts_with('?')).count() {
            0 => Ok(()),
            count => Err(LabError::Unusable(format!(
                "{path} is a partial clone that lacks {count} objects of the tree {tree}: fetch all \
                 objects with `git -C {path} fetch --refetch --no-filter`",
                path = self.description
            ))),
        }
    }

    /// Unpacks and imports a package or a tarball, unless it is in the cache.
    fn open_file(shell: Shell, directory: &Path, file: &Path) -> Result<Self, LabError> {
        let description = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let base_file = directory.join("base");
        // An empty file is one that a full disk or a power loss has left.
        if let Some(base) = fs::read_to_string(&base_file).ok().filter(|base| !base.is_empty()) {
            let repository = Repository::open(shell, directory, None)?;
            return Ok(Self::new(repository, TreeId::new(&base), description));
        }
        shell.remove_dir(directory)?;
        let unpacked = unpack(shell, directory, file)?;
        if !shell.is_dry_run() {
            let refused = check_linux(file, |name| unpacked.join(name).exists());
            refused.inspect_err(|_| drop(fs::remove_dir_all(directory)))?;
        }
        let repository = Repository::open(shell, directory, None)?;
        let base = repository.add_directory(&unpacked, None)?;
        // The files move to the work tree, so the first switch writes none of them.
        shell.remove_dir(repository.work_tree())?;
        shell.rename(&unpacked, repository.work_tree())?;
        let index = repository.git_dir();
        shell.rename(&index.join("added.index"), &index.join("index"))?;
        shell.remove_dir(&directory.join("partial"))?;
        shell.replace(&base_file, base.to_string())?;
        Ok(Self::new(repository, base, description))
    }

    /// Returns the Linux version of a tree of this source; `None` in a dry run without the source.
    pub fn version(&self, tree: &TreeId) -> Result<Option<LinuxVersion>, LabError> {
        self.check_objects(tree)?;
        let version = if tree.is_placeholder() {
            let Some(version) = self.version_of_directory else { return Ok(None) };
            Some(version)
        } else {
            LinuxVersion::of_makefile(&self.repository.read_file(tree, "Makefile")?)
        };
        let version = version.ok_or_else(|| not_linux(&self.description))?;
        if version < LinuxVersion::OLDEST {
            return Err(LabError::Unusable(format!(
                "{} is Linux {version}: the lab supports Linux {} and newer",
                self.description,
                LinuxVersion::OLDEST
            )));
        }
        Ok(Some(version))
    }
}

/// Opens the source of the base: a package, or the source set by `--source`. Refuses a source of
/// another version than `--base`.
pub fn open_base(shell: Shell, cache: &Path, origin: &SourceOptions) -> Result<Source, LabError> {
    let Some(path) = &origin.source else {
        let version = origin.base.unwrap_or(SourceOptions::DEFAULT_BASE);
        return Source::open_package(shell, cache, version, origin.suite.as_deref());
    };
    let check = |found: Option<LinuxVersion>| match (found, origin.base) {
        (Some(found), Some(base)) if found != base => Err(LabError::Unusable(format!(
            "--source {} is Linux {found}, --base is {base}: set one of them to the other's version",
            path.display()
        ))),
        _ => Ok(()),
    };
    // The version of a directory is checked before its files are imported.
    if let Ok(makefile) = fs::read_to_string(path.join("Makefile")) {
        check(LinuxVersion::of_makefile(&makefile))?;
    }
    let source = Source::open_path(shell, cache, path)?;
    check(source.version(&source.base)?)?;
    Ok(source)
}

/// Reports whether Git cloned only some objects of a repository (`git clone --filter`).
fn is_partial_clone(path: &Path) -> bool {
    const PROMISOR: &str = r"^(extensions\.partialclone|remote\..*\.promisor)$";
    let query = git("finding a partial clone").arg("-C").arg(path);
    query.args(["config", "--get-regexp", PROMISOR]).query().is_ok()
}

/// Returns a directory name for a path: its last component, and a hash of the whole path.
fn path_id(path: &Path) -> String {
    // The object directory of a repository is PATH/.git/objects or PATH.git/objects.
    let mut names = path.components().rev().map(|part| part.as_os_str().to_string_lossy());
    let name = names.find(|name| !matches!(&**name, "objects" | ".git" | "/"));
    format!("{}-{}", name.unwrap_or_default(), &sha256(path.as_os_str().as_encoded_bytes())[..12])
}

fn check_linux(path: &Path, exists: impl Fn(&str) -> bool) -> Result<(), LabError> {
    match ["Makefile", "arch/arm64"].into_iter().all(exists) {
        true => Ok(()),
        false => Err(not_linux(&path.display().to_string())),
    }
}

fn not_linux(description: &str) -> LabError {
    LabError::Unusable(format!(
        "{description} is not a Linux source: it has no Makefile with a version, or no arch/arm64"
    ))
}

/// Unpacks a package or a tarball and returns the directory with its files.
fn unpack(shell: Shell, directory: &Path, origin: &Path) -> Result<PathBuf, CommandError> {
    let partial = directory.join("partial");
    let log = directory.join("unpack.log");
    shell.create_dir(&partial)?;
    let unpacked = partial.join("tree");
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
    // Objects of an earlier import may be newer than the times in the tarball, and make would keep
    // them: the files have the time of this import.
    let unpack = Command::new("unpacking the source", "tar")
        .args(["--strip-components=1", "--touch", "-xf"])
        .arg(&tarball)
        .arg("-C")
        .arg(&unpacked)
        .log(&log);
    shell.run(&unpack)?;
    Ok(unpacked)
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
    use crate::kernel::revisions::tests::repository;

    fn small_tree(at: &Path) {
        fs::create_dir_all(at.join("arch/arm64")).unwrap();
        fs::write(at.join("arch/arm64/Kconfig"), "").unwrap();
        fs::write(at.join("Makefile"), "VERSION = 6\nPATCHLEVEL = 12\n").unwrap();
    }

    fn origin(source: &Path) -> SourceOptions {
        SourceOptions { source: Some(source.to_owned()), ..SourceOptions::default() }
    }

    #[test]
    fn the_tree_of_a_directory_depends_on_its_files_only() {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("linux");
        small_tree(&source);
        let cache = directory.path().join("cache");
        let open = || open_base(Shell::new(false), &cache, &origin(&source)).unwrap();

        let first = open();
        let checkout = first.repository.switch_to(&first.base).unwrap();
        fs::write(source.join("Makefile"), "VERSION = 6\nPATCHLEVEL = 18\n").unwrap();
        let changed = open();
        small_tree(&source);
        let restored = open();

        assert_eq!(first.base, restored.base);
        assert_ne!(first.base, changed.base);
        assert_eq!(changed.version(&changed.base).unwrap().unwrap().to_string(), "6.18");
        assert!(checkout.path.join("arch/arm64/Kconfig").is_file());
    }

    #[test]
    fn a_directory_of_another_version_than_the_base_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        small_tree(directory.path());
        let cache = directory.path().join("cache");
        let origin = SourceOptions { base: "5.10".parse().ok(), ..origin(directory.path()) };

        let error = open_base(Shell::new(false), &cache, &origin).unwrap_err().to_string();

        assert!(error.contains("is Linux 6.12, --base is 5.10"), "{error}");
    }

    /// Returns the path of a tarball in `directory` with files of the year 1970.
    fn tarball(directory: &Path) -> PathBuf {
        small_tree(&directory.join("linux-6.12"));
        let tarball = directory.join("linux.tar");
        let pack = Command::new("packing", "tar").args(["--mtime=@1", "-cf"]).arg(&tarball);
        pack.args(["-C".as_ref(), directory, "linux-6.12".as_ref()]).run().unwrap();
        tarball
    }

    #[test]
    fn imported_files_are_newer_than_the_objects_of_an_earlier_import() {
        let directory = tempfile::tempdir().unwrap();
        let tarball = tarball(directory.path());
        let object = fs::metadata(&tarball).unwrap().modified().unwrap();

        let cache = directory.path().join("cache");
        let source = Source::open_path(Shell::new(false), &cache, &tarball).unwrap();

        let file = fs::metadata(source.repository.work_tree().join("Makefile")).unwrap();
        assert!(file.modified().unwrap() >= object);
    }

    #[test]
    fn a_tarball_is_imported_once_without_its_top_directory() {
        let directory = tempfile::tempdir().unwrap();
        let tarball = tarball(directory.path());
        let cache = directory.path().join("cache");

        let first = Source::open_path(Shell::new(false), &cache, &tarball).unwrap();
        let again = Source::open_path(Shell::new(false), &cache, &tarball).unwrap();

        assert_eq!(first.base, again.base);
        let checkout = again.repository.switch_to(&again.base).unwrap();
        assert!(checkout.path.join("arch/arm64").is_dir());
    }

    #[test]
    fn a_partial_clone_is_refused_with_the_command_that_completes_it() {
        let user = repository(&["1", "2"]);
        let run = |args: &[&str]| {
            git("x").arg("-C").arg(user.path()).args(args).query().unwrap();
        };
        run(&["config", "uploadpack.allowFilter", "true"]);
        let url = format!("file://{}", user.path().display());
        run(&["clone", "-q", "--filter=blob:none", "--no-checkout", &url, "part"]);
        let (part, cache) = (user.path().join("part"), user.path().join("cache"));
        let tree = UserTree(&part).commit("HEAD").unwrap().tree;
        let open = || Source::open_git(Shell::new(false), &cache, &part, tree.clone());

        let error = open().unwrap_err().to_string();
        run(&["-C", "part", "fetch", "-q", "--refetch", "--no-filter"]);

        assert!(error.contains("lacks 2 objects") && error.contains("--refetch"), "{error}");
        open().unwrap();
    }

    #[test]
    fn a_source_that_is_not_linux_is_refused_and_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("empty");
        fs::create_dir(&source).unwrap();
        let cache = directory.path().join("cache");

        let error = open_base(Shell::new(false), &cache, &origin(&source)).unwrap_err();

        assert!(error.to_string().contains("is not a Linux source"), "{error}");
        assert!(!cache.join("sources").exists());
    }
}
