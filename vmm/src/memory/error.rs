// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What can go wrong with guest memory, and what to do about it.

use std::{io, path::PathBuf};

use granule_types::{backing::Backing, units::Bytes};
use thiserror::Error;

/// Why guest memory cannot be had as asked.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// A file of the host's could not be read.
    #[error("cannot read {path}", path = path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file of the host's holds something else than expected.
    #[error("{path} holds '{found}' where {expected} was expected", path = path.display())]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// What stood there.
        found: String,
        /// What should have.
        expected: &'static str,
    },
    /// The kernel was built without transparent huge pages, or they are off.
    #[error(
        "{Backing} needs transparent huge pages and they are off on this host: \
         write 'madvise' to /sys/kernel/mm/transparent_hugepage/enabled",
        Backing = Backing::AnonymousThp
    )]
    ThpOff,
    /// The host knows no hugetlb page of this size.
    #[error(
        "{backing} needs hugetlb pages that this host does not offer; it offers {offered}",
        offered = list(offered)
    )]
    NoHugetlb {
        /// What was asked for.
        backing: Backing,
        /// What the host offers.
        offered: Vec<Bytes>,
    },
    /// The pool holds too few free hugetlb pages.
    #[error(
        "the memory needs {needed} hugetlb pages of {page} and the host has {available} to give: \
         {missing} are missing; add them with: \
         echo {total} > /sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages \
         (or boot the host with hugepagesz={page} hugepages={total})",
        missing = needed.saturating_sub(*available),
        kib = page.0 >> 10
    )]
    PoolShort {
        /// The page size.
        page: Bytes,
        /// How many pages the memory takes.
        needed: u64,
        /// How many are neither used nor promised to someone else.
        available: u64,
        /// What the pool's size has to become.
        total: u64,
    },
    /// A node's part of the pool is too small.
    #[error(
        "NUMA node {node} has {free} free pages of {page}, {needed} are needed, {missing} are missing; \
         as root: echo {total} > \
         /sys/devices/system/node/node{node}/hugepages/hugepages-{kib}kB/nr_hugepages",
        missing = needed - free,
        kib = page.0 >> 10
    )]
    NodeShort {
        /// The node asked for.
        node: u32,
        /// The page size.
        page: Bytes,
        /// How many pages the memory takes.
        needed: u64,
        /// How many are free there.
        free: u64,
        /// What its part has to become.
        total: u64,
    },
    /// A size is no multiple of the backing's page.
    #[error("{size} is no multiple of the backing's page of {page}")]
    Size {
        /// The size asked for.
        size: Bytes,
        /// The backing's page.
        page: Bytes,
    },
    /// A system call failed.
    #[error("{doing} failed for {size} of {backing}")]
    Call {
        /// The call and its purpose.
        doing: &'static str,
        /// The memory's size.
        size: Bytes,
        /// Its backing.
        backing: Backing,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel backs the memory with other pages than asked for.
    #[error("{backing} was asked for, but {wrong} of {resident} resident are in {what}: {advice}")]
    WrongPages {
        /// What was asked for.
        backing: Backing,
        /// How much is in the wrong pages.
        wrong: Bytes,
        /// How much is resident in all.
        resident: Bytes,
        /// Which wrong pages.
        what: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// BlockBacking are mapped whole and yet are not one piece of physical memory.
    #[error(
        "{backing} was asked for, but {broken} of {present} blocks of {page} are not one huge page \
         (/proc/kpageflags): the kernel mapped something else in their place"
    )]
    NotOnePiece {
        /// What was asked for.
        backing: Backing,
        /// BlockBacking that are not one huge page.
        broken: u64,
        /// BlockBacking that are there.
        present: u64,
        /// The size of a block.
        page: Bytes,
    },
    /// There is no such NUMA node.
    #[error("this host has no NUMA node {node}: /sys/devices/system/node lists those it has")]
    NoNode {
        /// The node asked for.
        node: u32,
    },
    /// Its pages are not to be huge.
    #[error("{0} is not made of transparent huge pages: only anonymous_thp can be collapsed")]
    NotThp(Backing),
    /// The kernel cannot collapse.
    #[error("this host's kernel cannot collapse pages on request (MADV_COLLAPSE, Linux 6.1)")]
    NoCollapse,
    /// The kernel populated less than asked.
    #[error("{resident} of {size} are resident after populating: is the host short of memory?")]
    NotPopulated {
        /// The memory's size.
        size: Bytes,
        /// What is there.
        resident: Bytes,
    },
    /// The memory leaves the guest's addresses, or has no place in this process.
    #[error("{size} of guest memory at {start:#x} cannot be described: {why}")]
    Range {
        /// Where it should begin in the guest.
        start: u64,
        /// Its size.
        size: Bytes,
        /// What is wrong.
        why: String,
    },
    /// The kernel does not list the mapping.
    #[error("/proc/self/smaps lists {listed} of {size} at {address:#x}")]
    NotListed {
        /// Where the memory lies in this process.
        address: u64,
        /// Its size.
        size: Bytes,
        /// How much of it is listed.
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
    fn a_short_pool_names_the_missing_pages_and_the_command() {
        let error = MemoryError::PoolShort {
            page: Bytes::mib(2),
            needed: 32,
            available: 5,
            total: 37,
        };

        let text = error.to_string();

        assert!(text.contains("27 are missing"), "{text}");
        assert!(
            text.contains("echo 37 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"),
            "{text}"
        );
    }

    #[test]
    fn sizes_on_offer_are_listed() {
        let error = MemoryError::NoHugetlb {
            backing: Backing::AnonymousHugetlb(Some(Bytes::kib(64))),
            offered: vec![Bytes::mib(2), Bytes::gib(1)],
        };

        assert!(error.to_string().ends_with("it offers 2M, 1G"), "{error}");
    }
}
