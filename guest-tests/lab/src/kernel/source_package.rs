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
    command::{Command, CommandError},
    error::LabError,
    shell::{self, Shell},
};

/// Remedies for a machine that cannot fetch Debian's package.
const OTHER_SOURCES: &str = "set another suite with --suite, or the kernel with --git TREE, or \
                             with --source TREE, TARBALL or PACKAGE.deb (a linux-source package of \
                             Debian or Ubuntu)";

/// Debian suites of Linux versions.
const SUITES: [(&str, &str); 4] =
    [("5.10", "bullseye"), ("6.1", "bookworm"), ("6.12", "trixie"), ("7.3", "trixie-backports")];

/// Returns the Debian suite of a version, if it is known.
pub fn known_suite(base: &str) -> Option<&'static str> {
    SUITES.iter().find(|(version, _)| *version == base).map(|(_, suite)| *suite)
}

/// Returns the newest cached package of a version, or downloads it from a suite. The packages of a suite
/// that is not the known one of the version are apart.
pub fn download(
    shell: Shell,
    cache: &Path,
    base: &str,
    suite: Option<&str>,
) -> Result<PathBuf, LabError> {
    let name = format!("linux-source-{base}");
    let mut packages = cache.join("packages");
    if let Some(suite) = suite.filter(|suite| known_suite(base) != Some(suite)) {
        packages.push(suite);
    }
    if let Some(package) = newest_package(&packages, &name) {
        return Ok(package);
    }
    let suite = suite.or_else(|| known_suite(base)).ok_or_else(|| {
        LabError::Unusable(format!("the Debian suite of {name} is unknown: {OTHER_SOURCES}"))
    })?;
    let incoming = download_packages(shell, cache, suite, &[&name], OTHER_SOURCES)?;
    shell.create_dir(&packages)?;
    if shell.is_dry_run() {
        shell.print(format_args!("mv {}/*.deb {}/", incoming.display(), packages.display()));
        return Ok(packages.join(format!("{name}_VERSION_all.deb")));
    }
    let downloaded = newest_package(&incoming, &name).ok_or_else(|| {
        let wanted = incoming.join(format!("{name}_VERSION_all.deb"));
        CommandError::file("find the downloaded package", &wanted, io::ErrorKind::NotFound.into())
    })?;
    let kept = packages.join(downloaded.file_name().unwrap_or_default());
    shell.rename(&downloaded, &kept)?;
    Ok(kept)
}

/// Downloads packages from a suite and returns their directory. `remedy` ends the messages of a
/// machine that cannot.
pub fn download_packages(
    shell: Shell,
    cache: &Path,
    suite: &str,
    names: &[&str],
    remedy: &str,
) -> Result<PathBuf, LabError> {
    let list = Apt::default().sources_list(suite, remedy)?;
    let private = cache.join("apt").join(suite);
    let incoming = private.join("incoming");
    for directory in ["lists/partial", "cache/archives/partial", "parts", "incoming"] {
        shell.create_dir(&private.join(directory))?;
    }
    shell.write(&private.join("sources.list"), list)?;
    shell.write(&private.join("status"), "")?;
    let download: Vec<_> = [&["download"], names].concat();
    for (task, arguments) in
        [("reading the package lists", &["update"][..]), ("downloading the packages", &download)]
    {
        let apt_get = apt_get(task, &private).args(arguments).directory(&incoming);
        shell.run(&apt_get).map_err(|source| LabError::Failed {
            message: format!(
                "cannot download {} from Debian's suite {suite}: {remedy}",
                names.join(", ")
            ),
            source,
        })?;
    }
    Ok(incoming)
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
        // Without this option, apt takes the name of a missing package for a regular expression.
        .args(["-o", "APT::Cmd::Pattern-Only=true"])
        .log(private.join("log"))
}

/// Returns the file `NAME_VERSION_ARCHITECTURE.deb` that was downloaded last.
pub fn newest_package(directory: &Path, name: &str) -> Option<PathBuf> {
    let is_package = |file: &String| {
        let version = file.strip_prefix(name).and_then(|rest| rest.strip_prefix('_'));
        version.is_some_and(|rest| rest.ends_with(".deb"))
    };
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
    /// Returns the codename of this machine's release, if it is one of Debian.
    pub fn codename(&self) -> Option<String> {
        self.release("ID").filter(|id| id == "debian")?;
        self.release("VERSION_CODENAME")
    }

    /// Returns a field of `os-release`.
    fn release(&self, field: &str) -> Option<String> {
        let text = fs::read_to_string(&self.os_release).ok()?;
        let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix('='))?;
        Some(value.trim_matches(['"', '\'']).to_owned())
    }

    /// Returns a `sources.list` for a suite and its security suite, with this machine's mirrors.
    ///
    /// # Errors
    /// This machine has no such mirror; `remedy` ends the message.
    pub fn sources_list(&self, suite: &str, remedy: &str) -> Result<String, LabError> {
        let unusable = |reason: &str| LabError::Unusable(format!("{reason}: {remedy}"));
        let Some(codename) = self.codename() else {
            return Err(unusable(
                "Debian's packages are not available: this machine runs another distribution, or \
                 its os-release has no VERSION_CODENAME",
            ));
        };
        let keyring = ["debian-archive-keyring.gpg", "debian-archive-keyring.pgp"]
            .map(|name| self.keyrings.join(name))
            .into_iter()
            .find(|path| path.is_file())
            .ok_or_else(|| {
                unusable(
                    "Debian's archive keyring is missing, so packages cannot be verified: install \
                     debian-archive-keyring, or do without them",
                )
            })?;
        let mut targets = self.targets(&["Origin: Debian"])?;
        if targets.is_empty() {
            // Before an update, apt knows no origins. The keyring rejects other packages.
            targets = self.targets(&["--no-release-info"])?;
        }
        let lines = derive_sources_list(&targets, &codename, suite, &keyring);
        if lines.is_empty() {
            return Err(unusable(&format!("apt has no Debian package source for '{codename}'")));
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
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Returns the configuration of a machine with these package sources.
    fn apt_of_machine(directory: &Path, sources: &str) -> Apt {
        for part in ["sources.d", "lists", "keyrings"] {
            fs::create_dir_all(directory.join(part)).unwrap();
        }
        let write = |name: &str, text: &str| fs::write(directory.join(name), text).unwrap();
        write("os-release", "ID=debian\nVERSION_CODENAME=bookworm\n");
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

        let list = apt.sources_list("bullseye", OTHER_SOURCES).unwrap();

        assert!(list.contains(" http://mirror.example/debian bullseye main"));
        assert!(!list.contains("tools.example"), "{list}");
    }

    #[test]
    fn errors_without_debian_sources_or_keyring_name_the_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let apt = apt_of_machine(directory.path(), "");

        let no_source = apt.sources_list("bullseye", OTHER_SOURCES).unwrap_err().to_string();
        fs::remove_dir_all(&apt.keyrings).unwrap();
        let no_keyring = apt.sources_list("bullseye", OTHER_SOURCES).unwrap_err().to_string();
        fs::write(&apt.os_release, "ID=ubuntu\nVERSION_CODENAME=noble\n").unwrap();
        let other = apt.sources_list("bullseye", OTHER_SOURCES).unwrap_err().to_string();

        for (error, cause) in [
            (no_source, "no Debian package source for 'bookworm'"),
            (no_keyring, "keyring is missing"),
            (other, "another distribution"),
        ] {
            assert!(error.contains(cause) && error.contains("--git TREE"), "{error}");
        }
    }

    #[test]
    fn a_version_without_a_known_suite_requires_a_suite_or_a_source() {
        let directory = tempfile::tempdir().unwrap();

        let error = download(Shell::new(false), directory.path(), "6.18", None).unwrap_err();

        let error = error.to_string();
        for remedy in ["--suite", "--git", "--source"] {
            assert!(error.contains(remedy), "{error}");
        }
    }

    #[test]
    fn only_the_package_of_exactly_this_name_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let names = ["linux-source-6.12_6.12.1-1_all.deb", "linux-source-6.1_6.1.2-1_all.deb.part"];
        for name in names {
            fs::write(directory.path().join(name), "").unwrap();
        }
        let before = newest_package(directory.path(), "linux-source-6.1");
        let wanted = directory.path().join("linux-source-6.1_6.1.2-1_all.deb");
        fs::write(&wanted, "").unwrap();

        assert_eq!(before, None);
        assert_eq!(newest_package(directory.path(), "linux-source-6.1"), Some(wanted));
    }

    #[test]
    fn apt_takes_no_package_name_for_a_pattern() {
        if std::process::Command::new("apt-get").arg("--version").output().is_err() {
            return granule_types::testing::skip("apt-get is not installed");
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        // apt reads repositories as another user.
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        for part in ["lists/partial", "cache/archives/partial", "parts"] {
            fs::create_dir_all(path.join(part)).unwrap();
        }
        let write = |name: &str, text: &str| fs::write(path.join(name), text).unwrap();
        write("status", "");
        write("sources.list", &format!("deb [trusted=yes] file:{} ./\n", path.display()));
        let package = "Package: linux-source-6.12\nVersion: 1\nArchitecture: all\n\
                       Filename: ./linux-source-6.12_1_all.deb\nSize: 1\n\
                       Description: test\nMD5sum: 0\n";
        write("Packages", package);
        apt_get("updating", path).arg("update").run().unwrap();
        let find = |name: &str| {
            let arguments = ["download", "--print-uris", name];
            apt_get("finding", path).args(arguments).directory(path).run()
        };

        assert!(find("linux-source-6.12").is_ok(), "{:?}", find("linux-source-6.12"));
        assert!(find("linux-source-6.1").is_err());
    }
}
