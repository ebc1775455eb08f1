// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Provenance: kernel and host of each side, and the fields that must match in a comparison.
//!
//! The series, the kernel image and the local part of the kernel release may differ. Architecture,
//! kernel version, CPU with its features, base page, emulator with its options, engine and page
//! sizes that back the memory must be known and equal. Each configuration is checked, because
//! the emulator's options may depend on it.
//!
//! The programs that made the results may differ too, which a note of the comparison reports.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::Serialize;

use crate::sample::Sample;
use granule_types::{
    make_printable,
    record::{HostInfo, ResidentPages, Series},
    units::Bytes,
};

/// Minimum share of the memory for a page size to count as backing.
const MIN_SHARE_PERCENT: u128 = 5;

/// Provenance field that differs between the sides, has several values on one, or is unknown.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Difference {
    /// Name of the field.
    pub field: &'static str,
    /// Values before; `None` if unknown.
    pub before: BTreeSet<Option<String>>,
    /// Values after; `None` if unknown.
    pub after: BTreeSet<Option<String>>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |values: &BTreeSet<Option<String>>| {
            let values: Vec<_> =
                values.iter().map(|value| value.as_deref().unwrap_or("unknown")).collect();
            values.join(" and ")
        };
        let (before, after) = (text(&self.before), text(&self.after));
        if before == after {
            write!(f, "{}: {before} on both sides", self.field)
        } else {
            write!(f, "{}: {before} before, {after} after", self.field)
        }
    }
}

pub const ENGINE_FIELD: &str = "engine";
const EMULATOR_FIELD: &str = "emulator";

/// Name of a field, and its value in a sample; `None` if unknown.
type ProvenanceField = (&'static str, fn(&Sample) -> Option<String>);

const REQUIRED_FIELDS: [ProvenanceField; 7] = [
    ("architecture", |r| none_if_empty(&r.host.arch)),
    ("kernel version", |r| none_if_empty(kernel_version(&r.host.kernel))),
    ("CPU", |r| r.host.cpu.clone()),
    ("CPU features", |r| feature_list(&r.host)),
    ("base page", |r| r.host.page_size.map(|size| size.to_string())),
    (EMULATOR_FIELD, |r| {
        is_known(&r.host).then(|| r.host.emulator.clone().unwrap_or("none".into()))
    }),
    (ENGINE_FIELD, |r| none_if_empty(&r.engine)),
];

/// Returns the differences between runs of one configuration, in order of importance.
pub fn differences(before: &[&Sample], after: &[&Sample]) -> Vec<Difference> {
    let mut found = required_differences(before, after, |_, value| value);
    // Page sizes may differ between runs of one side, so the sets are compared.
    let [before, after] = [before, after].map(|side| backing_page_sizes(side.iter().copied()));
    if before != after {
        found.push(Difference { field: "backing page sizes", before, after });
    }
    found
}

/// Returns the differences in the host between runs of two configurations. The size of an emulated
/// machine depends on the configuration, and so do the pages that back the memory.
pub fn host_differences(before: &[&Sample], after: &[&Sample]) -> Vec<Difference> {
    required_differences(before, after, |field, value| match field {
        EMULATOR_FIELD => without_machine_size(&value),
        _ => value,
    })
}

/// Returns the required fields that differ or are unknown. `normalize` receives the name and the
/// value of a field.
fn required_differences(
    before: &[&Sample],
    after: &[&Sample],
    normalize: fn(&str, String) -> String,
) -> Vec<Difference> {
    let is_known_and_equal = |difference: &Difference| {
        difference.before == difference.after
            && difference.before.len() == 1
            && !difference.before.contains(&None)
    };
    let differences = REQUIRED_FIELDS.iter().map(|(field, read)| {
        let values = |side: &[&Sample]| -> BTreeSet<_> {
            side.iter().map(|sample| Some(normalize(field, read(sample)?))).collect()
        };
        Difference { field, before: values(before), after: values(after) }
    });
    differences.filter(|difference| !is_known_and_equal(difference)).collect()
}

/// Removes the numbers of CPUs and bytes from the description of an emulator.
fn without_machine_size(emulator: &str) -> String {
    let mut words = emulator.split(' ');
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        if matches!(word, "-smp" | "-m") {
            words.next();
        } else {
            kept.push(word);
        }
    }
    kept.join(" ")
}

/// Returns the names of the programs whose digests are known and differ between the sides.
pub fn differing_programs<'a>(before: &[&'a Sample], after: &[&'a Sample]) -> BTreeSet<&'a str> {
    let names = before.iter().flat_map(|sample| sample.programs.keys());
    let differs = |name: &&'a String| {
        let digests = |side: &[&'a Sample]| -> BTreeSet<&'a String> {
            side.iter().filter_map(|sample| sample.programs.get(*name)).collect()
        };
        let (before, after) = (digests(before), digests(after));
        !after.is_empty() && before != after
    };
    names.filter(differs).map(String::as_str).collect()
}

/// Returns the page sizes that back the memory, as texts; `None` for runs that do not state them.
pub fn backing_page_sizes<'a>(
    samples: impl Iterator<Item = &'a Sample>,
) -> BTreeSet<Option<String>> {
    samples.map(|sample| sample.resident_pages.as_ref().map(page_sizes)).collect()
}

/// Reports whether the host is known; a log does not describe its host.
fn is_known(host: &HostInfo) -> bool {
    *host != HostInfo::default()
}

/// Returns the version in a kernel release, with `-rc`: `5.10.262` in `5.10.262-granule+`.
fn kernel_version(release: &str) -> &str {
    let digits = |text: &str| text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let end = release.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(release.len());
    match release[end..].strip_prefix("-rc") {
        Some(rest) => &release[..end + "-rc".len() + digits(rest)],
        None => &release[..end],
    }
}

/// Returns the CPU features as `name=value`, or `none`; `None` if the host is unknown.
pub fn feature_list(host: &HostInfo) -> Option<String> {
    let features = host.features.iter().map(|(name, value)| format!("{name}={value}"));
    let features = features.collect::<Vec<_>>().join(" ");
    is_known(host).then(|| if features.is_empty() { "none".to_owned() } else { features })
}

fn none_if_empty(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

/// Returns the page sizes that back the memory, smallest first: `4K and 2M pages`.
fn page_sizes(obtained: &ResidentPages) -> String {
    let total: u128 = obtained.resident_bytes.values().map(|&bytes| u128::from(bytes)).sum();
    let sizes: Vec<_> = obtained
        .resident_bytes
        .iter()
        .filter(|&(_, &bytes)| bytes > 0 && u128::from(bytes) * 100 >= total * MIN_SHARE_PERCENT)
        .map(|(&size, _)| Bytes(size).to_string())
        .collect();
    if sizes.is_empty() {
        return "nothing".to_owned();
    }
    format!("{} pages", sizes.join(" and "))
}

/// Provenance of one side, from its first sample; with `force`, other samples may differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Side {
    pub label: String,
    /// `uname -r`; empty if unknown.
    pub kernel: String,
    /// Applied series; `None` if unknown.
    pub series: Option<Vec<Series>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compiler: Option<String>,
    pub image_sha256: Option<String>,
    pub cpu: Option<String>,
    /// CPU features as `name=value`; empty if unknown.
    pub features: String,
    pub page_size: Option<Bytes>,
    /// Emulator; `None` on hardware and if the host is unknown.
    pub emulator: Option<String>,
    /// SHA-256 of the known programs that made the results, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub programs: BTreeMap<String, String>,
}

impl Side {
    pub(crate) fn new(label: String, samples: &[Sample]) -> Self {
        let Sample { host, programs, .. } = samples.first().cloned().unwrap_or_default();
        Self {
            label: make_printable(&label),
            features: feature_list(&host).unwrap_or_default(),
            kernel: host.kernel,
            series: host.series,
            commit: host.commit,
            compiler: host.compiler,
            image_sha256: host.image_sha256,
            cpu: host.cpu,
            page_size: host.page_size,
            emulator: host.emulator,
            programs,
        }
    }

    /// Removes the size of the emulated machine, which differs between configurations.
    pub(crate) fn remove_machine_size(&mut self) {
        self.emulator = self.emulator.as_deref().map(without_machine_size);
    }

    pub(crate) const fn is_emulated(&self) -> bool {
        self.emulator.is_some()
    }

    /// Formats the programs with the start of their digests; `None` if no program is known.
    pub(crate) fn programs_line(&self) -> Option<String> {
        let start = |digest: &str| digest.get(..12).unwrap_or(digest).to_owned();
        let programs = self.programs.iter().map(|(name, hash)| format!("{name} {}", start(hash)));
        Some(programs.collect::<Vec<_>>().join(", ")).filter(|line| !line.is_empty())
    }

    /// Formats kernel, series and image in one line; `None` if unknown.
    pub(crate) fn kernel_line(&self) -> Option<String> {
        if self.kernel.is_empty() {
            return None;
        }
        let commit = self.commit.as_deref().and_then(|hash| hash.get(..12));
        let commit = commit.map(|hash| format!("commit {hash}"));
        let series = series_line(self.series.as_deref()).or(commit);
        let series = series.unwrap_or_else(|| "series not known".to_owned());
        let image = self.image_sha256.as_deref().and_then(|hash| hash.get(..12));
        let image = image.map(|start| format!(", image {start}"));
        Some(format!("Linux {}, {series}{}", self.kernel, image.unwrap_or_default()))
    }
}

/// Formats the list of series; `None` if unknown.
pub fn series_line(series: Option<&[Series]>) -> Option<String> {
    let series = series?;
    if series.is_empty() {
        return Some("no series".to_owned());
    }
    let each = series.iter().map(|series| match series.patches {
        // The series of a model run is a policy, which has no patches.
        0 => series.name.clone(),
        1 => format!("{} (1 patch)", series.name),
        patches => format!("{} ({patches} patches)", series.name),
    });
    Some(each.collect::<Vec<_>>().join(" + "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests;

    fn record() -> Sample {
        Sample::from(&tests::record())
    }

    fn fields(before: &[&Sample], after: &[&Sample]) -> Vec<&'static str> {
        differences(before, after).iter().map(|d| d.field).collect()
    }

    #[test]
    fn series_image_and_local_version_may_differ() {
        let before = record();
        let mut after = record();
        after.host.kernel = "5.10.262-patched".to_owned();
        after.host.series = None;
        after.host.image_sha256 = Some("ff".to_owned());

        assert_eq!(differences(&[&before], &[&after]), []);
    }

    #[test]
    fn other_fields_must_be_equal() {
        type Edit = fn(&mut Sample);
        let edits: [(&str, Edit); 8] = [
            ("architecture", |r| r.host.arch = "x86_64".to_owned()),
            ("kernel version", |r| r.host.kernel = "5.10.263".to_owned()),
            ("CPU", |r| r.host.cpu = Some("cortex-a72".to_owned())),
            ("CPU features", |r| r.host.features.extend([("fwb".to_owned(), 1)])),
            ("base page", |r| r.host.page_size = Some(Bytes::kib(64))),
            ("emulator", |r| r.host.emulator = None),
            (ENGINE_FIELD, |r| r.engine = "model".to_owned()),
            ("backing page sizes", |r| {
                r.resident_pages =
                    Some(ResidentPages { resident_bytes: [(4096, 64 << 20)].into() });
            }),
        ];
        for (field, edit) in edits {
            let mut after = record();
            edit(&mut after);
            assert_eq!(fields(&[&record()], &[&after]), [field]);
            assert_eq!(fields(&[&after], &[&record()]), [field]);
        }
    }

    #[test]
    fn unknown_and_mixed_fields_are_differences() {
        let mut unknown = record();
        unknown.host.cpu = None;
        let mut other = record();
        other.host.cpu = Some("cortex-a72".to_owned());

        let both = differences(&[&unknown], &[&unknown]);
        let mixed = differences(&[&record(), &other], &[&record()]);

        assert_eq!(both[0].to_string(), "CPU: unknown on both sides");
        assert_eq!(
            mixed[0].to_string(),
            "CPU: cortex-a72 and neoverse-n1 before, neoverse-n1 after"
        );
    }

    #[test]
    fn a_few_small_pages_do_not_change_the_backing() {
        let obtained =
            |small, huge| ResidentPages { resident_bytes: [(4096, small), (2 << 20, huge)].into() };
        assert_eq!(page_sizes(&obtained(4096, 64 << 20)), "2M pages");
        assert_eq!(page_sizes(&obtained(32 << 20, 32 << 20)), "4K and 2M pages");
        assert_eq!(page_sizes(&obtained(0, 0)), "nothing");
        assert_eq!(page_sizes(&obtained(u64::MAX, u64::MAX)), "4K and 2M pages");
    }

    #[test]
    fn a_version_excludes_the_local_part() {
        for (release, expected) in [
            ("5.10.262", "5.10.262"),
            ("5.10.262-granule+", "5.10.262"),
            ("7.3.0-rc2-00012-gabc", "7.3.0-rc2"),
            ("6.1.0+", "6.1.0"),
            ("custom", ""),
        ] {
            assert_eq!(kernel_version(release), expected);
        }
    }
}
