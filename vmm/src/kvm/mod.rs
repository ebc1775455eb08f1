// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! KVM objects that do not depend on the architecture: memslots and their dirty logs, statistics and
//! tracepoint counters, the ioctls that `kvm-ioctls` lacks, and kicks that force a vCPU out of the
//! guest.

pub mod access;
pub mod dirty;
pub mod dirty_ring;
pub mod error;
pub mod exit;
pub mod ioctls;
pub mod kick;
pub mod memslot;
pub mod stage2_tables;
pub mod stats;
pub mod tracepoints;

use kvm_ioctls::{Cap, Kvm};

pub use error::KvmError;

/// Opens `/dev/kvm`. `explain_missing_driver` is called when no driver is loaded, to say why on this
/// architecture.
///
/// # Errors
/// [`KvmError::Open`].
pub fn open(explain_missing_driver: fn() -> String) -> Result<Kvm, KvmError> {
    access::open(explain_missing_driver).map_err(KvmError::Open)
}

/// Checks a number of vCPUs against `KVM_CAP_MAX_VCPUS`.
///
/// # Errors
/// [`KvmError::VcpuCount`].
pub fn check_vcpus(kvm: &Kvm, requested: u32) -> Result<(), KvmError> {
    let limit = u32::try_from(kvm.check_extension_int(Cap::MaxVcpus)).unwrap_or(0);
    if requested == 0 || requested > limit {
        return Err(KvmError::VcpuCount { requested, limit });
    }
    Ok(())
}
