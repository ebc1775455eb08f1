// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What this machine tells about itself, and what only its maker knows.
//!
//! A program sees the kernel's release, the CPU's name, the page size and, on arm64, two cache
//! features (`CTR_EL0`). It cannot see which patches are in the kernel, which image it was booted
//! from or that it is emulated. Whoever boots the machine writes that into a JSON file and names it
//! in [`FACTS_VARIABLE`]; what stands there goes before what was found:
//!
//! ```json
//! {"series": [{"name": "stage2-fault-path", "patches": 7}], "image_sha256": "…",
//!  "emulator": "QEMU 7.2.22 -icount shift=0 …", "cpu": "neoverse-n1", "features": {"fwb": 0}}
//! ```
//!
//! `"series": []` says: the plain kernel. A field left out stays as it was found.

use std::{
    collections::BTreeMap,
    env, fs, io,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use thiserror::Error;

use super::{Host, Series};
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
            cpu: cpu_name(),
            features: cache_features(),
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

/// The features that change the fault path, from two of arm64's ID registers: `fwb`, `bbm` (its
/// level) and `tlbirange`. Fields as in the Arm manual, D19.2 (`ID_AA64ISAR0_EL1`,
/// `ID_AA64MMFR2_EL1`).
///
/// Linux hides these fields from user space (`ftr_id_aa64mmfr2` in `cpufeature.c`), but a vCPU's
/// copy of the registers, read through KVM, has them.
pub fn stage2_features(isar0: u64, mmfr2: u64) -> BTreeMap<String, u64> {
    let field = |register: u64, shift: u32| (register >> shift) & 0xf;
    [
        ("bbm", field(mmfr2, 52)),
        ("fwb", field(mmfr2, 40)),
        ("tlbirange", u64::from(field(isar0, 56) >= 2)),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

/// `dic` and `idc`, which user space may read.
#[cfg(target_arch = "aarch64")]
fn cache_features() -> BTreeMap<String, u64> {
    let ctr: u64;
    // SAFETY: CTR_EL0 can be read by user space; where the CPUs differ Linux gives a value that is
    // right for all of them (`ctr_read_handler()`).
    unsafe {
        std::arch::asm!("mrs {ctr}, ctr_el0", ctr = out(reg) ctr, options(nomem, nostack, preserves_flags));
    }
    [("idc", (ctr >> 28) & 1), ("dic", (ctr >> 29) & 1)]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
}

#[cfg(not(target_arch = "aarch64"))]
fn cache_features() -> BTreeMap<String, u64> {
    BTreeMap::new()
}

/// The CPU's name: from its identification register on arm64, from `/proc/cpuinfo` elsewhere.
fn cpu_name() -> Option<String> {
    let midr = fs::read_to_string("/sys/devices/system/cpu/cpu0/regs/identification/midr_el1")
        .ok()
        .and_then(|text| u64::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok());
    match midr {
        Some(midr) => Some(name_of_midr(midr)),
        None => name_in_cpuinfo(&fs::read_to_string("/proc/cpuinfo").ok()?),
    }
}

fn name_in_cpuinfo(text: &str) -> Option<String> {
    let value = |key: &str| {
        text.lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(found, _)| found.trim() == key)
            .map(|(_, value)| value.trim())
    };
    let number = |key: &str| {
        let text = value(key)?;
        match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).ok(),
            None => text.parse().ok(),
        }
    };
    let midr = || {
        Some(
            number("CPU implementer")? << 24
                | number("CPU variant")? << 20
                | 0xf << 16
                | number("CPU part")? << 4
                | number("CPU revision")?,
        )
    };
    value("model name")
        .map(str::to_owned)
        .or_else(|| midr().map(name_of_midr))
}

/// Names a CPU by implementer and part (`arch/arm64/include/asm/cputype.h`), with its revision.
fn name_of_midr(midr: u64) -> String {
    let name = match ((midr >> 24) & 0xff, (midr >> 4) & 0xfff) {
        (0x41, 0xd03) => "cortex-a53",
        (0x41, 0xd07) => "cortex-a57",
        (0x41, 0xd08) => "cortex-a72",
        (0x41, 0xd0b) => "cortex-a76",
        (0x41, 0xd0c) => "neoverse-n1",
        (0x41, 0xd40) => "neoverse-v1",
        (0x41, 0xd49) => "neoverse-n2",
        (0x41, 0xd4f) => "neoverse-v2",
        (0x41, 0xd84) => "neoverse-v3",
        (0x41, 0xd8e) => "neoverse-n3",
        (0x46, 0x001) => "a64fx",
        (0x48, 0xd01) => "kunpeng-920",
        (0xc0, 0xac3) => "ampere-1",
        _ => return format!("midr {midr:#x}"),
    };
    format!("{name} r{}p{}", (midr >> 20) & 0xf, midr & 0xf)
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

    #[test]
    fn stage2_features_are_read_from_their_fields() {
        let none = stage2_features(1 << 56, 0);
        let all = stage2_features(2 << 56, 2 << 52 | 1 << 40);

        assert!(none.values().all(|value| *value == 0));
        assert_eq!(
            all.into_iter().collect::<Vec<_>>(),
            [("bbm", 2), ("fwb", 1), ("tlbirange", 1)].map(|(n, v)| (n.to_owned(), v))
        );
    }

    #[test]
    fn a_cpu_is_named_from_either_source() {
        let arm = "processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\n\
                   CPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n";

        assert_eq!(name_of_midr(0x413f_d0c1), "neoverse-n1 r3p1");
        assert_eq!(name_of_midr(0x1234_5678), "midr 0x12345678");
        assert_eq!(name_in_cpuinfo(arm).as_deref(), Some("neoverse-n1 r3p1"));
        assert_eq!(
            name_in_cpuinfo("model name : X 3000\n").as_deref(),
            Some("X 3000")
        );
        assert_eq!(name_in_cpuinfo(""), None);
    }
}
