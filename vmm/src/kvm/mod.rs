// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! KVM objects that do not depend on the architecture: memslots and their dirty logs, pages that a
//! guest can only read, statistics and tracepoint counters, the population of stage 2, the ioctls that
//! `kvm-ioctls` lacks, and kicks that force a vCPU out of the guest.

pub mod dirty_ring;
pub mod ioctls;
pub mod kick;
pub mod memslot;
mod open;
pub mod pre_fault;
pub mod read_only_page;
pub mod stage2_tables;
pub mod stats;
pub mod tracepoints;

pub use open::open;

use std::io;

use kvm_ioctls::{Cap, Kvm, VmFd};
use thiserror::Error;
use vmm_sys_util::errno;

/// Error returned when KVM or one of its counters cannot be used.
#[derive(Debug, Error)]
pub enum KvmError {
    /// Error returned when `/dev/kvm` cannot be used.
    #[error(
        "{0}. Without KVM: `granule bench --engine software` runs the fault path in software; \
         `granule lab` emulates a host that has KVM"
    )]
    Open(String),
    /// Error of an ioctl or a system call.
    #[error("{call} failed")]
    Call {
        /// The ioctl or system call.
        call: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// Error returned when a register of a vCPU or of the interrupt controller cannot be accessed.
    #[error("{register} cannot be {access}")]
    Register {
        /// The register, and the value that it was set to.
        register: String,
        /// `read` or `set`.
        access: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// Error returned when this host's KVM does not support the request.
    #[error("{0}")]
    Unsupported(String),
    /// Error returned when the kernel overwrote entries of a dirty ring before they were harvested.
    #[error(
        "a dirty ring of {entries} entries has no free entry: KVM did not exit to user space in \
         time, and the log misses pages; use plain or manual dirty logging"
    )]
    DirtyRingOverrun {
        /// Number of entries of the ring.
        entries: usize,
    },
    /// Error returned when the counter of a kernel event cannot be read.
    #[error("the perf event kvm:{name} cannot be read; run without events")]
    ReadEvent {
        /// The tracepoint or the event filter.
        name: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// Error returned when a statistics file cannot be read.
    #[error("KVM statistics cannot be read; run without events")]
    ReadStatistics(#[source] io::Error),
    /// Error returned when the dirty log is read while dirty logging is off.
    #[error("the dirty log cannot be read while dirty logging is off")]
    NotLogging,
}

impl KvmError {
    /// Returns the error of a kernel without dirty rings.
    fn no_dirty_rings() -> Self {
        Self::Unsupported(
            "this host's KVM has no dirty rings (KVM_CAP_DIRTY_LOG_RING_ACQ_REL; Linux 6.2 on \
             arm64, 6.1 on x86_64): use plain or manual dirty logging"
                .to_owned(),
        )
    }

    /// Returns the error of a failed `call`.
    pub fn call(call: &'static str, error: errno::Error) -> Self {
        Self::Call { call, source: error.into() }
    }
}

/// Enables capabilities of a VM by their numbers: those of kernels with patches have no name here.
pub fn enable_vm_capabilities(vm: &VmFd, numbers: &[u32]) -> Result<(), KvmError> {
    for &number in numbers {
        if vm.check_extension_raw(number.into()) <= 0 {
            return Err(KvmError::Unsupported(format!(
                "--vm-capability {number}: this host's KVM does not have it: remove the option, or \
                 boot a kernel that defines this capability"
            )));
        }
        ioctls::enable_capability(vm, number, 0)
            .map_err(|error| KvmError::call("KVM_ENABLE_CAP (--vm-capability)", error))?;
    }
    Ok(())
}

/// Checks the requested number of vCPUs against `KVM_CAP_MAX_VCPUS`.
pub fn check_vcpu_count(kvm: &Kvm, requested: u32) -> Result<(), KvmError> {
    let limit = u32::try_from(kvm.check_extension_int(Cap::MaxVcpus)).unwrap_or(0);
    if requested == 0 || requested > limit {
        return Err(KvmError::Unsupported(format!(
            "{requested} vCPUs requested; this host's KVM supports 1 to {limit} (KVM_CAP_MAX_VCPUS)"
        )));
    }
    Ok(())
}
