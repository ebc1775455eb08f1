// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory backings, named as the kernel's selftests name them.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::units::Bytes;

/// What stands behind guest memory, named as the kernel's selftests name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Backing {
    /// Private anonymous memory with huge pages forbidden.
    Anonymous,
    /// Private anonymous memory, transparent huge pages asked for.
    AnonymousThp,
    /// Private hugetlb pages of the host's default size (`None`) or of the size given.
    AnonymousHugetlb(Option<Bytes>),
    /// Shared memory (memfd) of small pages.
    Shmem,
    /// Shared hugetlb pages (memfd) of the host's default size.
    SharedHugetlb,
}

/// Why a text names no backing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "'{0}' is no backing: use anonymous, anonymous_thp, anonymous_hugetlb, \
     anonymous_hugetlb_<n>kb, _<n>mb or _<n>gb, shmem or shared_hugetlb"
)]
pub struct ParseBackingError(String);

impl FromStr for Backing {
    type Err = ParseBackingError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "anonymous" => Ok(Self::Anonymous),
            "anonymous_thp" => Ok(Self::AnonymousThp),
            "anonymous_hugetlb" => Ok(Self::AnonymousHugetlb(None)),
            "shmem" => Ok(Self::Shmem),
            "shared_hugetlb" => Ok(Self::SharedHugetlb),
            _ => text
                .strip_prefix("anonymous_hugetlb_")
                .and_then(|size| size.strip_suffix('b'))
                .filter(|size| size.ends_with(['k', 'm', 'g']))
                .and_then(|size| size.parse::<Bytes>().ok())
                .filter(|size| size.0.is_power_of_two())
                .map(|size| Self::AnonymousHugetlb(Some(size)))
                .ok_or_else(|| ParseBackingError(text.to_owned())),
        }
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anonymous => f.pad("anonymous"),
            Self::AnonymousThp => f.pad("anonymous_thp"),
            Self::AnonymousHugetlb(None) => f.pad("anonymous_hugetlb"),
            Self::AnonymousHugetlb(Some(size)) => f.pad(&format!(
                "anonymous_hugetlb_{}b",
                size.to_string().to_lowercase()
            )),
            Self::Shmem => f.pad("shmem"),
            Self::SharedHugetlb => f.pad("shared_hugetlb"),
        }
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
    fn every_backing_is_read_as_it_is_printed() {
        for name in [
            "anonymous",
            "anonymous_thp",
            "anonymous_hugetlb",
            "anonymous_hugetlb_64kb",
            "anonymous_hugetlb_2mb",
            "anonymous_hugetlb_1gb",
            "shmem",
            "shared_hugetlb",
        ] {
            assert_eq!(name.parse::<Backing>().unwrap().to_string(), name);
        }
    }

    #[test]
    fn what_is_no_backing_is_refused() {
        for name in [
            "",
            "thp",
            "anonymous_hugetlb_",
            "anonymous_hugetlb_3mb",
            "anonymous_hugetlb_2m",
        ] {
            assert!(name.parse::<Backing>().is_err(), "{name}");
        }
    }
}
