// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The software machine: threads as vCPUs, and the [`granule_stage2`] engine as the hypervisor.
//!
//! It shows on any computer how a policy of the fault path affects the phases of the test.
//!
//! *Real*: the engine's table changes, its locks and lock contention; the memory; the CMOs, which
//! cause most of the difference between policies; the elapsed time.
//!
//! *Not real*: no guest runs; each access walks the stage-2 tables in software. No TLB exists, so
//! TLB invalidations and their barriers are only counted. A fault is a function call instead of an
//! exception. The memory is populated in advance, with pages of the host's choice; the backing only
//! determines the page size that the fault path uses. Instructions are compared, not executed. So
//! the machine compares policies, not hosts, and its times are not those of an arm64 CPU.

mod cache;
mod machine;
mod memory;
mod operations;
mod state;
#[cfg(test)]
mod tests;
mod vcpu;

use std::io;

use granule_stage2::{MapError, Policy, UnknownPolicy};
use thiserror::Error;

use granule_types::{backing::Backing, host::FactsError, record::Series, units::Bytes};

pub use machine::SoftwareMachine;

/// The default policy.
pub const DEFAULT_POLICY: &str = "granule";

/// Start of the region under test: aligned to the largest block.
const REGION_START: u64 = 1 << 32;
const PAGE_SIZE: u64 = 4096;
/// Maximum number of vCPUs: more than KVM supports on any host.
const MAX_VCPUS: u32 = 4096;
/// Maximum size of the region under test.
const MAX_MEMORY: Bytes = Bytes::gib(200);

/// Configuration of a software machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SoftwareMachineConfig {
    /// Backing of the region, which determines the page size that the fault path uses.
    pub backing: Backing,
    /// Size of the region, rounded up to the backing's page.
    pub memory: Bytes,
    /// Number of vCPUs, at least one.
    pub vcpus: u32,
    /// Name of a preset of the engine's policy.
    pub policy: String,
}

impl SoftwareMachineConfig {
    /// Checks backing, memory and number of vCPUs, without creating the machine.
    ///
    /// # Errors
    /// The backing is not supported, or the memory or the number of vCPUs is too large.
    pub fn check(&self) -> Result<(), SoftwareMachineError> {
        self.size()?;
        if self.vcpus > MAX_VCPUS {
            return Err(SoftwareMachineError::TooManyVcpus(self.vcpus));
        }
        Ok(())
    }

    const fn too_large_error(&self) -> SoftwareMachineError {
        SoftwareMachineError::MemoryTooLarge(self.memory)
    }

    /// Returns the region's size, rounded up to whole pages of the backing.
    fn size(&self) -> Result<u64, SoftwareMachineError> {
        let page = backing_page_size(self.backing)?;
        match self.memory.checked_align_up(Bytes(page)) {
            Some(size) if size <= MAX_MEMORY => Ok(size.0),
            _ => Err(self.too_large_error()),
        }
    }

    fn parse_policy(&self) -> Result<Policy, SoftwareMachineError> {
        let unknown = |source| SoftwareMachineError::UnknownPolicy(self.policy.clone(), source);
        self.policy.parse().map_err(unknown)
    }

    /// Returns the policy as the series of the results' provenance, so that comparisons of results
    /// name it.
    fn series(&self) -> Vec<Series> {
        vec![Series { name: format!("model:{}", self.policy), patches: 0 }]
    }
}

/// Error of a software machine.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "each message describes its variant")]
pub enum SoftwareMachineError {
    #[error("unknown --policy {0}")]
    UnknownPolicy(String, #[source] UnknownPolicy),
    #[error(
        "--engine software does not support {0}: stage 2 with 4K pages maps 4K, 2M or 1G; use \
         anonymous, anonymous_thp, anonymous_hugetlb_2mb or anonymous_hugetlb_1gb"
    )]
    UnsupportedBacking(Backing),
    #[error("-b {0} is too large; --engine software supports up to {MAX_MEMORY}")]
    MemoryTooLarge(Bytes),
    #[error("-v {0} is too large; --engine software supports up to {MAX_VCPUS} vCPUs")]
    TooManyVcpus(u32),
    #[error("cannot allocate {0} of memory; use a smaller -b")]
    Allocation(Bytes, #[source] io::Error),
    #[error("cannot read the properties of this host")]
    HostInfo(#[source] FactsError),
    #[error("the stage-2 engine refused the operation")]
    Engine(#[source] MapError),
}

fn backing_page_size(backing: Backing) -> Result<u64, SoftwareMachineError> {
    match backing {
        Backing::Anonymous | Backing::Shmem => Ok(PAGE_SIZE),
        Backing::AnonymousThp | Backing::AnonymousHugetlb(None) | Backing::SharedHugetlb => {
            Ok(2 << 20)
        }
        Backing::AnonymousHugetlb(Some(size)) if size == Bytes::mib(2) || size == Bytes::gib(1) => {
            Ok(size.0)
        }
        Backing::AnonymousHugetlb(_) | Backing::AnonymousMthp(_) => {
            Err(SoftwareMachineError::UnsupportedBacking(backing))
        }
    }
}

fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
