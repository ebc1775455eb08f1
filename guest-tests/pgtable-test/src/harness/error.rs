// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Errors of a run.

use std::{error::Error, fmt};

use thiserror::Error;

use crate::{machine::MachineError, vcpu_threads::TaskThreadsError};
use granule_types::{
    backing::Backing,
    phase::Phase,
    record::ResidentPages,
    units::{Bytes, GuestAddress},
};

/// Error that ends a run.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "each message describes its variant")]
pub enum HarnessError {
    #[error("cannot start the vCPUs")]
    StartVcpus(#[source] TaskThreadsError),
    #[error("the vCPUs failed {0}")]
    VcpusFailed(String, #[source] TaskThreadsError),
    #[error("the host failed {0}")]
    HostFailed(String, #[source] MachineError),
    #[error(
        "{backing} needs {size} in pages of {page_size}, but the host provided {}; provide more \
         such pages, use --prefault (a first read of THP maps the zero page, which the first write \
         then splits), or continue with --accept-fallback",
        ResidentPageList(resident_pages)
    )]
    Fallback { backing: Backing, size: Bytes, page_size: Bytes, resident_pages: ResidentPages },
    #[error(
        "the dirty bitmap misses {missing_pages} of {written_pages} pages that vCPUs wrote, the \
         first at guest address {:#x}: a defect of the host kernel",
        first_page.0
    )]
    IncompleteDirtyLog { missing_pages: u64, written_pages: u64, first_page: GuestAddress },
    #[error(
        "guest address {:#x} holds {found:#x}, but the guest wrote {expected:#x}: a defect of the \
         host kernel or of the machine",
        address.0
    )]
    WrongContents { address: GuestAddress, expected: u64, found: u64 },
    #[error(
        "{pages} pages differ after the migration, the first at guest address {:#x}: the source \
         holds {source_value:#x}, written in round {round}, the destination {copied_value:#x}; the \
         dirty bitmap contained the page {}: a defect of the host kernel or of the machine",
        address.0,
        match last_logged_round { 0 => "in no round".to_owned(), n => format!("last in round {n}") }
    )]
    LostWrite {
        pages: u64,
        address: GuestAddress,
        source_value: u64,
        copied_value: u64,
        /// The round of the write; the stop counts as an additional round.
        round: u32,
        /// The last round whose dirty bitmap contained the page; 0 if no bitmap did.
        last_logged_round: u32,
    },
    #[error("this machine does not support --migrate; use --engine kvm")]
    MigrationUnsupported,
    #[error(
        "--migrate supports one vCPU for each word of a page: {0} vCPUs, {1} words; use fewer vCPUs"
    )]
    TooManyVcpus(usize, u64),
    #[error("cannot write the results")]
    Observer(#[source] Box<dyn Error + Send + Sync>),
}

/// Operation in errors of reading event counters and gauges.
pub(super) const READING_COUNTERS: &str = "reading counters";

/// Returns the operation in errors of a phase.
pub(super) fn in_phase(phase: Phase) -> String {
    format!("in {phase}")
}

/// Returns a function that adds the failed `operation` to an error of the vCPU threads.
pub(super) fn threads_error(operation: &str) -> impl FnOnce(TaskThreadsError) -> HarnessError {
    |source| HarnessError::VcpusFailed(operation.to_owned(), source)
}

/// Returns a function that adds the failed `operation` to an error of the machine.
pub(super) fn host_error(operation: &str) -> impl FnOnce(MachineError) -> HarnessError {
    |source| HarnessError::HostFailed(operation.to_owned(), source)
}

/// Prints the sizes of the pages that back a region.
pub(super) struct ResidentPageList<'a>(pub(super) &'a ResidentPages);

impl fmt::Display for ResidentPageList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.resident_bytes.is_empty() {
            return f.write_str("nothing");
        }
        for (index, (page, bytes)) in self.0.resident_bytes.iter().enumerate() {
            let between = if index == 0 { "" } else { " and " };
            write!(f, "{between}{} in pages of {}", Bytes(*bytes), Bytes(*page))?;
        }
        Ok(())
    }
}
