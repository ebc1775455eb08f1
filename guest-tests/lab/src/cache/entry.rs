// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Entries of the cache: what each is, its size and its last use.

use std::{
    fmt, fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::SystemTime,
};

use super::format_days;
use crate::{command::CommandError, in_use, kernel::CACHE_LOCK, shell::sorted_entries};

/// Kind of an entry. Each kind has a directory in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    Package,
    PackageList,
    Source,
    Objects,
    Kernel,
    Selftests,
    Guest,
    SeriesCheck,
    Tool,
    /// Entry of another version of granule.
    Unknown,
}

impl EntryKind {
    /// Kinds, and their directories in the cache.
    const DIRECTORIES: [(Self, &str); 9] = [
        (Self::Package, "packages"),
        (Self::PackageList, "apt"),
        (Self::Source, "sources"),
        (Self::Objects, "objects"),
        (Self::Kernel, "kernels"),
        (Self::Selftests, "selftests"),
        (Self::Guest, "guest"),
        (Self::SeriesCheck, "check-series"),
        (Self::Tool, "tools"),
    ];

    /// Reports whether a run makes an entry of this kind again when it is missing.
    pub const fn can_be_made_again(self) -> bool {
        !matches!(self, Self::Tool | Self::Unknown)
    }
}

impl fmt::Display for EntryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Package => "source package",
            Self::PackageList => "package lists",
            Self::Source => "source",
            Self::Objects => "objects",
            Self::Kernel => "kernel",
            Self::Selftests => "selftests",
            Self::Guest => "guest",
            Self::SeriesCheck => "series check",
            Self::Tool => "tool",
            Self::Unknown => "unknown",
        })
    }
}

/// File or directory of the cache.
#[derive(Debug)]
pub struct Entry {
    pub kind: EntryKind,
    pub path: PathBuf,
    /// Path relative to the cache.
    pub name: String,
    /// Allocated bytes.
    pub size: u64,
    last_use: SystemTime,
}

/// Returns all entries of a cache.
pub fn entries(cache: &Path) -> Result<Vec<Entry>, CommandError> {
    let mut entries = Vec::new();
    for name in sorted_entries(cache) {
        let known = EntryKind::DIRECTORIES.iter().find(|(_, directory)| *directory == name);
        match known {
            Some((kind, directory)) => {
                for inner in sorted_entries(&cache.join(directory)) {
                    // The lock of scripts/guest.
                    if inner != "lock" {
                        entries.push(Entry::read(cache, *kind, &format!("{directory}/{inner}"))?);
                    }
                }
            }
            None if name == CACHE_LOCK => {}
            None => entries.push(Entry::read(cache, EntryKind::Unknown, &name)?),
        }
    }
    Ok(entries)
}

impl Entry {
    fn read(cache: &Path, kind: EntryKind, name: &str) -> Result<Self, CommandError> {
        let path = cache.join(name);
        let failed = |error| CommandError::file("read", &path, error);
        let size = allocated_size(&path).map_err(failed)?;
        let last_use = in_use::last_use(&path).map_err(failed)?;
        Ok(Self { kind, size, last_use, name: name.to_owned(), path })
    }

    /// Returns the days since the last use.
    pub fn days(&self) -> u64 {
        let age = SystemTime::now().duration_since(self.last_use).unwrap_or_default();
        age.as_secs() / (24 * 60 * 60)
    }

    pub fn describe_age(&self) -> String {
        format_days(self.days())
    }

    /// Returns the name, and what a build is made of.
    pub fn description(&self) -> String {
        let config = match self.kind {
            EntryKind::Kernel => "config",
            EntryKind::Objects => ".config",
            _ => return self.name.clone(),
        };
        let config = fs::read_to_string(self.path.join(config)).unwrap_or_default();
        let tree = fs::read_to_string(self.path.join("tree")).unwrap_or_default();
        let origin = fs::read_to_string(self.path.join("origin")).ok();
        let parts = [
            linux_version(&config).map(|version| format!("Linux {version}")),
            origin.filter(|origin| !origin.is_empty()),
            compiler(&config).map(str::to_owned),
            tree.get(..12).map(|tree| format!("tree {tree}")),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        match parts.is_empty() {
            true => format!("{}: incomplete", self.name),
            false => format!("{}: {}", self.name, parts.join(", ")),
        }
    }
}

/// Returns the version in `# Linux/arm64 5.10.262 Kernel Configuration`.
fn linux_version(config: &str) -> Option<&str> {
    let line = config.lines().find_map(|line| line.strip_prefix("# Linux/arm64 "))?;
    line.split(' ').next()
}

fn compiler(config: &str) -> Option<&str> {
    let line = config.lines().find_map(|line| line.strip_prefix("CONFIG_CC_VERSION_TEXT=\""))?;
    line.strip_suffix('"')
}

/// Returns the allocated bytes of a file, or of all files of a directory.
fn allocated_size(path: &Path) -> io::Result<u64> {
    let metadata = fs::symlink_metadata(path)?;
    let mut size = metadata.blocks() * 512;
    if metadata.is_dir() {
        for entry in fs::read_dir(path)? {
            size += match allocated_size(&entry?.path()) {
                // A build may remove a file at the same time.
                Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
                size => size?,
            };
        }
    }
    Ok(size)
}
