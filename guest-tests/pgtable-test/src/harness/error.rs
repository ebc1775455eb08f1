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
pub enum HarnessError {
    /// The vCPUs cannot be started; nothing was tested.
    #[error("cannot start the vCPUs")]
    Start(#[source] TaskThreadsError),
    /// The vCPUs failed in a phase, or while they did something outside the phases.
    #[error("the vCPUs failed {0}")]
    Vcpus(String, #[source] TaskThreadsError),
    /// The host failed in a phase, or while it did something outside the phases.
    #[error("the host failed {0}")]
    Host(String, #[source] MachineError),
    /// The host backs the region with other pages than configured.
    #[error(
        "{backing} needs {size} in pages of {page}, but the host provided {}; provide more such \
         pages, use --prefault (a first read of THP maps the zero page, which the first write then \
         splits), or continue with --accept-fallback",
        PageList(obtained)
    )]
    Backing {
        /// The configured backing.
        backing: Backing,
        /// Size of the region.
        size: Bytes,
        /// Page size of the backing.
        page: Bytes,
        /// The page sizes that back the region.
        obtained: ResidentPages,
    },
    /// The dirty bitmap misses written pages.
    #[error(
        "the dirty bitmap misses {missing} of {written} pages that vCPUs wrote, the first at guest \
         address {:#x}: a defect of the host kernel",
        first.0
    )]
    DirtyLog {
        /// Number of missing pages.
        missing: u64,
        /// Number of written pages.
        written: u64,
        /// The first missing page.
        first: GuestAddress,
    },
    /// A value in memory differs from the value that the guest wrote.
    #[error(
        "guest address {:#x} holds {found:#x}, but the guest wrote {expected:#x}: a defect of the \
         host kernel or of the machine",
        address.0
    )]
    Contents {
        /// The guest address.
        address: GuestAddress,
        /// The written value.
        expected: u64,
        /// The value read by the host.
        found: u64,
    },
    /// Source and destination of a migration differ.
    #[error(
        "{pages} pages differ after the migration, the first at guest address {:#x}: the source \
         holds {source_holds:#x}, written in round {round}, the destination {copied:#x}; the dirty \
         bitmap contained the page {}: a defect of the host kernel or of the machine",
        address.0,
        match logged_in { 0 => "in no round".to_owned(), last => format!("last in round {last}") }
    )]
    LostWrite {
        /// Number of pages that differ.
        pages: u64,
        /// The first word that differs.
        address: GuestAddress,
        /// The word at the source.
        source_holds: u64,
        /// The word at the destination.
        copied: u64,
        /// The round of the write; the stop counts as one more than the last round.
        round: u32,
        /// The last round whose dirty bitmap contained the page; 0 is none.
        logged_in: u32,
    },
    /// The machine does not support a migration workload.
    #[error("this machine does not support --migrate; use --engine kvm")]
    NoMigration,
    /// A page has too few words for the vCPUs: the numbers of vCPUs and of words.
    #[error(
        "--migrate with {0} vCPUs needs one word for each in a page, which has {1}; use fewer vCPUs"
    )]
    TooManyVcpus(usize, u64),
    /// The observer of the run failed.
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
