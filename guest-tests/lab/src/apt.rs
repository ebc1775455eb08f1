// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where this machine gets Debian packages from, and the same place for another suite.
//!
//! Linux 5.10 belongs to an older Debian than the machine's. Its source is derived from what the
//! machine is configured with: same mirror, other suite. Only entries signed with Debian's own
//! archive key count, whichever way they are written (`.list` lines or deb822 `.sources`), and the
//! derived ones name the installed Debian keyring, so packages are verified as always. The result
//! is used in a private folder; the system's configuration is read, never written.

use std::{
    fs,
    path::{Path, PathBuf},
};

use thiserror::Error;

use super::step::StepError;

/// Why no place to get packages from is known.
#[derive(Debug, Error)]
pub enum AptError {
    /// There is no Debian entry.
    #[error(
        "no Debian package source for '{codename}' is configured under {etc}: give the kernel \
         source with --source TREE, TARBALL or PACKAGE.deb"
    )]
    NoSource {
        /// The machine's own suite.
        codename: String,
        /// Where was looked.
        etc: PathBuf,
    },
    /// The keyring is not installed.
    #[error(
        "Debian's archive keyring is not installed, so packages could not be verified: install \
         debian-archive-keyring, or give the kernel source with --source"
    )]
    NoKeyring,
    /// The machine's suite is not known.
    #[error("{0} names no VERSION_CODENAME: give the kernel source with --source")]
    NoCodename(PathBuf),
    /// A file cannot be read.
    #[error(transparent)]
    File(#[from] StepError),
}

/// One configured source of binary packages.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    uris: Vec<String>,
    suites: Vec<String>,
    components: Vec<String>,
    signed_by: String,
}

/// Where the system's package configuration lies, and the keyrings.
#[derive(Debug, Clone)]
pub struct System {
    etc: PathBuf,
    keyrings: PathBuf,
}

impl Default for System {
    fn default() -> Self {
        Self {
            etc: PathBuf::from("/etc"),
            keyrings: PathBuf::from("/usr/share/keyrings"),
        }
    }
}

impl System {
    /// The machine's own suite.
    ///
    /// # Errors
    /// `os-release` does not name one.
    pub fn codename(&self) -> Result<String, AptError> {
        let path = self.etc.join("os-release");
        let text = fs::read_to_string(&path).unwrap_or_default();
        text.lines()
            .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
            .map(|value| value.trim_matches('"').to_owned())
            .ok_or(AptError::NoCodename(path))
    }

    /// The lines of a `sources.list` for a suite and its security suite, on the machine's mirrors.
    ///
    /// # Errors
    /// No Debian source is configured, or its keyring is not installed.
    pub fn sources_for(&self, suite: &str) -> Result<String, AptError> {
        let codename = self.codename()?;
        let keyring = ["debian-archive-keyring.gpg", "debian-archive-keyring.pgp"]
            .map(|name| self.keyrings.join(name))
            .into_iter()
            .find(|path| path.is_file())
            .ok_or(AptError::NoKeyring)?;
        let lines = derive(&self.entries()?, &codename, suite, &keyring);
        if lines.is_empty() {
            return Err(AptError::NoSource {
                codename,
                etc: self.etc.clone(),
            });
        }
        Ok(lines)
    }

    fn entries(&self) -> Result<Vec<Entry>, AptError> {
        let apt = self.etc.join("apt");
        let mut files = vec![apt.join("sources.list")];
        let parts = apt.join("sources.list.d");
        if let Ok(found) = fs::read_dir(&parts) {
            files.extend(found.flatten().map(|entry| entry.path()));
        }
        files.sort();
        let mut entries = Vec::new();
        for file in files.iter().filter(|file| file.is_file()) {
            let parse = match file.extension().and_then(|e| e.to_str()) {
                Some("list") => one_line_entries,
                Some("sources") => deb822_entries,
                _ => continue,
            };
            let text =
                fs::read_to_string(file).map_err(|e| StepError::file("read", file.clone(), e))?;
            entries.extend(parse(&text));
        }
        Ok(entries)
    }
}

fn words(text: &str) -> Vec<String> {
    text.split_ascii_whitespace().map(str::to_owned).collect()
}

/// `deb [option=value …] URI suite component …`
fn one_line_entries(text: &str) -> Vec<Entry> {
    text.lines()
        .filter_map(|line| {
            let line = line.split('#').next().unwrap_or_default().trim();
            let rest = line.strip_prefix("deb")?;
            let rest = rest.strip_prefix([' ', '\t'])?.trim_start();
            let (options, rest) = match rest.strip_prefix('[') {
                Some(bracketed) => bracketed.split_once(']')?,
                None => ("", rest),
            };
            let mut words = words(rest).into_iter();
            Some(Entry {
                uris: vec![words.next()?],
                suites: vec![words.next()?],
                components: words.collect(),
                signed_by: options
                    .split_ascii_whitespace()
                    .find_map(|option| option.strip_prefix("signed-by="))
                    .unwrap_or_default()
                    .to_owned(),
            })
        })
        .collect()
}

/// Paragraphs of `Field: value`, a value going on in lines that begin with a blank.
fn deb822_entries(text: &str) -> Vec<Entry> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let text: Vec<&str> = lines.map(str::trim_end).collect();
    text.split(|line| line.is_empty())
        .filter_map(|paragraph| {
            let field = |name: &str| -> Option<String> {
                let at = paragraph.iter().position(|line| {
                    line.split_once(':')
                        .is_some_and(|(key, _)| key.eq_ignore_ascii_case(name))
                })?;
                let first = paragraph[at].split_once(':')?.1;
                let more = paragraph[at + 1..]
                    .iter()
                    .take_while(|line| line.starts_with([' ', '\t']));
                Some(std::iter::once(first).chain(more.copied()).collect())
            };
            let enabled = field("Enabled").is_none_or(|value| value.trim() != "no");
            let binary = words(&field("Types")?).iter().any(|kind| kind == "deb");
            (enabled && binary).then_some(Entry {
                uris: words(&field("URIs")?),
                suites: words(&field("Suites")?),
                components: words(&field("Components").unwrap_or_default()),
                signed_by: field("Signed-By").unwrap_or_default().trim().to_owned(),
            })
        })
        .collect()
}

/// The machine's Debian entries, for another suite. Updates and backports are left out: they are
/// not kept for older suites.
fn derive(entries: &[Entry], codename: &str, suite: &str, keyring: &Path) -> String {
    let mut lines: Vec<String> = Vec::new();
    for entry in entries {
        let debian = entry.signed_by.is_empty() || entry.signed_by.contains("debian-archive");
        if !debian || !entry.components.iter().any(|component| component == "main") {
            continue;
        }
        for configured in &entry.suites {
            let name = match configured.strip_suffix("-security") {
                Some(own) if is_own(own, codename) && has_security(suite) => {
                    format!("{suite}-security")
                }
                None if is_own(configured, codename) => suite.to_owned(),
                _ => continue,
            };
            for uri in &entry.uris {
                let line = format!("deb [signed-by={}] {uri} {name} main\n", keyring.display());
                if !lines.contains(&line) {
                    lines.push(line);
                }
            }
        }
    }
    lines.concat()
}

/// What is not released, and backports, get their fixes in the suite itself.
fn has_security(suite: &str) -> bool {
    !["sid", "unstable", "experimental"].contains(&suite) && !suite.ends_with("-backports")
}

fn is_own(suite: &str, codename: &str) -> bool {
    suite == codename || ["stable", "oldstable", "testing"].contains(&suite)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEB822: &str = "\
Types: deb
# a remark
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: https://tools.example/debian
Suites: bookworm
Components: main
Signed-By: /etc/apt/keyrings/tools.gpg

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
";

    const ONE_LINE: &str = "\
# deb http://commented.example/debian bookworm main
deb http://mirror.example/debian bookworm main contrib # a remark
deb-src http://mirror.example/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] \
http://mirror.example/debian-security bookworm-security main
deb http://other.example/debian bookworm-backports main
";

    const WANTED: &str = "\
deb [signed-by=/k.gpg] http://mirror.example/debian bullseye main
deb [signed-by=/k.gpg] http://mirror.example/debian-security bullseye-security main
";

    #[test]
    fn both_forms_give_the_same_older_suite() {
        for entries in [deb822_entries(DEB822), one_line_entries(ONE_LINE)] {
            assert_eq!(
                derive(&entries, "bookworm", "bullseye", Path::new("/k.gpg")),
                WANTED
            );
        }
    }

    #[test]
    fn backports_and_what_is_not_released_have_no_security_suite() {
        let entries = one_line_entries(ONE_LINE);

        for suite in ["sid", "trixie-backports"] {
            let derived = derive(&entries, "bookworm", suite, Path::new("/k.gpg"));

            assert_eq!(
                derived,
                format!("deb [signed-by=/k.gpg] http://mirror.example/debian {suite} main\n")
            );
        }
    }

    #[test]
    fn fields_may_go_on_in_the_next_line() {
        let text = "Types: deb\nURIs:\n http://a.example/debian\n http://b.example/debian\n\
                    Suites: stable\nComponents: main\n";

        let derived = derive(
            &deb822_entries(text),
            "bookworm",
            "bullseye",
            Path::new("/k"),
        );

        assert_eq!(derived.lines().count(), 2);
    }

    #[test]
    fn a_machine_without_debian_says_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let system = System {
            etc: folder.path().to_owned(),
            keyrings: folder.path().to_owned(),
        };
        fs::write(folder.path().join("os-release"), "VERSION_CODENAME=noble\n").unwrap();

        let no_keyring = system.sources_for("bullseye").unwrap_err();
        fs::write(folder.path().join("debian-archive-keyring.gpg"), "").unwrap();
        let no_source = system.sources_for("bullseye").unwrap_err();

        assert!(matches!(no_keyring, AptError::NoKeyring));
        assert!(no_source.to_string().contains("--source"), "{no_source}");
    }
}
