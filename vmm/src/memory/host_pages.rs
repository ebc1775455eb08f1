// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The page sizes this host offers, as its kernel tells them under `/sys/kernel/mm`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use granule_types::units::Bytes;

use super::MemoryError;

/// The kernel's memory folder.
const SYS_MM: &str = "/sys/kernel/mm";
/// Its folder of NUMA nodes.
const SYS_NODES: &str = "/sys/devices/system/node";

/// The page sizes of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPages {
    /// The base page.
    pub base: Bytes,
    /// The size of a transparent huge page, where they can be had on request.
    pub thp: Option<Bytes>,
    /// The hugetlb page sizes, smallest first.
    pub hugetlb: Vec<Bytes>,
    /// The hugetlb page size used where none is named.
    pub default_hugetlb: Option<Bytes>,
    root: PathBuf,
    nodes: PathBuf,
}

/// The block one entry of the last but one table level maps: a table of 8-byte entries fills one
/// page. 4K → 2M, 16K → 32M, 64K → 512M.
pub const fn block_above(page: Bytes) -> Bytes {
    Bytes(page.0 * (page.0 / 8))
}

impl HostPages {
    /// Asks this host.
    ///
    /// # Errors
    /// A file exists but cannot be read or holds something unexpected.
    pub fn of_this_host() -> Result<Self, MemoryError> {
        let meminfo = PathBuf::from("/proc/meminfo");
        let text = read(&meminfo)?;
        Self::from_files(base_page(), Path::new(SYS_MM), &text)
    }

    /// Reads a host's answers from `root` (laid out as `/sys/kernel/mm`) and the text of its
    /// `meminfo`.
    ///
    /// # Errors
    /// As [`HostPages::of_this_host`].
    pub fn from_files(base: Bytes, root: &Path, meminfo: &str) -> Result<Self, MemoryError> {
        let mut hugetlb = Vec::new();
        let folder = root.join("hugepages");
        match fs::read_dir(&folder) {
            Ok(entries) => {
                hugetlb.extend(
                    entries
                        .flatten()
                        .filter_map(|entry| folder_size(entry.file_name().to_str()?)),
                );
                hugetlb.sort_unstable();
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => {
                return Err(MemoryError::Read {
                    path: folder,
                    source,
                });
            }
        }
        let enabled = fs::read_to_string(root.join("transparent_hugepage/enabled"));
        let thp_on = enabled.is_ok_and(|text| !text.contains("[never]"));
        let default_hugetlb = meminfo
            .lines()
            .find_map(|line| line.strip_prefix("Hugepagesize:"))
            .and_then(|value| value.trim().strip_suffix(" kB"))
            .and_then(|kib| kib.trim().parse().ok())
            .map(Bytes::kib);
        Ok(Self {
            base,
            thp: thp_on.then(|| block_above(base)),
            hugetlb,
            default_hugetlb,
            root: root.to_owned(),
            nodes: PathBuf::from(SYS_NODES),
        })
    }

    /// Checks that a node has free hugetlb pages for a mapping: they are promised by the pool of all
    /// nodes, and taken from this one when they are touched.
    ///
    /// # Errors
    /// [`MemoryError::NodeShort`] with the command that helps.
    pub fn check_node(&self, node: u32, page: Bytes, size: Bytes) -> Result<(), MemoryError> {
        let pool = format!("node{node}/hugepages/hugepages-{}kB", page.0 >> 10);
        let pool = self.nodes.join(pool);
        // A host without nodes has one pool, which is checked anyway.
        let number = |name| {
            fs::read_to_string(pool.join(name))
                .ok()?
                .trim()
                .parse()
                .ok()
        };
        let (Some(free), Some(total)) = (number("free_hugepages"), number("nr_hugepages")) else {
            return Ok(());
        };
        let needed = size.0.div_ceil(page.0);
        if free < needed {
            return Err(MemoryError::NodeShort {
                node,
                page,
                needed,
                free,
                total: total + (needed - free),
            });
        }
        Ok(())
    }

    /// The pool of hugetlb pages of `page` bytes, as it stands now.
    ///
    /// # Errors
    /// The host has no such pool or its files hold something unexpected.
    pub fn pool(&self, page: Bytes) -> Result<HugetlbPool, MemoryError> {
        let folder = self
            .root
            .join(format!("hugepages/hugepages-{}kB", page.0 >> 10));
        let number = |name: &str| {
            let path = folder.join(name);
            let text = read(&path)?;
            text.trim().parse().map_err(|_| MemoryError::Malformed {
                path,
                found: text.trim().to_owned(),
                expected: "a number of pages",
            })
        };
        Ok(HugetlbPool {
            page,
            total: number("nr_hugepages")?,
            free: number("free_hugepages")?,
            reserved: number("resv_hugepages")?,
            surplus: number("surplus_hugepages")?,
            overcommit: number("nr_overcommit_hugepages")?,
        })
    }
}

/// A pool of hugetlb pages, in pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HugetlbPool {
    /// The size of one page.
    pub page: Bytes,
    /// Pages in the pool, used or not.
    pub total: u64,
    /// Pages not used.
    pub free: u64,
    /// Of these, pages promised to mappings that exist.
    pub reserved: u64,
    /// Pages above the pool's fixed size.
    pub surplus: u64,
    /// How many such there may be.
    pub overcommit: u64,
}

impl HugetlbPool {
    /// How many pages a new mapping can be promised.
    pub const fn available(&self) -> u64 {
        self.free.saturating_sub(self.reserved) + self.overcommit.saturating_sub(self.surplus)
    }

    /// Checks that a mapping of `size` bytes can be promised its pages.
    ///
    /// # Errors
    /// [`MemoryError::PoolShort`] with the command that helps.
    pub fn check(&self, size: Bytes) -> Result<(), MemoryError> {
        let needed = size.0.div_ceil(self.page.0);
        let available = self.available();
        if available < needed {
            return Err(MemoryError::PoolShort {
                page: self.page,
                needed,
                available,
                total: self.total - self.surplus.min(self.total) + (needed - available),
            });
        }
        Ok(())
    }
}

/// The size in a folder's name, `hugepages-2048kB`.
fn folder_size(name: &str) -> Option<Bytes> {
    let kib = name.strip_prefix("hugepages-")?.strip_suffix("kB")?;
    Some(Bytes::kib(kib.parse().ok()?))
}

/// The base page of this host.
pub fn base_page() -> Bytes {
    // SAFETY: sysconf reads no memory of ours, and _SC_PAGESIZE is a valid name.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // POSIX has every system answer this; 4K keeps the arithmetic sound if one does not.
    Bytes(u64::try_from(size).unwrap_or(4096))
}

fn read(path: &Path) -> Result<String, MemoryError> {
    fs::read_to_string(path).map_err(|source| MemoryError::Read {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(enabled: &str, pool: [u64; 5]) -> (tempfile::TempDir, HostPages) {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("hugepages/hugepages-2048kB");
        fs::create_dir_all(&folder).unwrap();
        fs::create_dir_all(root.path().join("hugepages/hugepages-1048576kB")).unwrap();
        fs::create_dir_all(root.path().join("transparent_hugepage")).unwrap();
        fs::write(root.path().join("transparent_hugepage/enabled"), enabled).unwrap();
        let names = [
            "nr_hugepages",
            "free_hugepages",
            "resv_hugepages",
            "surplus_hugepages",
            "nr_overcommit_hugepages",
        ];
        for (name, value) in names.into_iter().zip(pool) {
            fs::write(folder.join(name), format!("{value}\n")).unwrap();
        }
        let meminfo = "MemTotal: 1 kB\nHugepagesize:       2048 kB\n";
        let pages = HostPages::from_files(Bytes::kib(4), root.path(), meminfo).unwrap();
        (root, pages)
    }

    #[test]
    fn blocks_follow_the_base_page() {
        assert_eq!(block_above(Bytes::kib(4)), Bytes::mib(2));
        assert_eq!(block_above(Bytes::kib(16)), Bytes::mib(32));
        assert_eq!(block_above(Bytes::kib(64)), Bytes::mib(512));
    }

    #[test]
    fn a_node_without_pages_is_told_of_although_another_has_them() {
        let (root, mut pages) = host("never", [8, 8, 0, 0, 0]);
        let folder = root.path().join("nodes/node1/hugepages/hugepages-2048kB");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("nr_hugepages"), "3\n").unwrap();
        fs::write(folder.join("free_hugepages"), "1\n").unwrap();
        pages.nodes = root.path().join("nodes");
        let check = |node, size| pages.check_node(node, Bytes::mib(2), size);

        let error = check(1, Bytes::mib(8)).unwrap_err().to_string();

        assert!(error.contains("3 are missing"), "{error}");
        assert!(
            error.contains("echo 6 > /sys/devices/system/node/node1/hugepages/hugepages-2048kB"),
            "{error}"
        );
        assert!(check(1, Bytes::mib(2)).is_ok());
        assert!(check(0, Bytes::mib(8)).is_ok());
    }

    #[test]
    fn a_hosts_sizes_are_read() {
        let (_root, pages) = host("always [madvise] never", [0; 5]);

        assert_eq!(pages.hugetlb, [Bytes::mib(2), Bytes::gib(1)]);
        assert_eq!(pages.default_hugetlb, Some(Bytes::mib(2)));
        assert_eq!(pages.thp, Some(Bytes::mib(2)));
    }

    #[test]
    fn transparent_huge_pages_switched_off_are_not_offered() {
        let (_root, pages) = host("always madvise [never]", [0; 5]);

        assert_eq!(pages.thp, None);
    }

    #[test]
    fn pages_promised_to_others_are_not_available() {
        let (_root, pages) = host("[never]", [40, 37, 5, 0, 0]);

        let pool = pages.pool(Bytes::mib(2)).unwrap();

        assert_eq!(pool.available(), 32);
        assert!(pool.check(Bytes::mib(64)).is_ok());
    }

    #[test]
    fn a_short_pool_is_told_what_size_it_must_have() {
        let (_root, pages) = host("[never]", [40, 10, 5, 0, 0]);

        let error = pages
            .pool(Bytes::mib(2))
            .unwrap()
            .check(Bytes::mib(64))
            .unwrap_err();

        assert!(
            matches!(
                error,
                MemoryError::PoolShort {
                    needed: 32,
                    available: 5,
                    total: 67,
                    ..
                }
            ),
            "{error}"
        );
    }

    #[test]
    fn pages_that_may_be_added_on_demand_count() {
        let (_root, pages) = host("[never]", [0, 0, 0, 0, 32]);

        let pool = pages.pool(Bytes::mib(2)).unwrap();

        assert!(pool.check(Bytes::mib(64)).is_ok());
    }

    #[test]
    fn a_pool_file_that_holds_no_number_is_named() {
        let (root, pages) = host("[never]", [0; 5]);
        fs::write(
            root.path()
                .join("hugepages/hugepages-2048kB/free_hugepages"),
            "many\n",
        )
        .unwrap();

        let error = pages.pool(Bytes::mib(2)).unwrap_err();

        assert!(
            error.to_string().contains("free_hugepages holds 'many'"),
            "{error}"
        );
    }
}
