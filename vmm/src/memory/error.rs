// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Errors of guest memory, with their remedies.

use std::{io, path::PathBuf};

use granule_types::{
    backing::Backing,
    units::{Bytes, GuestAddress, HostVirtAddr},
};
use thiserror::Error;

/// Error returned when guest memory is not available as requested.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// A file of the host cannot be read.
    #[error("cannot read {path}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A file of the host has unexpected contents.
    #[error("{path} holds '{found}' where {expected} was expected", path = path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Contents of the file.
        found: String,
        /// Expected contents.
        expected: &'static str,
    },
    /// Transparent huge pages are disabled or not built into the kernel.
    #[error(
        "{Backing} needs transparent huge pages, which are disabled on this host: \
         write 'madvise' to /sys/kernel/mm/transparent_hugepage/enabled",
        Backing = Backing::AnonymousThp
    )]
    ThpOff,
    /// The host has no hugetlb pages of this size.
    #[error(
        "{backing} needs hugetlb pages that this host does not offer; it offers {offered}",
        offered = list(offered)
    )]
    NoHugetlb {
        /// Requested backing.
        backing: Backing,
        /// Sizes that the host offers.
        offered: Vec<Bytes>,
    },
    /// The pool has too few free hugetlb pages.
    #[error(
        "the memory needs {needed} hugetlb pages of {page} and the host has {available} available: \
         {missing} are missing; add them with: \
         echo {total} > /sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages \
         (or boot the host with hugepagesz={page} hugepages={total})",
        missing = needed.saturating_sub(*available),
        kib = page.0 >> 10
    )]
    PoolShort {
        /// The page size.
        page: Bytes,
        /// Number of pages that the memory needs.
        needed: u64,
        /// Number of pages that are neither used nor reserved.
        available: u64,
        /// Sufficient size of the pool.
        total: u64,
    },
    /// The pool of a NUMA node is too small.
    #[error(
        "NUMA node {node} has {free} free pages of {page}, {needed} are needed, {missing} are missing; \
         as root: echo {total} > \
         /sys/devices/system/node/node{node}/hugepages/hugepages-{kib}kB/nr_hugepages",
        missing = needed - free,
        kib = page.0 >> 10
    )]
    NodeShort {
        /// Requested node.
        node: u32,
        /// The page size.
        page: Bytes,
        /// Number of pages that the memory needs.
        needed: u64,
        /// Number of free pages.
        free: u64,
        /// Sufficient size of the pool.
        total: u64,
    },
    /// The size is not a multiple of the page of the backing.
    #[error("{size} is not a multiple of {page}, the page of the backing")]
    Size {
        /// Requested size.
        size: Bytes,
        /// Page of the backing.
        page: Bytes,
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
    /// The kernel has mapped other pages than requested.
    #[error("{wrong} of {resident} resident memory of {backing} are in {what}: {advice}")]
    WrongPages {
        /// Requested backing.
        backing: Backing,
        /// Size of the wrong pages.
        wrong: Bytes,
        /// Size of all resident pages.
        resident: Bytes,
        /// Type of the wrong pages.
        what: &'static str,
        /// Remedy.
        advice: &'static str,
    },
    /// Blocks are not contiguous in physical memory.
    #[error(
        "{broken} of {present} blocks of {page} of {backing} are not one huge page \
         (/proc/kpageflags): the kernel has mapped other pages in their place"
    )]
    NotContiguous {
        /// Requested backing.
        backing: Backing,
        /// Number of blocks that are not one huge page.
        broken: u64,
        /// Number of present blocks.
        present: u64,
        /// Size of a block.
        page: Bytes,
    },
    /// The NUMA node does not exist.
    #[error("this host has no NUMA node {node}: /sys/devices/system/node lists those it has")]
    NoNode {
        /// Requested node.
        node: u32,
    },
    /// The backing has no transparent huge pages.
    #[error("{0} has no transparent huge pages: only anonymous_thp can be collapsed")]
    NotThp(Backing),
    /// The kernel cannot collapse pages.
    #[error("this host's kernel cannot collapse pages on request (MADV_COLLAPSE, Linux 6.1)")]
    NoCollapse,
    /// The kernel has populated less than requested.
    #[error("{resident} of {size} are resident after populating: is the host short of memory?")]
    NotPopulated {
        /// Size of the memory.
        size: Bytes,
        /// Size of the resident pages.
        resident: Bytes,
    },
    /// The guest addresses are invalid or overlap.
    #[error("{size} of guest memory at {start:#x} is invalid: {why}", start = start.0)]
    Range {
        /// First guest address.
        start: GuestAddress,
        /// Size of the memory.
        size: Bytes,
        /// Problem.
        why: String,
    },
    /// The kernel does not list the whole mapping.
    #[error("/proc/self/smaps lists {listed} of {size} at {address:#x}", address = address.0)]
    NotListed {
        /// Address in this process.
        address: HostVirtAddr,
        /// Size of the memory.
        size: Bytes,
        /// Size of the listed part.
        listed: Bytes,
    },
}

fn list(sizes: &[Bytes]) -> String {
    if sizes.is_empty() {
        return "none (CONFIG_HUGETLBFS)".to_owned();
    }
    let all: Vec<String> = sizes.iter().map(Bytes::to_string).collect();
    all.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_pool_names_the_missing_pages_and_the_remedy() {
        let error =
            MemoryError::PoolShort { page: Bytes::mib(2), needed: 32, available: 5, total: 37 };

        let text = error.to_string();

        assert!(text.contains("27 are missing"), "{text}");
        assert!(
            text.contains("echo 37 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"),
            "{text}"
        );
    }

    #[test]
    fn available_sizes_are_listed() {
        let error = MemoryError::NoHugetlb {
            backing: Backing::AnonymousHugetlb(Some(Bytes::kib(64))),
            offered: vec![Bytes::mib(2), Bytes::gib(1)],
        };

        assert!(error.to_string().ends_with("it offers 2M, 1G"), "{error}");
    }
}
