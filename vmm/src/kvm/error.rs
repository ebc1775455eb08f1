// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The error of KVM calls.

use std::io;

use thiserror::Error;
use vmm_sys_util::errno;

use super::access::AccessError;

/// Error returned when KVM refuses a request.
#[derive(Debug, Error)]
pub enum KvmError {
    /// `/dev/kvm` cannot be used.
    #[error(
        "{0}. Without KVM: `granule bench --engine model` runs the fault path in software; \
         `granule lab` emulates a host that has KVM"
    )]
    Open(AccessError),
    /// A call failed.
    #[error("{call} failed")]
    Call {
        /// The ioctl or system call.
        call: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The host's KVM does not support the number of vCPUs.
    #[error(
        "{requested} vCPUs requested; this host's KVM supports 1 to {limit} (KVM_CAP_MAX_VCPUS)"
    )]
    VcpuCount {
        /// The requested number.
        requested: u32,
        /// The largest supported number.
        limit: u32,
    },
    /// The kernel lacks the dirty logging mode.
    #[error(
        "this host's KVM does not support dirty logging with manual clearing{initially} \
         (KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 returns {supported:#x}): use plain dirty logging",
        initially = if *initially_set { " and all pages set initially" } else { "" }
    )]
    DirtyMode {
        /// Set if `KVM_DIRTY_LOG_INITIALLY_SET` was requested.
        initially_set: bool,
        /// The flags that the kernel supports.
        supported: u32,
    },
    /// The kernel has no dirty rings.
    #[error(
        "this host's KVM has no dirty rings (KVM_CAP_DIRTY_LOG_RING_ACQ_REL; Linux 6.2 on arm64, 6.1 \
         on x86_64): use plain or manual dirty logging"
    )]
    NoDirtyRing,
    /// The kernel overwrote entries of a dirty ring that had not been harvested.
    #[error(
        "a dirty ring of {entries} entries has no free entry: KVM did not exit to user space in \
         time, and the log misses pages; use plain or manual dirty logging"
    )]
    DirtyRingOverrun {
        /// Number of entries of the ring.
        entries: usize,
    },
    /// The dirty log was read while dirty logging is off.
    #[error("the dirty log cannot be read while dirty logging is off")]
    NotLogging,
}

impl KvmError {
    /// Returns the error of a failed `call`.
    pub fn call(call: &'static str, error: errno::Error) -> Self {
        Self::Call { call, source: error.into() }
    }
}
