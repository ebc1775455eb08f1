// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Provenance of results: properties of this host.
//!
//! A program can read the kernel's release, the CPU's name and some of its features, and the page
//! size. It cannot read the applied patches, the kernel image or the emulator. The lab, which boots
//! the host, writes these host facts into a JSON file and names the file in [`FACTS_VARIABLE`].
//! They override the detected properties:
//!
//! ```json
//! {"series": [{"name": "stage2-fault-path", "patches": 7}], "image_sha256": "…",
//!  "emulator": "QEMU 7.2.22 -icount shift=0 …", "cpu": "neoverse-n1", "features": {"fwb": 0}}
//! ```
//!
//! `"series": []` means the plain kernel. An omitted field keeps its detected value.

pub mod aarch64;

use std::{
    collections::BTreeMap,
    env, fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use thiserror::Error;

#[cfg(target_arch = "aarch64")]
use aarch64 as native;

use crate::{
    record::{HostInfo, Series},
    units::Bytes,
};

/// Environment variable that names the file of host facts.
pub const FACTS_VARIABLE: &str = "GRANULE_HOST_FACTS";

/// Error returned when the file of host facts is unusable.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "each message describes its variant")]
pub enum FactsError {
    #[error("cannot read the host facts {path}, which {FACTS_VARIABLE} names")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path}, which {FACTS_VARIABLE} names, is not a valid file of host facts")]
    Parse {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
}

/// Contents of the file of host facts.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HostFacts {
    /// Overrides [`HostInfo::series`].
    pub series: Option<Vec<Series>>,
    /// Overrides [`HostInfo::commit`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// Overrides [`HostInfo::compiler`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compiler: Option<String>,
    /// Overrides [`HostInfo::image_sha256`].
    pub image_sha256: Option<String>,
    /// Overrides [`HostInfo::emulator`].
    pub emulator: Option<String>,
    /// Overrides [`HostInfo::cpu`].
    pub cpu: Option<String>,
    /// Overrides the entries of [`HostInfo::features`] that have the same names.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub features: BTreeMap<String, u64>,
}

/// Properties of an x86_64 host.
#[cfg(target_arch = "x86_64")]
mod native {
    use std::collections::BTreeMap;

    /// Returns no features: caches are coherent on this architecture.
    pub fn cache_features() -> BTreeMap<String, u64> {
        BTreeMap::new()
    }

    /// Returns the CPU's name.
    pub fn cpu_name() -> Option<String> {
        let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
        let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
        pairs.find(|(key, _)| key.trim() == "model name").map(|(_, value)| value.trim().to_owned())
    }
}

impl HostInfo {
    /// Returns the properties of this host, including those in the file that [`FACTS_VARIABLE`]
    /// names.
    ///
    /// # Errors
    /// [`FACTS_VARIABLE`] names an unusable file.
    pub fn of_this_host() -> Result<Self, FactsError> {
        match env::var_os(FACTS_VARIABLE) {
            Some(path) => Self::with_facts(Path::new(&path)),
            None => Ok(Self::detect()),
        }
    }

    /// Returns the properties of this host, including those in the file `path`.
    ///
    /// # Errors
    /// The file is unusable.
    pub fn with_facts(path: &Path) -> Result<Self, FactsError> {
        Self::detect().with_overrides(path)
    }

    /// Returns the properties that this process can read.
    fn detect() -> Self {
        let name = rustix::system::uname();
        Self {
            arch: name.machine().to_string_lossy().into_owned(),
            kernel: name.release().to_string_lossy().into_owned(),
            series: None,
            commit: None,
            compiler: None,
            image_sha256: None,
            cpu: native::cpu_name(),
            features: native::cache_features(),
            page_size: Some(Bytes(rustix::param::page_size() as u64)),
            emulator: None,
        }
    }

    /// Replaces the properties that the file `path` contains.
    fn with_overrides(self, path: &Path) -> Result<Self, FactsError> {
        let text = fs::read_to_string(path)
            .map_err(|source| FactsError::Read { path: path.to_owned(), source })?;
        let facts: HostFacts = serde_json::from_str(&text)
            .map_err(|source| FactsError::Parse { path: path.to_owned(), source })?;
        let mut features = self.features;
        features.extend(facts.features);
        Ok(Self {
            series: facts.series.or(self.series),
            commit: facts.commit.or(self.commit),
            compiler: facts.compiler.or(self.compiler),
            image_sha256: facts.image_sha256.or(self.image_sha256),
            emulator: facts.emulator.or(self.emulator),
            cpu: facts.cpu.or(self.cpu),
            features,
            ..self
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_a_kernel_and_a_page_size() {
        let host = HostInfo::of_this_host().unwrap();

        assert!(!host.arch.is_empty() && !host.kernel.is_empty());
        assert!(host.page_size.unwrap().0.is_power_of_two());
        assert_eq!(host.series, None, "a process cannot detect the applied series");
    }

    #[test]
    fn host_facts_override_detected_properties() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("facts.json");
        let facts = r#"{"series": [{"name": "a", "patches": 2}], "features": {"fwb": 0},
                        "emulator": "QEMU"}"#;
        fs::write(&path, facts).unwrap();
        let detected = HostInfo {
            cpu: Some("neoverse-n1 r3p1".to_owned()),
            features: [("dic".to_owned(), 1)].into(),
            ..HostInfo::default()
        };

        let host = detected.with_overrides(&path).unwrap();

        assert_eq!(host.series.unwrap()[0].patches, 2);
        assert_eq!(host.emulator.as_deref(), Some("QEMU"));
        assert_eq!(host.cpu.as_deref(), Some("neoverse-n1 r3p1"));
        assert_eq!(host.features.len(), 2);
    }

    #[test]
    fn unusable_host_facts_are_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("facts.json");
        let missing = HostInfo::default().with_overrides(&path).unwrap_err();
        fs::write(&path, r#"{"serie": []}"#).unwrap();
        let misspelt = HostInfo::default().with_overrides(&path).unwrap_err();

        assert!(matches!(missing, FactsError::Read { .. }));
        assert!(matches!(misspelt, FactsError::Parse { .. }));
        assert!(misspelt.to_string().contains("facts.json"));
    }
}
