// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What this machine tells about itself, and what only its maker knows.
//!
//! A program sees the kernel's release, the CPU's name and features that user space may read, and
//! the page size. It cannot see which patches are in the kernel, which image it was booted
//! from or that it is emulated. Whoever boots the machine writes that into a JSON file and names it
//! in [`FACTS_VARIABLE`]; what stands there goes before what was found:
//!
//! ```json
//! {"series": [{"name": "stage2-fault-path", "patches": 7}], "image_sha256": "…",
//!  "emulator": "QEMU 7.2.22 -icount shift=0 …", "cpu": "neoverse-n1", "features": {"fwb": 0}}
//! ```
//!
//! `"series": []` says: the plain kernel. A field left out stays as it was found.

pub mod aarch64;
pub mod x86_64;

use std::{
    collections::BTreeMap,
    env, fs, io,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use thiserror::Error;

#[cfg(target_arch = "aarch64")]
use aarch64 as native;
#[cfg(target_arch = "x86_64")]
use x86_64 as native;

use crate::record::{Host, Series};
use crate::units::Bytes;

/// The environment variable that names the file of facts.
pub const FACTS_VARIABLE: &str = "GRANULE_HOST_FACTS";

/// Why the file of facts cannot be used.
#[derive(Debug, Error)]
pub enum FactsError {
    /// It cannot be read.
    #[error("cannot read the host facts {path}, which {FACTS_VARIABLE} names")]
    Read {
        /// Which file.
        path: PathBuf,
        /// What the host says to it.
        #[source]
        source: io::Error,
    },
    /// It is not as it should be.
    #[error("{path}, which {FACTS_VARIABLE} names, holds no host facts")]
    Parse {
        /// Which file.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: serde_json::Error,
    },
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Facts {
    series: Option<Vec<Series>>,
    image_sha256: Option<String>,
    emulator: Option<String>,
    cpu: Option<String>,
    features: BTreeMap<String, u64>,
}

pub(crate) use native::hint;

impl Host {
    /// This machine, the facts of its maker included.
    ///
    /// # Errors
    /// A file of facts is named but cannot be used.
    pub fn of_this_machine() -> Result<Self, FactsError> {
        match env::var_os(FACTS_VARIABLE) {
            Some(path) => Self::with_facts(Path::new(&path)),
            None => Ok(Self::found()),
        }
    }

    /// This machine, with the facts in a file.
    ///
    /// # Errors
    /// The file cannot be used.
    pub fn with_facts(path: &Path) -> Result<Self, FactsError> {
        Self::found().overlaid(path)
    }

    /// What can be seen without facts.
    fn found() -> Self {
        let name = rustix::system::uname();
        Self {
            arch: name.machine().to_string_lossy().into_owned(),
            kernel: name.release().to_string_lossy().into_owned(),
            series: None,
            image_sha256: None,
            cpu: native::cpu_name(),
            features: native::cache_features(),
            page_size: Some(Bytes(rustix::param::page_size() as u64)),
            emulator: None,
        }
    }

    fn overlaid(self, path: &Path) -> Result<Self, FactsError> {
        let text = fs::read_to_string(path).map_err(|source| FactsError::Read {
            path: path.to_owned(),
            source,
        })?;
        let facts: Facts = serde_json::from_str(&text).map_err(|source| FactsError::Parse {
            path: path.to_owned(),
            source,
        })?;
        let mut features = self.features;
        features.extend(facts.features);
        Ok(Self {
            series: facts.series.or(self.series),
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
    fn this_machine_has_a_kernel_and_a_page_size() {
        let host = Host::of_this_machine().unwrap();

        assert!(!host.arch.is_empty() && !host.kernel.is_empty());
        assert!(host.page_size.unwrap().0.is_power_of_two());
        assert_eq!(host.series, None, "only the maker of a kernel knows");
    }

    #[test]
    fn facts_go_before_what_was_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("facts.json");
        let facts = r#"{"series": [{"name": "a", "patches": 2}], "features": {"fwb": 0},
                        "emulator": "QEMU"}"#;
        fs::write(&path, facts).unwrap();
        let found = Host {
            cpu: Some("neoverse-n1 r3p1".to_owned()),
            features: [("dic".to_owned(), 1)].into(),
            ..Host::default()
        };

        let host = found.overlaid(&path).unwrap();

        assert_eq!(host.series.unwrap()[0].patches, 2);
        assert_eq!(host.emulator.as_deref(), Some("QEMU"));
        assert_eq!(host.cpu.as_deref(), Some("neoverse-n1 r3p1"));
        assert_eq!(host.features.len(), 2);
    }

    #[test]
    fn unusable_facts_are_an_error_with_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("facts.json");
        let missing = Host::default().overlaid(&path).unwrap_err();
        fs::write(&path, r#"{"serie": []}"#).unwrap();
        let misspelt = Host::default().overlaid(&path).unwrap_err();

        assert!(matches!(missing, FactsError::Read { .. }));
        assert!(matches!(misspelt, FactsError::Parse { .. }));
        assert!(misspelt.to_string().contains("facts.json"));
    }
}
