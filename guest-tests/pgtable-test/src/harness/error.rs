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
    /// Failure before the first phase.
    #[error("cannot start the vCPUs")]
    Start(#[source] TaskThreadsError),
    #[error("the vCPUs failed {0}")]
    Vcpus(String, #[source] TaskThreadsError),
    #[error("the host failed {0}")]
    Host(String, #[source] MachineError),
    #[error(
        "{backing} needs {size} in pages of {page}, but the host provided {}; provide more such \
         pages, use --prefault (a first read of THP maps the zero page, which the first write then \
         splits), or continue with --accept-fallback",
        PageList(obtained)
    )]
    Backing { backing: Backing, size: Bytes, page: Bytes, obtained: ResidentPages },
    #[error(
        "the dirty bitmap misses {missing} of {written} pages that vCPUs wrote, the first at guest \
         address {:#x}: a defect of the host kernel",
        first.0
    )]
    DirtyLog { missing: u64, written: u64, first: GuestAddress },
    #[error(
        "guest address {:#x} holds {found:#x}, but the guest wrote {expected:#x}: a defect of the \
         host kernel or of the machine",
        address.0
    )]
    Contents { address: GuestAddress, expected: u64, found: u64 },
    #[error(
        "{pages} pages differ after the migration, the first at guest address {:#x}: the source \
         holds {source_holds:#x}, written in round {round}, the destination {copied:#x}; the dirty \
         bitmap contained the page {}: a defect of the host kernel or of the machine",
        address.0,
        match logged_in { 0 => "in no round".to_owned(), last => format!("last in round {last}") }
    )]
    LostWrite {
        pages: u64,
        address: GuestAddress,
        source_holds: u64,
        copied: u64,
        /// The round of the write; the stop counts as one more than the last round.
        round: u32,
        /// Last round whose dirty bitmap contained the page; 0 if none did.
        logged_in: u32,
    },
    #[error("this machine does not support --migrate; use --engine kvm")]
    NoMigration,
    #[error(
        "--migrate with {0} vCPUs needs one word for each in a page, which has {1}; use fewer vCPUs"
    )]
    TooManyVcpus(usize, u64),
    #[error("cannot write the results")]
    Observer(#[source] Box<dyn Error + Send + Sync>),
}

/// The description of reading event counters and gauges.
pub(super) const COUNTERS: &str = "reading counters";

/// Returns the description of a phase in errors.
pub(super) fn phase(phase: Phase) -> String {
    format!("in {phase}")
}

/// Returns a function that adds the failed `operation` to an error of the vCPU threads.
pub(super) fn threads_error(operation: &str) -> impl FnOnce(TaskThreadsError) -> HarnessError {
    |source| HarnessError::Vcpus(operation.to_owned(), source)
}

/// Returns a function that adds the failed `operation` to an error of the machine.
pub(super) fn host_error(operation: &str) -> impl FnOnce(MachineError) -> HarnessError {
    |source| HarnessError::Host(operation.to_owned(), source)
}

/// Prints the page sizes that back a region.
pub(super) struct PageList<'a>(pub(super) &'a ResidentPages);

impl fmt::Display for PageList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.resident.is_empty() {
            return f.write_str("nothing");
        }
        for (index, (page, bytes)) in self.0.resident.iter().enumerate() {
            let between = if index == 0 { "" } else { " and " };
            write!(f, "{between}{} in pages of {}", Bytes(*bytes), Bytes(*page))?;
        }
        Ok(())
    }
}
