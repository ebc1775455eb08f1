// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A series: the patches in `stage2/linux/BASE/NAME/`, in the order of the file `series`.
//!
//! A line `# after: OTHER` in that file says that the patches apply on top of another series. A run
//! with the upper one includes the lower one, as a kernel of its own to compare with.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use thiserror::Error;

use crate::{command::CommandError, shell};

/// Error returned when a series cannot be used.
#[derive(Debug, Error)]
pub enum SeriesError {
    #[error("unknown series '{name}' for Linux {base}; expected one of: {known}")]
    Unknown { name: String, base: String, known: String },
    #[error("series '{name}' has {count} patches; --patches {requested} is too large")]
    TooFew { name: String, count: usize, requested: usize },
    #[error(transparent)]
    File(#[from] CommandError),
}

/// The file `series` of a series.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeriesFile {
    /// The series that this one applies on top of.
    pub after: Option<String>,
    /// Names of the patches, in order.
    pub patches: Vec<String>,
}

impl SeriesFile {
    /// Reads the file of a series.
    pub fn read(linux: &Path, base: &str, name: &str) -> Result<Self, SeriesError> {
        let path = linux.join(base).join(name).join("series");
        let text = fs::read_to_string(path).map_err(|_| SeriesError::Unknown {
            name: name.to_owned(),
            base: base.to_owned(),
            known: match names(linux, base).join(", ") {
                none if none.is_empty() => "none".to_owned(),
                some => some,
            },
        })?;
        let after = text.lines().find_map(|line| line.strip_prefix("# after:"));
        let patches = text
            .lines()
            .map(|line| line.split('#').next().unwrap_or_default().trim())
            .filter(|line| !line.is_empty());
        Ok(Self {
            after: after.map(|name| name.trim().to_owned()),
            patches: patches.map(str::to_owned).collect(),
        })
    }
}

/// One patch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Patch {
    pub path: PathBuf,
    pub content: Vec<u8>,
}

/// Returns the names of all series for a version.
pub fn names(linux: &Path, base: &str) -> Vec<String> {
    let versions = linux.join(base);
    let mut names = directories(&versions);
    names.retain(|name| versions.join(name).join("series").is_file());
    names
}

/// Returns the versions that have a series.
pub fn bases(linux: &Path) -> Vec<String> {
    let directories = directories(linux).into_iter();
    directories.filter(|base| !names(linux, base).is_empty()).collect()
}

/// Returns the names of the entries of a directory, sorted.
fn directories(path: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(path)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Reads the patches of one series, without those that it requires.
pub fn patches(linux: &Path, base: &str, name: &str) -> Result<Vec<Patch>, SeriesError> {
    let directory = linux.join(base).join(name);
    let file = SeriesFile::read(linux, base, name)?;
    let patch = |name: &String| {
        let path = directory.join(name);
        let content = shell::read(&path)?;
        Ok(Patch { path, content })
    };
    file.patches.iter().map(patch).collect()
}

impl Patch {
    /// Returns the files that the patch touches, as paths in the tree.
    pub fn files(&self) -> BTreeSet<PathBuf> {
        let text = String::from_utf8_lossy(&self.content);
        let mut files = BTreeSet::new();
        let mut lines = text.lines().peekable();
        while let Some(line) = lines.next() {
            let (Some(old), Some(new)) = (
                line.strip_prefix("--- "),
                lines.peek().and_then(|next| next.strip_prefix("+++ ")),
            ) else {
                continue;
            };
            for name in [old, new] {
                let name = name.split('\t').next().unwrap_or(name).trim_end();
                // `patch -p1` drops the first component too.
                if let Some((_, path)) = name.split_once('/')
                    && name != "/dev/null"
                {
                    files.insert(PathBuf::from(path));
                }
            }
        }
        files
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_a_patch_are_read_from_its_headers() {
        let patch = Patch {
            path: PathBuf::new(),
            content: b"Subject: x\n---\n a | 1 +\n\n--- a/arch/arm64/kvm/mmu.c\n\
                       +++ b/arch/arm64/kvm/mmu.c\n@@ -1 +1 @@\n-- not a header\n\
                       --- /dev/null\n+++ b/new.h\t2020\n"
                .to_vec(),
        };

        let files: Vec<_> = patch.files().into_iter().collect();

        assert_eq!(files, [PathBuf::from("arch/arm64/kvm/mmu.c"), PathBuf::from("new.h")]);
    }
}
