// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A planned job, and the resources that a backing requires of the emulated host.

use std::{collections::BTreeMap, path::PathBuf};

use granule_types::{backing::Backing, units::Bytes};

use crate::{
    host::{emulator::Hardware, job::Job},
    options::Matrix,
};

/// Pages of this size and more can only be reserved at boot.
const GIGANTIC: u64 = 1 << 30;
/// Default huge page size of Debian's and the lab's kernels.
pub const DEFAULT_HUGE: u64 = 2 << 20;
/// Virtual seconds after which a test is killed. A test that sleeps gets there at once.
pub const DEADLINE_SECONDS: u64 = 3600;

/// One boot and its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedJob {
    /// Name of the job's directory.
    pub name: String,
    pub hardware: Hardware,
    /// Additional kernel parameters.
    pub append: String,
    pub job: Job,
    /// Program of the kernel tree to add to the initramfs.
    pub foreign: Option<PathBuf>,
    /// Guest to add to the initramfs.
    pub guest: Option<Guest>,
}

/// Boot files of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Guest {
    /// The kernel of the host, with `granule` as PID 1.
    Own,
    /// `vmlinuz`, `initrd.img` and `root.img` of a distribution in this directory.
    Distribution(PathBuf),
}

impl Guest {
    /// Path of the guest's kernel in the initramfs.
    pub const IMAGE: &str = "/guest.image";
    /// Path of the guest's initramfs in the initramfs.
    pub const INITRD: &str = "/guest.cpio";
    /// Path of the guest's disk in the initramfs.
    pub const DISK: &str = "/guest.disk";

    /// Returns the files of a distribution and their paths in the initramfs.
    pub fn files(&self) -> Vec<(PathBuf, &'static str)> {
        match self {
            Self::Own => Vec::new(),
            Self::Distribution(directory) => vec![
                (directory.join("vmlinuz"), Self::IMAGE),
                (directory.join("initrd.img"), Self::INITRD),
                (directory.join("root.img"), Self::DISK),
            ],
        }
    }
}

/// Returns a value for each combination of backing, vCPU number and seed, in the order of results.
pub fn combinations<T>(matrix: &Matrix, job: impl Fn(Backing, u32, u64) -> T) -> Vec<T> {
    let mut jobs = Vec::new();
    for &backing in &matrix.backings {
        for &vcpus in &matrix.vcpus {
            jobs.extend((0..matrix.seeds).map(|seed| job(backing, vcpus, seed)));
        }
    }
    jobs
}

/// Returns the hugetlb page size of a backing.
pub fn page_of(backing: Backing) -> Option<u64> {
    match backing {
        Backing::AnonymousHugetlb(Some(size)) => Some(size.0),
        Backing::AnonymousHugetlb(None) | Backing::SharedHugetlb => Some(DEFAULT_HUGE),
        Backing::Anonymous | Backing::AnonymousThp | Backing::Shmem => None,
    }
}

/// Returns the pool of huge pages that holds this much memory: page size and number of pages.
pub fn pools(backing: Backing, memory: Bytes) -> BTreeMap<u64, u64> {
    page_of(backing).map(|page| (page, memory.0.div_ceil(page))).into_iter().collect()
}

/// Returns settings of a backing. `granule bench` requires huge pages, and a read that maps the huge
/// zero page leads to small pages at the first write. The kernel's test runs with the defaults.
pub fn settings(backing: Backing, foreign: bool) -> BTreeMap<String, String> {
    match (backing, foreign) {
        (Backing::AnonymousThp, false) => {
            let file = "/sys/kernel/mm/transparent_hugepage/use_zero_page";
            [(file.to_owned(), "0".to_owned())].into()
        }
        _ => BTreeMap::new(),
    }
}

/// Returns the host memory for a region and its pools: one more gigabyte, and another one for
/// gigantic pages, which must be aligned while kernel and page tables take both ends.
pub fn host_memory(region: Bytes, pools: &BTreeMap<u64, u64>) -> Bytes {
    let pooled: u64 = pools.iter().map(|(page, count)| page * count).sum();
    let gigantic = pools.keys().any(|page| *page >= GIGANTIC);
    let whole_gigabytes = region.0.max(pooled).next_multiple_of(GIGANTIC);
    Bytes(whole_gigabytes + if gigantic { 2 } else { 1 } * GIGANTIC)
}

/// Returns the kernel parameters that reserve gigantic pages.
pub fn append(pools: &BTreeMap<u64, u64>) -> String {
    pools
        .iter()
        .filter(|(page, _)| **page >= GIGANTIC)
        .map(|(page, count)| {
            let page = Bytes(*page);
            format!("default_hugepagesz=2M hugepagesz={page} hugepages={count}")
        })
        .collect()
}
