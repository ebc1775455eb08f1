// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stacks of patches: one for each kernel that a run builds from a base and its series.

use std::path::Path;

use granule_types::record::Series;

use crate::kernel::series::{Patch, SeriesError, SeriesFile, patches};

/// The patches of one kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    /// Name of the kernel: `base`, `NAME`, or `NAME-3` for the first three patches.
    pub name: String,
    /// The series and the number of patches of each, for the records.
    pub series: Vec<Series>,
    /// The patches, in order.
    pub patches: Vec<Patch>,
}

/// Kernels to build of a base and its series.
#[derive(Debug, Clone, Copy)]
pub struct StackRequest<'a> {
    /// Linux version of the base.
    pub base: &'a str,
    /// Series, in order.
    pub series: &'a [String],
    /// Number of patches of the last series; all if absent.
    pub patches: Option<usize>,
    /// A stack for every patch of the last series.
    pub each: bool,
}

/// Returns the requested stacks, the base first.
pub fn stacks(linux: &Path, request: StackRequest) -> Result<Vec<Stack>, SeriesError> {
    let mut stacks =
        vec![Stack { name: "base".to_owned(), series: Vec::new(), patches: Vec::new() }];
    let mut below = stacks[0].clone();
    let mut below_is_required = false;
    let series = with_required(linux, request);
    for (index, (name, required)) in series.iter().enumerate() {
        let all = patches(linux, request.base, name)?;
        let last = index + 1 == series.len();
        let take = request.patches.filter(|_| last).unwrap_or(all.len());
        if take > all.len() {
            return Err(SeriesError::TooFew {
                name: name.clone(),
                count: all.len(),
                requested: take,
            });
        }
        if take == 0 {
            continue;
        }
        let with = |count: usize| {
            let mut stack = below.clone();
            let part = if count == all.len() { name.clone() } else { format!("{name}-{count}") };
            stack.name = if below.patches.is_empty() || below_is_required {
                part
            } else {
                format!("{}+{part}", below.name)
            };
            stack.series.push(Series {
                name: name.clone(),
                patches: u32::try_from(count).unwrap_or(u32::MAX),
            });
            stack.patches.extend_from_slice(&all[..count]);
            stack
        };
        if last && request.each {
            stacks.extend((1..take).map(with));
        }
        let complete = with(take);
        if last || *required {
            stacks.push(complete.clone());
        }
        below = complete;
        below_is_required = *required;
    }
    Ok(stacks)
}

/// Returns the patches of one series, after those of the series that it requires.
pub fn all_patches(linux: &Path, base: &str, series: &str) -> Result<Vec<Patch>, SeriesError> {
    let request = StackRequest { base, series: &[series.to_owned()], patches: None, each: false };
    let last = stacks(linux, request)?.pop();
    Ok(last.map(|stack| stack.patches).unwrap_or_default())
}

/// Returns the requested series, each after those that it requires, and whether each is only
/// required.
fn with_required(linux: &Path, request: StackRequest) -> Vec<(String, bool)> {
    let mut series: Vec<(String, bool)> = Vec::new();
    for name in request.series {
        let mut chain = vec![(name.clone(), false)];
        while let Ok(file) = SeriesFile::read(linux, request.base, &chain[0].0)
            && let Some(below) = file.after
            && !chain.iter().chain(&series).any(|(name, _)| *name == below)
        {
            chain.insert(0, (below, true));
        }
        series.extend(chain);
    }
    series
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn linux() -> tempfile::TempDir {
        let linux = tempfile::tempdir().unwrap();
        for (name, after, patches) in
            [("one", "order", 3), ("two", "order", 2), ("up", "after: one", 2)]
        {
            let directory = linux.path().join("5.10").join(name);
            fs::create_dir_all(&directory).unwrap();
            let files: Vec<String> = (1..=patches).map(|n| format!("000{n}.patch")).collect();
            fs::write(directory.join("series"), format!("# {after}\n{}\n", files.join("\n")))
                .unwrap();
            for file in files {
                fs::write(directory.join(&file), format!("{name} {file}")).unwrap();
            }
        }
        linux
    }

    fn names_of(series: &[&str], patches: Option<usize>, each: bool) -> Vec<(String, usize)> {
        let linux = linux();
        let series: Vec<String> = series.iter().map(|s| (*s).to_owned()).collect();
        let request = StackRequest { base: "5.10", series: &series, patches, each };
        stacks(linux.path(), request)
            .unwrap()
            .into_iter()
            .map(|stack| (stack.name, stack.patches.len()))
            .collect()
    }

    #[test]
    fn a_stack_is_named_after_its_series() {
        let pairs = |list: &[(&str, usize)]| -> Vec<(String, usize)> {
            list.iter().map(|(n, c)| ((*n).to_owned(), *c)).collect()
        };

        assert_eq!(names_of(&[], None, false), pairs(&[("base", 0)]));
        assert_eq!(names_of(&["one"], Some(0), false), pairs(&[("base", 0)]));
        assert_eq!(names_of(&["one"], None, false), pairs(&[("base", 0), ("one", 3)]));
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
    fn a_series_includes_the_one_that_it_requires() {
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
    fn an_unknown_series_is_refused_with_the_known_ones() {
        let linux = linux();
        let refused = |series: &str, patches| {
            let request =
                StackRequest { base: "5.10", series: &[series.to_owned()], patches, each: false };
            stacks(linux.path(), request).unwrap_err().to_string()
        };

        assert!(refused("three", None).contains("expected one of: one, two, up"));
        assert!(refused("one", Some(4)).contains("has 3 patches"));
    }
}
