// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel source: Debian's `linux-source-VERSION`, or what `--source` gives, unpacked once into
//! the cache.
//!
//! ```text
//! CACHE/apt/SUITE/         a private package configuration for that suite
//! CACHE/packages/*.deb     packages as they came
//! CACHE/sources/ID/tree/   the unpacked tree; ID names the package or the hash of what was given
//! ```
//!
//! A package that is in the cache is taken from there: nothing goes out a second time.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use thiserror::Error;

use super::{
    apt::{AptError, System},
    frames::sha256,
    options::Kernels,
    step::{self, Shell, Step, StepError},
};

/// Why there is no source.
#[derive(Debug, Error)]
pub enum SourceError {
    /// The package configuration is of no help.
    #[error(transparent)]
    Apt(#[from] AptError),
    /// A command or a file operation failed.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The package could not be had.
    #[error(
        "cannot get {package} from suite {suite}: name another suite with --suite, or give the \
         source with --source TREE, TARBALL or PACKAGE.deb"
    )]
    Package {
        /// Which package.
        package: String,
        /// Where was looked.
        suite: String,
        /// What went wrong.
        #[source]
        source: Box<StepError>,
    },
    /// What was unpacked is no kernel.
    #[error("{0} holds no Linux source: no Makefile with arch/arm64 beside it")]
    NoKernel(PathBuf),
}

/// A kernel tree in the cache, of which files may be patched.
#[derive(Debug, Clone)]
pub struct Tree {
    /// What tells it from others: package and version, or a hash.
    pub id: String,
    /// Its folder in the cache.
    pub folder: PathBuf,
    /// The tree.
    pub path: PathBuf,
}

/// Debian's suite that has a version as its own kernel, where it is not the machine's.
const SUITES: [(&str, &str); 3] = [
    ("5.10", "bullseye"),
    ("6.12", "trixie"),
    ("7.3", "trixie-backports"),
];

/// Gets the source and unpacks it, unless it lies in the cache.
///
/// # Errors
/// It cannot be had or is no kernel.
pub fn tree(shell: Shell, cache: &Path, kernels: &Kernels) -> Result<Tree, SourceError> {
    let (id, origin) = match &kernels.source {
        Some(given) => (identify(given)?, given.clone()),
        None => {
            let package = package(shell, cache, kernels)?;
            let stem = package.file_stem().unwrap_or_default();
            (stem.to_string_lossy().into_owned(), package)
        }
    };
    let folder = cache.join("sources").join(&id);
    let path = folder.join("tree");
    let tree = Tree { id, folder, path };
    if !tree.path.is_dir() {
        unpack(shell, &tree, &origin)?;
    }
    let is_kernel = ["Makefile", "arch/arm64"]
        .iter()
        .all(|name| tree.path.join(name).exists());
    if !shell.is_dry() && !is_kernel {
        let _ = fs::remove_dir_all(&tree.folder);
        return Err(SourceError::NoKernel(origin));
    }
    Ok(tree)
}

/// The newest package of this version in the cache, or else from the suite.
fn package(shell: Shell, cache: &Path, kernels: &Kernels) -> Result<PathBuf, SourceError> {
    let name = format!("linux-source-{}", kernels.base);
    let packages = cache.join("packages");
    if let Some(package) = newest(&packages, &name) {
        return Ok(package);
    }
    let system = System::default();
    let suite = match &kernels.suite {
        Some(suite) => suite.clone(),
        None => match SUITES.iter().find(|(version, _)| *version == kernels.base) {
            Some((_, suite)) => (*suite).to_owned(),
            None => system.codename().map_err(SourceError::Apt)?,
        },
    };
    let private = cache.join("apt").join(&suite);
    let incoming = private.join("incoming");
    for dir in [
        "lists/partial",
        "cache/archives/partial",
        "parts",
        "incoming",
    ] {
        shell.make_dir(&private.join(dir))?;
    }
    shell.make_dir(&packages)?;
    shell.write(&private.join("sources.list"), system.sources_for(&suite)?)?;
    shell.write(&private.join("status"), "")?;
    let apt = |what: &str, words: &[&str]| {
        let option = |name: &str, file: &str| format!("{name}={}", private.join(file).display());
        Step::new(what, "apt-get")
            .arg("-q")
            .args(["-o", &option("Dir::Etc::sourcelist", "sources.list")])
            .args(["-o", &option("Dir::Etc::sourceparts", "parts")])
            .args(["-o", &option("Dir::State", ".")])
            .args(["-o", &option("Dir::State::lists", "lists")])
            .args(["-o", &option("Dir::State::status", "status")])
            .args(["-o", &option("Dir::Cache", "cache")])
            .args(["-o", "Acquire::Languages=none", "-o", "Acquire::Retries=3"])
            .args(words)
            .dir(&incoming)
            .log(private.join("log"))
    };
    let failed = |source| SourceError::Package {
        package: name.clone(),
        suite: suite.clone(),
        source: Box::new(source),
    };
    shell
        .run(&apt("reading the package lists", &["update"]))
        .map_err(failed)?;
    shell
        .run(&apt("getting the kernel source", &["download", &name]))
        .map_err(failed)?;
    if shell.is_dry() {
        shell.print(format_args!(
            "mv {}/*.deb {}/",
            incoming.display(),
            packages.display()
        ));
        return Ok(packages.join(format!("{name}_VERSION_all.deb")));
    }
    let missing = || {
        let absent = std::io::Error::from(std::io::ErrorKind::NotFound);
        StepError::file("find the package in", &incoming, absent)
    };
    let got = newest(&incoming, &name).ok_or_else(missing)?;
    let kept = packages.join(got.file_name().unwrap_or_default());
    shell.rename(&got, &kept)?;
    Ok(kept)
}

/// The package of that name that came last.
fn newest(folder: &Path, name: &str) -> Option<PathBuf> {
    let wanted = format!("{name}_");
    fs::read_dir(folder)
        .ok()?
        .flatten()
        .filter(|entry| {
            let file = entry.file_name();
            let file = file.to_string_lossy();
            file.starts_with(&wanted) && file.ends_with(".deb")
        })
        .max_by_key(|entry| entry.metadata().and_then(|m| m.modified()).ok())
        .map(|entry| entry.path())
}

/// A name for what the user gave: a file by its content, a tree by names, sizes and times of all
/// that is in it.
fn identify(given: &Path) -> Result<String, StepError> {
    let name = given.file_name().unwrap_or_default().to_string_lossy();
    if given.is_file() {
        let sum = sha256(&step::read(given)?);
        return Ok(format!("{name}-{}", &sum[..16]));
    }
    let mut hasher = DefaultHasher::new();
    fingerprint(given, &mut hasher).map_err(|e| StepError::file("read", given, e))?;
    Ok(format!("{name}-{:016x}", hasher.finish()))
}

fn fingerprint(folder: &Path, hasher: &mut DefaultHasher) -> std::io::Result<()> {
    let mut entries: Vec<_> = fs::read_dir(folder)?.collect::<Result<_, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        if entry.file_name() == ".git" {
            continue;
        }
        let metadata = entry.metadata()?;
        entry.file_name().hash(hasher);
        if metadata.is_dir() {
            fingerprint(&entry.path(), hasher)?;
        } else {
            metadata.len().hash(hasher);
            let time = metadata.modified()?.duration_since(UNIX_EPOCH);
            time.unwrap_or_default().hash(hasher);
        }
    }
    Ok(())
}

/// Unpacks beside the final place and renames, so that a tree that is there is whole.
fn unpack(shell: Shell, tree: &Tree, origin: &Path) -> Result<(), StepError> {
    let partial = tree.folder.join("partial");
    let log = tree.folder.join("unpack.log");
    shell.remove_dir(&partial)?;
    shell.make_dir(&partial)?;
    if origin.is_dir() {
        let copy = Step::new("copying the source", "cp")
            .arg("-a")
            .args([origin, &partial.join("tree")])
            .log(&log);
        shell.run(&copy)?;
    } else {
        let mut tarball = origin.to_owned();
        if origin.extension().is_some_and(|e| e == "deb") {
            let open = Step::new("opening the package", "dpkg-deb")
                .arg("-x")
                .args([origin, &partial.join("package")])
                .log(&log);
            shell.run(&open)?;
            tarball = inner_tarball(&partial.join("package/usr/src"));
        }
        shell.make_dir(&partial.join("tree"))?;
        let unpack = Step::new("unpacking the source", "tar")
            .args(["--strip-components=1", "-xf"])
            .arg(&tarball)
            .arg("-C")
            .arg(partial.join("tree"))
            .log(&log);
        shell.run(&unpack)?;
    }
    shell.rename(&partial.join("tree"), &tree.path)?;
    shell.remove_dir(&partial)
}

/// The tarball within Debian's source package.
fn inner_tarball(folder: &Path) -> PathBuf {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.to_string_lossy().contains(".tar."))
        .unwrap_or_else(|| folder.join("linux-source-*.tar.xz"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernels(source: PathBuf) -> Kernels {
        Kernels {
            base: "5.10".to_owned(),
            source: Some(source),
            suite: None,
            series: Vec::new(),
            patches: None,
            each_patch: false,
            images: Vec::new(),
            fragments: Vec::new(),
            debug: false,
            only: Vec::new(),
        }
    }

    fn small_tree(at: &Path) {
        fs::create_dir_all(at.join("arch/arm64")).unwrap();
        fs::write(at.join("Makefile"), "VERSION = 5\n").unwrap();
    }

    #[test]
    fn a_tree_given_is_copied_and_known_again() {
        let folder = tempfile::tempdir().unwrap();
        let given = folder.path().join("linux");
        small_tree(&given);
        let cache = folder.path().join("cache");
        let options = kernels(given.clone());

        let first = tree(Shell::new(false), &cache, &options).unwrap();
        let again = tree(Shell::new(false), &cache, &options).unwrap();
        fs::write(given.join("Makefile"), "VERSION = 55\n").unwrap();
        let changed = tree(Shell::new(false), &cache, &options).unwrap();

        assert_eq!(first.id, again.id);
        assert_ne!(first.id, changed.id);
        assert!(first.path.join("Makefile").is_file());
    }

    #[test]
    fn a_tarball_is_unpacked_without_its_top_folder() {
        let folder = tempfile::tempdir().unwrap();
        small_tree(&folder.path().join("linux-5.10"));
        let tarball = folder.path().join("linux.tar");
        let packed = std::process::Command::new("tar")
            .args(["-cf"])
            .arg(&tarball)
            .args(["-C".as_ref(), folder.path(), "linux-5.10".as_ref()])
            .status()
            .unwrap();
        assert!(packed.success());

        let cache = folder.path().join("cache");
        let tree = tree(Shell::new(false), &cache, &kernels(tarball)).unwrap();

        assert!(tree.path.join("arch/arm64").is_dir());
    }

    #[test]
    fn what_is_no_kernel_is_refused_and_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let given = folder.path().join("empty");
        fs::create_dir(&given).unwrap();
        let cache = folder.path().join("cache");

        let error = tree(Shell::new(false), &cache, &kernels(given)).unwrap_err();

        assert!(matches!(error, SourceError::NoKernel(_)));
        assert_eq!(fs::read_dir(cache.join("sources")).unwrap().count(), 0);
    }
}
