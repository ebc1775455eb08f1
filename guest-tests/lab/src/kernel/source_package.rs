// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Downloads Debian's `linux-source-VERSION`, once.
//!
//! ```text
//! CACHE/apt/SUITE/         a private package configuration for that suite
//! CACHE/packages/*.deb     downloaded packages
//! ```

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use thiserror::Error;

use crate::{
    command::{Command, CommandError},
    kernel::apt::{Apt, AptError},
    shell::Shell,
};

/// Error returned when the package is not available.
#[derive(Debug, Error)]
pub enum DownloadError {
    #[error(transparent)]
    Apt(#[from] AptError),
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error(
        "cannot download {package} from suite {suite}: set another suite with --suite, or the \
         source with --source TREE, TARBALL or PACKAGE.deb"
    )]
    Failed {
        package: String,
        suite: String,
        #[source]
        source: Box<CommandError>,
    },
}

/// Debian suites of versions that are not the machine's own.
const SUITES: [(&str, &str); 3] =
    [("5.10", "bullseye"), ("6.12", "trixie"), ("7.3", "trixie-backports")];

/// Returns the newest package of a version in the cache, or downloads it from a suite.
pub fn download(
    shell: Shell,
    cache: &Path,
    base: &str,
    suite: Option<&str>,
) -> Result<PathBuf, DownloadError> {
    let name = format!("linux-source-{base}");
    let packages = cache.join("packages");
    if let Some(package) = newest(&packages, &name) {
        return Ok(package);
    }
    let apt = Apt::default();
    let known = SUITES.iter().find(|(version, _)| *version == base);
    let suite = match suite.or(known.map(|(_, suite)| *suite)) {
        Some(suite) => suite.to_owned(),
        None => apt.codename()?,
    };
    let private = cache.join("apt").join(&suite);
    let incoming = private.join("incoming");
    for directory in ["lists/partial", "cache/archives/partial", "parts", "incoming"] {
        shell.create_dir(&private.join(directory))?;
    }
    shell.create_dir(&packages)?;
    shell.write(&private.join("sources.list"), apt.sources_list(&suite)?)?;
    shell.write(&private.join("status"), "")?;
    for (task, arguments) in [
        ("reading the package lists", &["update"][..]),
        ("downloading the kernel source", &["download", &name]),
    ] {
        let apt_get = apt_get(task, &private).args(arguments).directory(&incoming);
        shell.run(&apt_get).map_err(|source| DownloadError::Failed {
            package: name.clone(),
            suite: suite.clone(),
            source: Box::new(source),
        })?;
    }
    if shell.is_dry() {
        shell.print(format_args!("mv {}/*.deb {}/", incoming.display(), packages.display()));
        return Ok(packages.join(format!("{name}_VERSION_all.deb")));
    }
    let downloaded = newest(&incoming, &name).ok_or_else(|| {
        CommandError::file("find the package in", &incoming, io::ErrorKind::NotFound.into())
    })?;
    let kept = packages.join(downloaded.file_name().unwrap_or_default());
    shell.rename(&downloaded, &kept)?;
    Ok(kept)
}

/// Returns `apt-get` with the private package configuration.
fn apt_get(task: &str, private: &Path) -> Command {
    let option = |name: &str, file: &str| format!("{name}={}", private.join(file).display());
    Command::new(task, "apt-get")
        .arg("-q")
        .args(["-o", &option("Dir::Etc::sourcelist", "sources.list")])
        .args(["-o", &option("Dir::Etc::sourceparts", "parts")])
        .args(["-o", &option("Dir::State", ".")])
        .args(["-o", &option("Dir::State::lists", "lists")])
        .args(["-o", &option("Dir::State::status", "status")])
        .args(["-o", &option("Dir::Cache", "cache")])
        .args(["-o", "Acquire::Languages=none", "-o", "Acquire::Retries=3"])
        .log(private.join("log"))
}

/// Returns the package of that name that was downloaded last.
fn newest(directory: &Path, name: &str) -> Option<PathBuf> {
    let prefix = format!("{name}_");
    fs::read_dir(directory)
        .ok()?
        .flatten()
        .filter(|entry| {
            let file = entry.file_name();
            let file = file.to_string_lossy();
            file.starts_with(&prefix) && file.ends_with(".deb")
        })
        .max_by_key(|entry| entry.metadata().and_then(|m| m.modified()).ok())
        .map(|entry| entry.path())
}
