// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Patch series, and the stacks of patches from which a run builds kernels.
//!
//! The file `series` in `stage2/linux/BASE/NAME/` lists the patches of a series in order. In that
//! file, a line `../OTHER/PATCH` names a patch of another series of the same base. After a line
//! `# after: OTHER`, the patches apply on top of the series OTHER, and a run also builds a kernel
//! with OTHER alone.

use std::{
    fs,
    path::{Path, PathBuf},
};

use granule_types::record::Series;

use crate::{error::LabError, options::KernelOptions, shell, values::LinuxVersion};

/// Series that is applied by default.
pub const DEFAULT_SERIES: &str = "stage2-fault-path";

/// Content of the file `series` of a series.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeriesFile {
    /// Series below this one.
    pub required_series: Option<String>,
    /// Paths of the patches, relative to the directory of the series, in order.
    pub patches: Vec<String>,
}

impl SeriesFile {
    pub fn read(linux: &Path, base: LinuxVersion, name: &str) -> Result<Self, LabError> {
        let path = linux.join(base.to_string()).join(name).join("series");
        let text = fs::read_to_string(path).map_err(|_| {
            let known = match series_names(linux, base).join(", ") {
                none if none.is_empty() => "none".to_owned(),
                some => some,
            };
            LabError::Unusable(format!(
                "unknown series '{name}' for Linux {base}; expected one of: {known}"
            ))
        })?;
        let after = text.lines().find_map(|line| line.strip_prefix("# after:"));
        let patches = text
            .lines()
            .map(|line| line.split('#').next().unwrap_or_default().trim())
            .filter(|line| !line.is_empty());
        Ok(Self {
            required_series: after.map(|name| name.trim().to_owned()),
            patches: patches.map(str::to_owned).collect(),
        })
    }
}

pub fn series_names(linux: &Path, base: LinuxVersion) -> Vec<String> {
    let versions = linux.join(base.to_string());
    let mut names = shell::sorted_entries(&versions);
    names.retain(|name| versions.join(name).join("series").is_file());
    names
}

pub fn bases(linux: &Path) -> Vec<LinuxVersion> {
    let entries = shell::sorted_entries(linux);
    let mut bases: Vec<_> = entries.iter().filter_map(|name| name.parse().ok()).collect();
    bases.retain(|base| !series_names(linux, *base).is_empty());
    bases.sort_unstable();
    bases
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Patch {
    pub path: PathBuf,
    pub content: Vec<u8>,
}

impl Patch {
    /// Returns the subject without `[PATCH n/m]`.
    pub fn subject(&self) -> String {
        let text = String::from_utf8_lossy(&self.content);
        let mut lines = text.lines().skip_while(|line| !line.starts_with("Subject: "));
        let first = lines.next().unwrap_or_default();
        let continuation = lines.take_while(|line| line.starts_with([' ', '\t']));
        let header: String = std::iter::once(first).chain(continuation).collect();
        let subject = header.strip_prefix("Subject: ").unwrap_or_default();
        let subject = subject.strip_prefix("[PATCH").and_then(|rest| rest.split_once("] "));
        subject.map(|(_, subject)| subject.to_owned()).unwrap_or_default()
    }
}

/// Reads the patches of one series, without those of the required series.
pub fn patches(linux: &Path, base: LinuxVersion, name: &str) -> Result<Vec<Patch>, LabError> {
    let directory = linux.join(base.to_string()).join(name);
    let patch = |name: &String| {
        let path = directory.join(name);
        let content = shell::read(&path)?;
        Ok(Patch { path, content })
    };
    SeriesFile::read(linux, base, name)?.patches.iter().map(patch).collect()
}

/// Returns the patches of the required series and of this one, in order.
pub fn all_patches(linux: &Path, base: LinuxVersion, series: &str) -> Result<Vec<Patch>, LabError> {
    let kernels = KernelOptions { series: vec![series.to_owned()], ..KernelOptions::default() };
    let last = stacks(linux, base, &kernels)?.pop();
    Ok(last.map(|stack| stack.patches).unwrap_or_default())
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PatchStack {
    /// Name of the kernel: `base`, `NAME`, or `NAME-3` for the first three patches.
    pub name: String,
    /// The series and the number of patches of each, for the records.
    pub series: Vec<Series>,
    pub patches: Vec<Patch>,
}

/// Returns the stacks of the requested kernels, the base first.
pub fn stacks(
    linux: &Path,
    base: LinuxVersion,
    kernels: &KernelOptions,
) -> Result<Vec<PatchStack>, LabError> {
    let mut stacks =
        vec![PatchStack { name: "base".to_owned(), series: Vec::new(), patches: Vec::new() }];
    let mut below = stacks[0].clone();
    let mut below_is_required = false;
    let series = resolve_required(linux, base, kernels);
    for (index, (name, required)) in series.iter().enumerate() {
        let all = patches(linux, base, name)?;
        let last = index + 1 == series.len();
        let take = kernels.first.filter(|_| last).unwrap_or(all.len());
        if take > all.len() {
            return Err(LabError::Unusable(format!(
                "series '{name}' has {} patches; --first {take} is too large",
                all.len()
            )));
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
        if last && kernels.each {
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

/// Returns the requested series, each once and after its required series. The flag is true for a series
/// that is required but not requested.
fn resolve_required(
    linux: &Path,
    base: LinuxVersion,
    kernels: &KernelOptions,
) -> Vec<(String, bool)> {
    let mut series: Vec<(String, bool)> = Vec::new();
    for name in &kernels.series {
        if let Some((_, is_only_required)) = series.iter_mut().find(|(listed, _)| listed == name) {
            *is_only_required = false;
            continue;
        }
        let mut chain = vec![(name.clone(), false)];
        while let Ok(file) = SeriesFile::read(linux, base, &chain[0].0)
            && let Some(below) = file.required_series
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
    use super::*;
    use crate::options::SourceOptions;

    fn linux() -> tempfile::TempDir {
        let linux = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("one", "# order\n1.patch\n2.patch\n3.patch\n"),
            ("two", "../one/3.patch\n1.patch # last\n"),
            ("up", "# after: one\n1.patch\n2.patch\n"),
        ] {
            let directory = linux.path().join("5.10").join(name);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("series"), text).unwrap();
            for number in 1..=3 {
                let file = format!("{number}.patch");
                fs::write(directory.join(&file), format!("{name} {file}")).unwrap();
            }
        }
        linux
    }

    fn build_stacks(
        series: &[&str],
        first: Option<usize>,
        each: bool,
    ) -> Result<Vec<PatchStack>, LabError> {
        let series = series.iter().map(|name| (*name).to_owned()).collect();
        let kernels = KernelOptions { series, first, each, ..KernelOptions::default() };
        stacks(linux().path(), SourceOptions::DEFAULT_BASE, &kernels)
    }

    #[test]
    fn a_stack_is_named_after_its_series_and_includes_required_series() {
        for (series, patches, each, expected) in [
            (&[][..], None, false, "base 0"),
            (&["one"], Some(0), false, "base 0"),
            (&["one"], None, false, "base 0, one 3"),
            (&["one", "two"], Some(1), false, "base 0, one+two-1 4"),
            (&["one"], None, true, "base 0, one-1 1, one-2 2, one 3"),
            (&["up"], None, false, "base 0, one 3, up 5"),
            (&["one", "up"], None, false, "base 0, one+up 5"),
            (&["up", "one"], None, false, "base 0, one+up 5"),
            (&["one", "one"], None, false, "base 0, one 3"),
            (&["up"], None, true, "base 0, one 3, up-1 4, up 5"),
        ] {
            let stacks = build_stacks(series, patches, each).unwrap();

            let described: Vec<String> = stacks
                .iter()
                .map(|stack| format!("{} {}", stack.name, stack.patches.len()))
                .collect();
            assert_eq!(described.join(", "), expected);
        }
    }

    #[test]
    fn a_series_may_name_patches_of_another_series() {
        let two = patches(linux().path(), SourceOptions::DEFAULT_BASE, "two").unwrap();

        let contents = two.iter().map(|patch| patch.content.as_slice());
        assert!(contents.eq([b"one 3.patch", b"two 1.patch"]));
    }

    #[test]
    fn an_unknown_series_is_refused_with_the_known_ones() {
        let refused = |series: &str, patches| build_stacks(&[series], patches, false).unwrap_err();

        let unknown = refused("three", None).to_string();
        assert!(unknown.contains("expected one of: one, two, up"), "{unknown}");
        assert!(refused("one", Some(4)).to_string().contains("has 3 patches"));
    }
}
