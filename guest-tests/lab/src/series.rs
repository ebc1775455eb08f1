// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A series: patches of one topic in `stage2/linux/BASE/NAME/`, in the order of the file `series`.
//!
//! A line `# after: OTHER` in that file says that the patches go on top of another series. Who asks
//! for the one gets both, and the other as a kernel of its own to compare with.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use thiserror::Error;

use super::step::{self, StepError};

/// Why a series cannot be used.
#[derive(Debug, Error)]
pub enum SeriesError {
    /// It is not there.
    #[error("there is no series '{name}' for Linux {base}; there are: {known}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// For which version.
        base: String,
        /// What there is.
        known: String,
    },
    /// It has fewer patches than asked for.
    #[error("series '{name}' has {has} patches, --patches asks for {wanted}")]
    TooFew {
        /// Which.
        name: String,
        /// How many it has.
        has: usize,
        /// How many were asked for.
        wanted: usize,
    },
    /// A file cannot be read.
    #[error(transparent)]
    File(#[from] StepError),
}

/// One patch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Patch {
    /// Its file.
    pub path: PathBuf,
    /// What is in it.
    pub content: Vec<u8>,
}

/// A stack of patches: what one kernel is built from, beside the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    /// What the kernel is called: `base`, `NAME`, `NAME-3` for a part.
    pub name: String,
    /// The series and how many patches of each, for the records.
    pub series: Vec<granule_types::record::Series>,
    /// The patches, in order.
    pub patches: Vec<Patch>,
}

/// Which stacks to build.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// Linux version.
    pub base: &'a str,
    /// Series, in order.
    pub series: &'a [String],
    /// Only so many patches of the last series.
    pub patches: Option<usize>,
    /// A stack for every patch of the last series.
    pub each: bool,
}

/// The stacks wanted: the plain kernel first, then what the series make of it.
///
/// # Errors
/// A series is not there or too short.
pub fn stacks(linux: &Path, wanted: Wanted) -> Result<Vec<Stack>, SeriesError> {
    let mut stacks = vec![Stack {
        name: "base".to_owned(),
        series: Vec::new(),
        patches: Vec::new(),
    }];
    let mut below = stacks[0].clone();
    let mut below_is_required = false;
    let series = with_required(linux, wanted);
    for (index, (name, required)) in series.iter().enumerate() {
        let all = read(linux, wanted.base, name)?;
        let last = index + 1 == series.len();
        let take = wanted.patches.filter(|_| last).unwrap_or(all.len());
        if take > all.len() {
            return Err(SeriesError::TooFew {
                name: name.clone(),
                has: all.len(),
                wanted: take,
            });
        }
        if take == 0 {
            continue;
        }
        let with = |count: usize| {
            let mut stack = below.clone();
            let part = if count == all.len() {
                name.clone()
            } else {
                format!("{name}-{count}")
            };
            let goes_without_saying = below.patches.is_empty() || below_is_required;
            stack.name = match goes_without_saying {
                true => part,
                false => format!("{}+{part}", below.name),
            };
            stack.series.push(granule_types::record::Series {
                name: name.clone(),
                patches: u32::try_from(count).unwrap_or(u32::MAX),
            });
            stack.patches.extend_from_slice(&all[..count]);
            stack
        };
        if last && wanted.each {
            stacks.extend((1..take).map(with));
        }
        let whole = with(take);
        if last || *required {
            stacks.push(whole.clone());
        }
        below = whole;
        below_is_required = *required;
    }
    Ok(stacks)
}

/// The series wanted, each behind those that it goes on top of; of each whether it is there only
/// for another.
fn with_required(linux: &Path, wanted: Wanted) -> Vec<(String, bool)> {
    let mut series: Vec<(String, bool)> = Vec::new();
    for name in wanted.series {
        let mut chain = vec![(name.clone(), false)];
        while let Some(below) = required(linux, wanted.base, &chain[0].0)
            && !chain.iter().chain(&series).any(|(name, _)| *name == below)
        {
            chain.insert(0, (below, true));
        }
        series.extend(chain);
    }
    series
}

/// The series that another goes on top of, if it says so.
fn required(linux: &Path, base: &str, name: &str) -> Option<String> {
    let list = fs::read_to_string(linux.join(base).join(name).join("series")).ok()?;
    let below = list
        .lines()
        .find_map(|line| line.strip_prefix("# after:"))?;
    Some(below.trim().to_owned())
}

/// The names of all series for a version.
pub fn names(linux: &Path, base: &str) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(linux.join(base))
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.path().join("series").is_file())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

fn read(linux: &Path, base: &str, name: &str) -> Result<Vec<Patch>, SeriesError> {
    let folder = linux.join(base).join(name);
    let Ok(list) = fs::read_to_string(folder.join("series")) else {
        return Err(SeriesError::Unknown {
            name: name.to_owned(),
            base: base.to_owned(),
            known: match names(linux, base).join(", ") {
                none if none.is_empty() => "none".to_owned(),
                some => some,
            },
        });
    };
    list.lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim())
        .filter(|line| !line.is_empty())
        .map(|line| {
            let path = folder.join(line);
            let content = step::read(&path)?;
            Ok(Patch { path, content })
        })
        .collect()
}

impl Patch {
    /// The files it touches, as paths within the tree.
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
                // The first component is dropped, as `patch -p1` does.
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

    fn linux() -> tempfile::TempDir {
        let linux = tempfile::tempdir().unwrap();
        for (name, after, patches) in [
            ("one", "order", 3),
            ("two", "order", 2),
            ("up", "after: one", 2),
        ] {
            let folder = linux.path().join("5.10").join(name);
            fs::create_dir_all(&folder).unwrap();
            let files: Vec<String> = (1..=patches).map(|n| format!("000{n}.patch")).collect();
            fs::write(
                folder.join("series"),
                format!("# {after}\n{}\n", files.join("\n")),
            )
            .unwrap();
            for file in files {
                fs::write(folder.join(&file), format!("{name} {file}")).unwrap();
            }
        }
        linux
    }

    fn names_of(series: &[&str], patches: Option<usize>, each: bool) -> Vec<(String, usize)> {
        let linux = linux();
        let series: Vec<String> = series.iter().map(|s| (*s).to_owned()).collect();
        let wanted = Wanted {
            base: "5.10",
            series: &series,
            patches,
            each,
        };
        stacks(linux.path(), wanted)
            .unwrap()
            .into_iter()
            .map(|stack| (stack.name, stack.patches.len()))
            .collect()
    }

    #[test]
    fn stacks_are_named_for_what_is_in_them() {
        let pairs = |list: &[(&str, usize)]| -> Vec<(String, usize)> {
            list.iter().map(|(n, c)| ((*n).to_owned(), *c)).collect()
        };

        assert_eq!(names_of(&[], None, false), pairs(&[("base", 0)]));
        assert_eq!(names_of(&["one"], Some(0), false), pairs(&[("base", 0)]));
        assert_eq!(
            names_of(&["one"], None, false),
            pairs(&[("base", 0), ("one", 3)])
        );
        assert_eq!(
            names_of(&["one", "two"], Some(1), false),
            pairs(&[("base", 0), ("one+two-1", 4)])
        );
        assert_eq!(
            names_of(&["one"], None, true),
            pairs(&[("base", 0), ("one-1", 1), ("one-2", 2), ("one", 3)])
        );
    }

    #[test]
    fn a_series_brings_the_one_it_goes_on_top_of() {
        let alone = names_of(&["up"], None, false);
        let named = names_of(&["one", "up"], None, false);
        let each = names_of(&["up"], None, true);

        let pairs = |list: &[(&str, usize)]| -> Vec<(String, usize)> {
            list.iter().map(|(n, c)| ((*n).to_owned(), *c)).collect()
        };
        assert_eq!(alone, pairs(&[("base", 0), ("one", 3), ("up", 5)]));
        assert_eq!(named, pairs(&[("base", 0), ("one+up", 5)]));
        let parts = [("base", 0), ("one", 3), ("up-1", 4), ("up", 5)];
        assert_eq!(each, pairs(&parts));
    }

    #[test]
    fn what_is_not_there_is_refused_with_what_is() {
        let linux = linux();
        let ask = |series: &str, patches| {
            let wanted = Wanted {
                base: "5.10",
                series: &[series.to_owned()],
                patches,
                each: false,
            };
            stacks(linux.path(), wanted).unwrap_err().to_string()
        };

        assert!(ask("three", None).contains("there are: one, two, up"));
        assert!(ask("one", Some(4)).contains("has 3 patches"));
    }

    #[test]
    fn a_patch_names_the_files_it_touches() {
        let patch = Patch {
            path: PathBuf::new(),
            content: b"Subject: x\n---\n a | 1 +\n\n--- a/arch/arm64/kvm/mmu.c\n\
                       +++ b/arch/arm64/kvm/mmu.c\n@@ -1 +1 @@\n-- not a header\n\
                       --- /dev/null\n+++ b/new.h\t2020\n"
                .to_vec(),
        };

        let files: Vec<_> = patch.files().into_iter().collect();

        assert_eq!(
            files,
            [
                PathBuf::from("arch/arm64/kvm/mmu.c"),
                PathBuf::from("new.h")
            ]
        );
    }
}
