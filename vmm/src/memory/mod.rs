// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest memory on any backing of the host.
//!
//! A [`Backing`] and the page sizes of the host ([`HostPages`])
//! make a [`Plan`]: flags, advice, alignment, and the check of the result. [`GuestRam`] carries it
//! out in four steps, in this order because no later step can repair an earlier one:
//!
//! 1. **map**: reserves address space and maps the memory at an address congruent to the guest
//!    address, so that KVM can map blocks; checks the hugetlb pool before and reserves its pages;
//! 2. **advise** about transparent huge pages before the first touch, because small pages stay once
//!    they are populated;
//! 3. **populate**, where requested;
//! 4. **verify**: reads back the pages that the kernel has mapped. Small pages in place of huge
//!    ones are an error.
//!
//! To add a backing, add a variant to `Backing` and follow the compiler: names in
//! `granule_types::backing`, the kind of pages in [`Plan::new`].

mod guest_ram;
mod host_pages;
mod mapping;
mod plan;
mod residency;

#[cfg(test)]
mod tests;

pub use guest_ram::{GuestMemory, GuestRam, RamOptions};
pub use host_pages::HostPages;
pub use plan::Plan;
pub use residency::Residency;

use host_pages::block_above;
use std::{io, path::PathBuf};

use granule_types::{backing::Backing, units::Bytes};
use thiserror::Error;

use plan::PageType;
use residency::BlockBacking;

/// Error returned when guest memory is not available as requested.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The host does not offer the pages of the backing, or has too few of them.
    #[error("{0}")]
    Unavailable(String),
    /// The size, the addresses or the backing are not valid for the request.
    #[error("{0}")]
    Invalid(String),
    /// The kernel reports or has mapped other pages than requested.
    #[error("{0}")]
    Unexpected(String),
    /// The kernel cannot collapse pages.
    #[error("this host's kernel cannot collapse pages on request (MADV_COLLAPSE, Linux 6.1)")]
    NoCollapse,
    /// A file of the host cannot be read.
    #[error("cannot read {path}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// A system call failed.
    #[error("{doing} failed for {size} of {backing}")]
    Call {
        /// Purpose of the call.
        doing: &'static str,
        /// Size of the memory.
        size: Bytes,
        /// Backing of the memory.
        backing: Backing,
        /// Error of the kernel.
        source: io::Error,
    },
}
