// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a run of the test fails.

use std::{error::Error, fmt};

use thiserror::Error;

use crate::{machine::MachineError, vcpu_threads::CrewError};
use granule_types::{
    backing::Backing,
    record::Obtained,
    units::{Bytes, GuestAddress},
};

/// Why a run ended before its end.
#[derive(Debug, Error)]
pub enum HarnessError {
    /// The vCPUs could not be started: nothing was tested.
    #[error("the vCPUs cannot be started")]
    Start(#[source] CrewError),
    /// The vCPUs did not do their work.
    #[error("the vCPUs failed {doing}")]
    Crew {
        /// In which phase or step.
        doing: String,
        /// How.
        #[source]
        source: CrewError,
    },
    /// The host did not do its work.
    #[error("the host failed {doing}")]
    Host {
        /// In which phase or step.
        doing: String,
        /// How.
        #[source]
        source: MachineError,
    },
    /// The region is not backed as asked.
    #[error(
        "{backing} was asked for, {size} of it in pages of {page}, but the host gave {}: give it \
         more such pages, use --prefault (a first read of THP maps the zero page, which the first \
         write then splits), or take what comes with --accept-fallback",
        Listed(obtained)
    )]
    Backing {
        /// What was asked for.
        backing: Backing,
        /// How much.
        size: Bytes,
        /// In pages of this size.
        page: Bytes,
        /// What there is.
        obtained: Obtained,
    },
    /// The dirty log misses pages.
    #[error(
        "the dirty log misses {missing} of {written} pages that vCPUs wrote, the first at guest \
         address {:#x}: a defect of the host kernel",
        first.0
    )]
    DirtyLog {
        /// How many.
        missing: u64,
        /// Of how many.
        written: u64,
        /// The first.
        first: GuestAddress,
    },
    /// The host reads something else than the guest wrote.
    #[error(
        "at guest address {:#x} the host reads {found:#x} where the guest wrote {expected:#x}: a \
         defect of the host kernel or of the machine",
        address.0
    )]
    Contents {
        /// Where.
        address: GuestAddress,
        /// What it should be.
        expected: u64,
        /// What it is.
        found: u64,
    },
    /// Source and destination of a migration differ.
    #[error(
        "{pages} pages differ after the migration, the first at guest address {:#x}: the source \
         holds {source_holds:#x}, written in round {round}, the destination {copied:#x}; the dirty log \
         named the page {}: a defect of the host kernel or of the machine",
        address.0,
        match logged_in { 0 => "in no round".to_owned(), last => format!("last in round {last}") }
    )]
    LostWrite {
        /// How many pages.
        pages: u64,
        /// The first word that differs.
        address: GuestAddress,
        /// What the source holds there.
        source_holds: u64,
        /// What the destination holds.
        copied: u64,
        /// In which round it was written, the stop being one more than the last.
        round: u32,
        /// Which round's log named the page last; 0 is none.
        logged_in: u32,
    },
    /// A load that only some machines bear.
    #[error("this machine cannot be migrated under load: use --engine kvm")]
    NotLive,
    /// More vCPUs than words in a page.
    #[error("{vcpus} vCPUs have no room for a word each in a page, which has {most}: use fewer")]
    Crowded {
        /// How many there are.
        vcpus: usize,
        /// How many words there are.
        most: u64,
    },
    /// Results could not be handed on.
    #[error("results could not be handed on")]
    Observer(#[source] Box<dyn Error + Send + Sync>),
}

/// Lists what there is.
pub(super) struct Listed<'a>(pub(super) &'a Obtained);

impl fmt::Display for Listed<'_> {
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
