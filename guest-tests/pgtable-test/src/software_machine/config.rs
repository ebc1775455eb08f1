// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Configuration of the software machine, in real and in virtual time, and its errors.

use std::{collections::BTreeMap, io};

use granule_stage2::{MapError, UnknownPolicy};
use thiserror::Error;

use granule_types::{backing::Backing, host::FactsError, record::Series, units::Bytes};

/// The default policy.
pub const DEFAULT_POLICY: &str = "granule";

/// Start of the region under test: aligned to the largest block.
pub(super) const START: u64 = 1 << 32;

/// Base page size.
pub(super) const PAGE: u64 = 4096;

/// Greatest number of vCPUs, above that of any KVM host; each has a thread or a stack.
const MOST_VCPUS: u32 = 4096;

/// Greatest size of the region under test.
const MOST_MEMORY: Bytes = Bytes::gib(200);

/// Configuration of a software machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SoftwareMachineConfig {
    /// Backing of the region: the page size that the fault path finds.
    pub backing: Backing,
    /// Size of the region, rounded up to the backing's page.
    pub memory: Bytes,
    /// Number of vCPUs, at least one.
    pub vcpus: u32,
    /// Name of a preset of the engine's policy.
    pub policy: String,
}

impl SoftwareMachineConfig {
    /// Checks the sizes, without making the machine.
    ///
    /// # Errors
    /// The backing is not supported, or the memory or the number of vCPUs is too large.
    pub fn check(&self) -> Result<(), SoftwareMachineError> {
        self.size()?;
        if self.vcpus > MOST_VCPUS {
            return Err(SoftwareMachineError::Vcpus { vcpus: self.vcpus });
        }
        Ok(())
    }

    /// Returns the region's size: whole pages of the backing.
    pub(super) fn size(&self) -> Result<u64, SoftwareMachineError> {
        let page = page_size(self.backing)?;
        match self.memory.checked_align_up(Bytes(page)) {
            Some(size) if size <= MOST_MEMORY => Ok(size.0),
            _ => Err(SoftwareMachineError::Size { size: self.memory }),
        }
    }

    /// Returns the policy as a series in the provenance of results: like a series, it is the change
    /// between two runs.
    pub(super) fn series(&self) -> Vec<Series> {
        vec![Series {
            name: format!("model:{}", self.policy),
            patches: 0,
        }]
    }
}

/// Error of a software machine.
#[derive(Debug, Error)]
pub enum SoftwareMachineError {
    /// The policy is unknown.
    #[error("unknown --policy {name}")]
    Policy {
        /// Name of the policy.
        name: String,
        /// The known names.
        #[source]
        source: UnknownPolicy,
    },
    /// The backing's page is not a block size of stage 2 with 4K pages.
    #[error(
        "--engine model does not support {backing}: stage 2 with 4K pages maps 4K, 2M or 1G; use \
         anonymous, anonymous_thp, anonymous_hugetlb_2mb or anonymous_hugetlb_1gb"
    )]
    Backing {
        /// The backing.
        backing: Backing,
    },
    /// The region is too large.
    #[error("-b {size} is too large; --engine model supports up to {MOST_MEMORY}")]
    Size {
        /// Size of the region.
        size: Bytes,
    },
    /// The machine has too many vCPUs.
    #[error("-v {vcpus} is too large; --engine model supports up to {MOST_VCPUS} vCPUs")]
    Vcpus {
        /// Number of vCPUs.
        vcpus: u32,
    },
    /// The host provides no memory.
    #[error("cannot allocate {size} of memory; use a smaller -b")]
    Memory {
        /// Size of the region.
        size: Bytes,
        /// The host's error.
        #[source]
        source: io::Error,
    },
    /// The properties of the host cannot be read.
    #[error("cannot read the properties of this host")]
    Host(#[source] FactsError),
    /// The engine refused an operation, which is a defect.
    #[error("the stage-2 engine refused the operation")]
    Engine(#[source] MapError),
    /// The address is outside the region.
    #[error("{0:#x} is outside the memory under test")]
    Outside(u64),
    /// Dirty logging is off.
    #[error("dirty logging is off")]
    LoggingOff,
}

/// Returns the page size of a backing.
pub(super) fn page_size(backing: Backing) -> Result<u64, SoftwareMachineError> {
    match backing {
        Backing::Anonymous | Backing::Shmem => Ok(PAGE),
        Backing::AnonymousThp | Backing::AnonymousHugetlb(None) | Backing::SharedHugetlb => {
            Ok(2 << 20)
        }
        Backing::AnonymousHugetlb(Some(size)) if size == Bytes::mib(2) || size == Bytes::gib(1) => {
            Ok(size.0)
        }
        Backing::AnonymousHugetlb(_) => Err(SoftwareMachineError::Backing { backing }),
    }
}

/// Returns the greatest number of stage-2 tables: one for each 2M, as many that wait to be freed,
/// and the memcaches of the vCPUs.
pub(super) fn most_tables(size: u64, vcpus: usize) -> usize {
    let ranges = 2 * (size >> 21) + 2 * (size >> 30) + 64;
    usize::try_from(ranges).unwrap_or(usize::MAX) + 48 * vcpus
}

/// Returns the CPU features in results: those that would avoid maintenance, all absent.
pub(super) fn cpu_features() -> BTreeMap<String, u64> {
    [("bbm", 0), ("dic", 0), ("fwb", 0), ("tlbirange", 0)]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
}
