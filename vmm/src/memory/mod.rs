// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest memory on any backing of the host.
//!
//! A [`Backing`](granule_types::backing::Backing) and the page sizes of the host ([`HostPages`])
//! make a [`Plan`]: flags, advice, alignment, and the check of the result. [`GuestRam`] carries it
//! out in four steps, in this order because no later step can repair an earlier one:
//!
//! 1. **map**: reserves address space and maps the memory at an address congruent to the guest
//!    address, so that KVM can map blocks; checks the hugetlb pool before and reserves its pages;
//! 2. **advise** about transparent huge pages before the first touch, because small pages stay once
//!    they are populated;
//! 3. **populate**, where requested;
//! 4. **verify**: reads back the pages that the kernel has mapped. Small pages in place of huge ones
//!    are an error.
//!
//! To add a backing, add a variant to `Backing` and follow the compiler: names in
//! `granule_types::backing`, the kind of pages in [`Plan::new`].

mod error;
mod guest_ram;
mod host_pages;
mod mapping;
mod plan;
mod residency;

#[cfg(test)]
mod tests;

pub use error::MemoryError;
pub use guest_ram::{GuestMemory, GuestRam, RamOptions};
pub use host_pages::HostPages;
pub use plan::Plan;
pub use residency::Residency;

use host_pages::block_above;
use plan::{DropMethod, PageType};
use residency::BlockBacking;
