// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Downloads Debian's `linux-source-VERSION` to the cache.
//!
//! ```text
//! CACHE/apt/SUITE/         private package configuration for that suite
//! CACHE/packages/*.deb     downloaded packages
//! ```
//!
//! A base may belong to another Debian release than this machine. The private configuration
//! therefore combines the suite of the base with the mirrors that `apt-get indextargets` lists with
//! origin Debian. Its entries name the installed Debian keyring, so apt verifies the packages.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    LabError,
    command::{Command, CommandError},
    shell::{self, Shell},
};

const NO_KEYRING: &str = "Debian's archive keyring is missing, so packages cannot be verified: \
                          install debian-archive-keyring, or set the kernel source with --source";

/// Debian suites of Linux versions; the default is the suite of this machine.
const SUITES: [(&str, &str); 3] =
    [("5.10", "bullseye"), ("6.12", "trixie"), ("7.3", "trixie-backports")];

/// Returns the newest cached package of a version, or downloads it from a suite.
pub fn download(
    shell: Shell,
    cache: &Path,
    base: &str,
    suite: Option<&str>,
) -> Result<PathBuf, LabError> {
    let name = format!("linux-source-{base}");
    let packages = cache.join("packages");
    if let Some(package) = newest_package(&packages, &name) {
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
        shell.run(&apt_get).map_err(|source| LabError::Failed {
            message: format!(
                "cannot download {name} from suite {suite}: set another suite with --suite, or \
                 the source with --source TREE, TARBALL or PACKAGE.deb"
            ),
            source,
        })?;
    }
    if shell.is_dry_run() {
        shell.print(format_args!("mv {}/*.deb {}/", incoming.display(), packages.display()));
        return Ok(packages.join(format!("{name}_VERSION_all.deb")));
    }
    let downloaded = newest_package(&incoming, &name).ok_or_else(|| {
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

/// Returns the package of this name that was downloaded last.
fn newest_package(directory: &Path, name: &str) -> Option<PathBuf> {
    let prefix = format!("{name}_");
    let is_package = |file: &String| file.starts_with(&prefix) && file.ends_with(".deb");
    let packages = shell::sorted_entries(directory).into_iter().filter(is_package);
    packages
        .map(|file| directory.join(file))
        .max_by_key(|path| path.metadata().and_then(|file| file.modified()).ok())
}

/// Package configuration of this machine.
#[derive(Debug, Clone)]
pub struct Apt {
    os_release: PathBuf,
    keyrings: PathBuf,
    arguments: Vec<String>,
}

impl Default for Apt {
    fn default() -> Self {
        Self {
            os_release: PathBuf::from("/etc/os-release"),
            keyrings: PathBuf::from("/usr/share/keyrings"),
            arguments: Vec::new(),
        }
    }
}

impl Apt {
    pub fn codename(&self) -> Result<String, LabError> {
        fs::read_to_string(&self.os_release)
            .unwrap_or_default()
            .lines()
            .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
            .map(|value| value.trim_matches('"').to_owned())
            .ok_or_else(|| {
                let file = self.os_release.display();
                LabError::Unusable(format!(
                    "{file} has no VERSION_CODENAME: set the kernel source with --source"
                ))
            })
    }

    /// Returns a `sources.list` for a suite and its security suite, with this machine's mirrors.
    pub fn sources_list(&self, suite: &str) -> Result<String, LabError> {
        let codename = self.codename()?;
        let keyring = ["debian-archive-keyring.gpg", "debian-archive-keyring.pgp"]
            .map(|name| self.keyrings.join(name))
            .into_iter()
            .find(|path| path.is_file())
            .ok_or_else(|| LabError::Unusable(NO_KEYRING.to_owned()))?;
        let mut targets = self.targets(&["Origin: Debian"])?;
        if targets.is_empty() {
            // Before an update, apt knows no origins. The keyring rejects other packages.
            targets = self.targets(&["--no-release-info"])?;
        }
        let lines = derive_sources_list(&targets, &codename, suite, &keyring);
        if lines.is_empty() {
            return Err(LabError::Unusable(format!(
                "apt has no Debian package source for '{codename}': set the kernel source with \
                 --source TREE, TARBALL or PACKAGE.deb"
            )));
        }
        Ok(lines)
    }

    /// Returns a line with URI and suite for each configured repository.
    fn targets(&self, filter: &[&str]) -> Result<String, CommandError> {
        Command::new("listing apt's package sources", "apt-get")
            .args(["indextargets", "--format", "$(REPO_URI) $(RELEASE)"])
            .args(["Created-By: Packages", "Component: main"])
            .args(filter)
            .args(&self.arguments)
            .query()
    }
}

/// Replaces the suite `codename` of each repository with `suite`. Omits updates and backports,
/// which mirrors do not keep for older suites.
fn derive_sources_list(targets: &str, codename: &str, suite: &str, keyring: &Path) -> String {
    let mut lines: Vec<String> = Vec::new();
    for (uri, configured) in targets.lines().filter_map(|line| line.split_once(' ')) {
        let name = match configured.strip_suffix("-security") {
            Some(own) if is_suite_of_machine(own, codename) && has_security_suite(suite) => {
                format!("{suite}-security")
            }
            None if is_suite_of_machine(configured, codename) => suite.to_owned(),
            _ => continue,
        };
        let uri = uri.trim_end_matches('/');
        let line = format!("deb [signed-by={}] {uri} {name} main\n", keyring.display());
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines.concat()
}

/// Returns whether a suite has a security suite; unreleased suites and backports have none.
fn has_security_suite(suite: &str) -> bool {
    !["sid", "unstable", "experimental"].contains(&suite) && !suite.ends_with("-backports")
}

fn is_suite_of_machine(suite: &str, codename: &str) -> bool {
    suite == codename || ["stable", "oldstable", "testing"].contains(&suite)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the configuration of a machine with these package sources.
    fn apt_of_machine(directory: &Path, sources: &str) -> Apt {
        for part in ["sources.d", "lists", "keyrings"] {
            fs::create_dir_all(directory.join(part)).unwrap();
        }
        let write = |name: &str, text: &str| fs::write(directory.join(name), text).unwrap();
        write("os-release", "VERSION_CODENAME=bookworm\n");
        write("keyrings/debian-archive-keyring.gpg", "");
        write("sources.list", sources);
        let option =
            |name: &str, path: &str| format!("-o{name}={}", directory.join(path).display());
        Apt {
            os_release: directory.join("os-release"),
            keyrings: directory.join("keyrings"),
            arguments: vec![
                option("Dir::Etc::sourcelist", "sources.list"),
                option("Dir::Etc::sourceparts", "sources.d"),
                option("Dir::State::lists", "lists"),
                "-oAPT::Architecture=amd64".to_owned(),
                "-oAPT::Architectures=amd64".to_owned(),
            ],
        }
    }

    #[test]
    fn repositories_of_the_machine_are_used_with_the_requested_suite() {
        let targets = "http://m/debian/ bookworm\nhttp://m/debian/ bookworm\n\
                       http://m/debian/ bookworm-updates\nhttp://m/debian/ bookworm-backports\n\
                       http://second/debian/ stable\nhttp://m/security/ bookworm-security\n";
        let plain = ["deb [signed-by=/k] http://m/debian S main\n\
                      deb [signed-by=/k] http://second/debian S main\n"];
        let security = ["deb [signed-by=/k] http://m/security S-security main\n"];
        for (suite, expected) in [
            ("bullseye", [plain, security].concat()),
            ("sid", plain.to_vec()),
            ("trixie-backports", plain.to_vec()),
        ] {
            let list = derive_sources_list(targets, "bookworm", suite, Path::new("/k"));

            assert_eq!(list, expected.concat().replace('S', suite));
        }
    }

    #[test]
    fn repositories_of_another_origin_are_omitted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let sources = "deb http://mirror.example/debian bookworm main\n\
                       deb http://tools.example/debian bookworm main\n";
        let apt = apt_of_machine(path, sources);
        for (host, origin) in [("mirror", "Debian"), ("tools", "Tools")] {
            let list = path.join(format!("lists/{host}.example_debian_dists_bookworm_"));
            let release = format!(
                "Origin: {origin}\nSuite: stable\nCodename: bookworm\nArchitectures: amd64\n\
                 Date: Sat, 01 Jan 2022 00:00:00 UTC\nComponents: main\nSHA256:\n \
                 {:064} 10 main/binary-amd64/Packages\n",
                0
            );
            fs::write(format!("{}Release", list.display()), release).unwrap();
            fs::write(format!("{}main_binary-amd64_Packages", list.display()), "").unwrap();
        }

        let list = apt.sources_list("bullseye").unwrap();

        assert!(list.contains(" http://mirror.example/debian bullseye main"));
        assert!(!list.contains("tools.example"), "{list}");
    }

    #[test]
    fn errors_without_debian_sources_or_keyring_name_the_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let apt = apt_of_machine(directory.path(), "");

        let no_source = apt.sources_list("bullseye").unwrap_err();
        fs::remove_dir_all(&apt.keyrings).unwrap();
        let no_keyring = apt.sources_list("bullseye").unwrap_err();

        assert!(no_keyring.to_string().contains("keyring is missing"), "{no_keyring}");
        assert!(no_source.to_string().contains("--source"), "{no_source}");
    }
}
