// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What every machine under KVM needs, whatever its architecture: memory slots and their dirty
//! log, KVM's statistics, the calls that `kvm-ioctls` lacks, and getting a vCPU out of the guest.

pub mod access;
pub mod dirty;
pub mod dirty_ring;
pub mod exit;
pub mod ioctls;
pub mod kick;
pub mod memslot;
pub mod stage2_tables;
pub mod stats;
pub mod tracepoints;

use std::io;

use kvm_ioctls::{Cap, Kvm};
use thiserror::Error;
use vmm_sys_util::errno;

/// Why KVM does not do as asked.
#[derive(Debug, Error)]
pub enum KvmError {
    /// There is no KVM to be used.
    #[error(
        "{0}. Without KVM: `granule bench --engine model` shows the fault path in software; \
         `granule lab` emulates a host that has KVM"
    )]
    Open(access::AccessError),
    /// A call failed.
    #[error("{doing} failed")]
    Call {
        /// The call and its purpose.
        doing: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// More vCPUs than the host's KVM gives.
    #[error("{asked} vCPUs were asked for; this host's KVM gives 1 to {most} (KVM_CAP_MAX_VCPUS)")]
    Vcpus {
        /// How many were asked for.
        asked: u32,
        /// How many there can be.
        most: u32,
    },
    /// The kernel cannot log dirty pages in the way asked for.
    #[error(
        "this kernel's KVM cannot log dirty pages with manual clearing{initially} \
         (KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 offers {offered:#x}): use plain logging",
        initially = if *initially_set { " and all pages set initially" } else { "" }
    )]
    DirtyMode {
        /// Whether all pages were to be set initially.
        initially_set: bool,
        /// The flags that the kernel offers.
        offered: u32,
    },
    /// The kernel has no dirty rings.
    #[error(
        "this host's KVM has no dirty rings (KVM_CAP_DIRTY_LOG_RING_ACQ_REL; Linux 6.2 on arm64, 6.1 \
         on x86_64): use plain or manual logging"
    )]
    NoRing,
    /// A vCPU left the guest too late, and its ring was written over.
    #[error(
        "a dirty ring of {entries} entries was found without a free one: this host's KVM lets vCPUs \
         leave the guest too late, and pages are missing from the log; use plain or manual logging"
    )]
    RingOverrun {
        /// Entries of the ring.
        entries: usize,
    },
    /// The dirty log was to be read while logging is off.
    #[error("the dirty log cannot be read while logging is off")]
    NotLogging,
}

impl KvmError {
    /// `error` came from `doing`.
    pub fn call(doing: &'static str, error: errno::Error) -> Self {
        Self::Call {
            doing,
            source: error.into(),
        }
    }
}

/// Opens KVM.
///
/// # Errors
/// [`KvmError::Open`].
pub fn open() -> Result<Kvm, KvmError> {
    access::open().map_err(KvmError::Open)
}

/// Checks a number of vCPUs against what KVM gives.
///
/// # Errors
/// [`KvmError::Vcpus`].
pub fn check_vcpus(kvm: &Kvm, asked: u32) -> Result<(), KvmError> {
    let most = u32::try_from(kvm.check_extension_int(Cap::MaxVcpus)).unwrap_or(0);
    if asked == 0 || asked > most {
        return Err(KvmError::Vcpus { asked, most });
    }
    Ok(())
}
