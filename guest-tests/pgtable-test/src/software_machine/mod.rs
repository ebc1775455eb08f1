// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The software machine: threads as vCPUs, and the [`granule_stage2`] engine as the hypervisor.
//!
//! It shows the effect of a fault path's policy on the phases of the test, on any computer.
//!
//! *Real*: the engine's work on the tables, its locks and the waiting for them; the memory; cache
//! maintenance by the CPU's own instructions, which is most of the difference between policies; the
//! elapsed time.
//!
//! *Not real*: no guest runs. Each access walks the stage-2 tables in software. No TLB exists, so
//! TLB invalidations and their barriers are counted and cost nothing, and a fault costs a function
//! call instead of an exception. The host populates the memory in advance, in pages of its choice;
//! the backing only determines the page size that the fault path sees. Instructions are compared,
//! not executed. So the machine compares policies, not hosts, and its times are not those of an
//! arm64 CPU.

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
const START: u64 = 1 << 32;

/// Base page size.
const PAGE: u64 = 4096;

/// Maximum number of vCPUs, above that of any KVM host; each has a thread.
const MAX_VCPUS: u32 = 4096;

/// Maximum size of the region under test.
const MAX_MEMORY: Bytes = Bytes::gib(200);

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
        if self.vcpus > MAX_VCPUS {
            return Err(SoftwareMachineError::Vcpus(self.vcpus));
        }
        Ok(())
    }

    /// Returns the error of memory that is too large.
    const fn too_large(&self) -> SoftwareMachineError {
        SoftwareMachineError::Size(self.memory)
    }

    /// Returns the region's size: whole pages of the backing.
    fn size(&self) -> Result<u64, SoftwareMachineError> {
        let page = page_size(self.backing)?;
        match self.memory.checked_align_up(Bytes(page)) {
            Some(size) if size <= MAX_MEMORY => Ok(size.0),
            _ => Err(self.too_large()),
        }
    }

    fn parse_policy(&self) -> Result<Policy, SoftwareMachineError> {
        let unknown = |source| SoftwareMachineError::Policy(self.policy.clone(), source);
        self.policy.parse().map_err(unknown)
    }

    /// Returns the policy as a series in the provenance of results: like a series, it is the change
    /// between two runs.
    fn series(&self) -> Vec<Series> {
        vec![Series { name: format!("model:{}", self.policy), patches: 0 }]
    }
}

/// Error of a software machine.
#[derive(Debug, Error)]
pub enum SoftwareMachineError {
    /// The policy is unknown.
    #[error("unknown --policy {0}")]
    Policy(String, #[source] UnknownPolicy),
    /// The backing's page is not a block size of stage 2 with 4K pages.
    #[error(
        "--engine model does not support {0}: stage 2 with 4K pages maps 4K, 2M or 1G; use \
         anonymous, anonymous_thp, anonymous_hugetlb_2mb or anonymous_hugetlb_1gb"
    )]
    Backing(Backing),
    /// The region is too large.
    #[error("-b {0} is too large; --engine model supports up to {MAX_MEMORY}")]
    Size(Bytes),
    /// The machine has too many vCPUs.
    #[error("-v {0} is too large; --engine model supports up to {MAX_VCPUS} vCPUs")]
    Vcpus(u32),
    /// The host provides no memory.
    #[error("cannot allocate {0} of memory; use a smaller -b")]
    Memory(Bytes, #[source] io::Error),
    /// The properties of the host cannot be read.
    #[error("cannot read the properties of this host")]
    Host(#[source] FactsError),
    /// The engine refused an operation, which is a defect.
    #[error("the stage-2 engine refused the operation")]
    Engine(#[source] MapError),
}

/// Returns the page size of a backing.
fn page_size(backing: Backing) -> Result<u64, SoftwareMachineError> {
    match backing {
        Backing::Anonymous | Backing::Shmem => Ok(PAGE),
        Backing::AnonymousThp | Backing::AnonymousHugetlb(None) | Backing::SharedHugetlb => {
            Ok(2 << 20)
        }
        Backing::AnonymousHugetlb(Some(size)) if size == Bytes::mib(2) || size == Bytes::gib(1) => {
            Ok(size.0)
        }
        Backing::AnonymousHugetlb(_) => Err(SoftwareMachineError::Backing(backing)),
    }
}

fn index(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
