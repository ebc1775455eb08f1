// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory backings and their names.
//!
//! Backings have the names of the kernel's selftests. The command line also accepts aliases, which
//! results never contain.
//!
//! To add an alias, add a row to [`Backing::ALIASES`], which the parser, the error message and the
//! help text use. To add a backing, add a variant to [`Backing`] and to [`Backing::WITHOUT_SIZE`],
//! and extend the matches that the compiler reports.

use std::{borrow::Cow, fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::units::Bytes;

/// Backing of guest memory on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Backing {
    /// Private anonymous memory without transparent huge pages.
    #[default]
    Anonymous,
    /// Private anonymous memory with transparent huge pages of a block.
    AnonymousThp,
    /// Private anonymous memory with transparent huge pages of the given size, smaller than a block
    /// (mTHP, Linux 6.8).
    AnonymousMthp(Bytes),
    /// Private hugetlb pages of the given size, or of the host's default size (`None`).
    AnonymousHugetlb(Option<Bytes>),
    /// Shared memory (memfd) of base pages.
    Shmem,
    /// Shared hugetlb pages (memfd) of the host's default size.
    SharedHugetlb,
}

/// Prefix of the names of hugetlb backings with a size.
const SIZED_HUGETLB_PREFIX: &str = "anonymous_hugetlb_";

/// Prefix of the names of backings with transparent huge pages smaller than a block.
const MTHP_PREFIX: &str = "anonymous_mthp_";

impl Backing {
    /// Backings without a size in their name, in the order of the help text.
    pub const WITHOUT_SIZE: &[Self] = &[
        Self::Anonymous,
        Self::AnonymousThp,
        Self::AnonymousHugetlb(None),
        Self::Shmem,
        Self::SharedHugetlb,
    ];

    /// Short names, accepted by every option that takes a backing.
    pub const ALIASES: &[(&str, Self)] = &[
        ("base", Self::Anonymous),
        ("4k", Self::Anonymous),
        ("thp", Self::AnonymousThp),
        ("mthp", Self::AnonymousMthp(Bytes::kib(64))),
        ("2m", Self::AnonymousHugetlb(Some(Bytes::mib(2)))),
        ("32m", Self::AnonymousHugetlb(Some(Bytes::mib(32)))),
        ("512m", Self::AnonymousHugetlb(Some(Bytes::mib(512)))),
        ("1g", Self::AnonymousHugetlb(Some(Bytes::gib(1)))),
    ];

    /// Returns the name in results and on the command line.
    fn name(self) -> Cow<'static, str> {
        match self {
            Self::Anonymous => "anonymous".into(),
            Self::AnonymousThp => "anonymous_thp".into(),
            Self::AnonymousHugetlb(None) => "anonymous_hugetlb".into(),
            Self::AnonymousHugetlb(Some(size)) => sized_name(SIZED_HUGETLB_PREFIX, size).into(),
            Self::AnonymousMthp(size) => sized_name(MTHP_PREFIX, size).into(),
            Self::Shmem => "shmem".into(),
            Self::SharedHugetlb => "shared_hugetlb".into(),
        }
    }

    /// Returns all names and aliases, for messages and help texts.
    #[must_use]
    pub fn all_names() -> String {
        let mut names: Vec<String> = Self::WITHOUT_SIZE.iter().map(Self::to_string).collect();
        names.push(format!("{SIZED_HUGETLB_PREFIX}SIZE (64kb, 2mb, 1gb)"));
        names.push(format!("{MTHP_PREFIX}SIZE (64kb)"));
        let aliases = Self::ALIASES.iter();
        let aliases: Vec<String> =
            aliases.map(|(alias, backing)| format!("{alias} = {backing}")).collect();
        format!("{}; short: {}", names.join(", "), aliases.join(", "))
    }
}

fn sized_name(prefix: &str, size: Bytes) -> String {
    format!("{prefix}{}b", size.to_string().to_lowercase())
}

/// Returns the size in a name with a prefix.
fn size_in_name(text: &str, prefix: &str) -> Option<Bytes> {
    let size = text.strip_prefix(prefix)?.strip_suffix('b')?;
    let has_unit = size.ends_with(['k', 'm', 'g']);
    size.parse().ok().filter(|size: &Bytes| has_unit && size.0.is_power_of_two())
}

/// Error returned when a text does not name a backing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("unknown backing '{0}'; expected one of {names}", names = Backing::all_names())]
pub struct ParseBackingError(String);

impl FromStr for Backing {
    type Err = ParseBackingError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut backings = Self::WITHOUT_SIZE.iter().copied();
        let mut aliases = Self::ALIASES.iter();
        backings
            .find(|backing| backing.name() == text)
            .or_else(|| Some(aliases.find(|(alias, _)| *alias == text)?.1))
            .or_else(|| {
                Some(Self::AnonymousHugetlb(Some(size_in_name(text, SIZED_HUGETLB_PREFIX)?)))
            })
            .or_else(|| Some(Self::AnonymousMthp(size_in_name(text, MTHP_PREFIX)?)))
            .ok_or_else(|| ParseBackingError(text.to_owned()))
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}

impl Serialize for Backing {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Backing {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_parsed_and_printed() {
        let unsized_names = Backing::WITHOUT_SIZE.iter().map(|backing| backing.to_string());
        let sized = ["64kb", "2mb", "1gb"].map(|size| format!("anonymous_hugetlb_{size}"));
        let mthp = ["anonymous_mthp_64kb".to_owned()];
        for name in unsized_names.chain(sized).chain(mthp) {
            assert_eq!(name.parse::<Backing>().unwrap().to_string(), name);
        }
    }

    #[test]
    fn an_alias_is_parsed_and_printed_as_its_long_name() {
        for (alias, name) in [
            ("base", "anonymous"),
            ("4k", "anonymous"),
            ("thp", "anonymous_thp"),
            ("mthp", "anonymous_mthp_64kb"),
            ("2m", "anonymous_hugetlb_2mb"),
            ("32m", "anonymous_hugetlb_32mb"),
            ("512m", "anonymous_hugetlb_512mb"),
            ("1g", "anonymous_hugetlb_1gb"),
        ] {
            assert_eq!(alias.parse::<Backing>().unwrap().to_string(), name);
        }
    }

    #[test]
    fn an_unknown_name_is_refused_with_all_names_and_aliases() {
        for name in
            ["", "THP", "anonymous_hugetlb_", "anonymous_hugetlb_3mb", "anonymous_hugetlb_2m"]
        {
            assert!(name.parse::<Backing>().is_err(), "{name}");
        }
        let error = "hugepages".parse::<Backing>().unwrap_err().to_string();
        for name in ["'hugepages'", "anonymous_thp", "thp = anonymous_thp"] {
            assert!(error.contains(name), "{error}");
        }
    }
}
