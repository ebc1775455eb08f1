// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Page sizes and hugetlb pools of the host, read from `/sys`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use granule_types::units::Bytes;

use super::{MemoryError, kib_field};

/// Page sizes of a host, and access to its hugetlb pools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPages {
    /// Base page size.
    pub base_page_size: Bytes,
    /// Sizes of the transparent huge pages that advised memory gets, smallest first.
    pub transparent: Vec<Bytes>,
    /// Hugetlb page sizes, smallest first.
    pub hugetlb: Vec<Bytes>,
    /// Default hugetlb page size.
    pub default_hugetlb: Option<Bytes>,
    sysfs: PathBuf,
}

/// Pages of a hugetlb pool, over all NUMA nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HugetlbPool {
    /// Pages that the administrator requested (`nr_hugepages` without surplus pages).
    pub configured: u64,
    /// Pages that no mapping uses; some may be reserved.
    pub free: u64,
    /// Pages that a mapping can reserve: free unreserved pages, and surplus pages that the pool may
    /// still add (`Documentation/admin-guide/mm/hugetlbpage.rst`).
    pub available: u64,
}

/// Returns the range that one last-level table maps: a page of 8-byte entries (4K → 2M, 16K → 32M,
/// 64K → 512M).
pub(super) const fn block_size(page: Bytes) -> Bytes {
    Bytes(page.0 * (page.0 / 8))
}

impl HostPages {
    /// Reads the page sizes of this host.
    pub fn of_this_host() -> Result<Self, MemoryError> {
        let meminfo = PathBuf::from("/proc/meminfo");
        Self::from_files(base_page_size(), Path::new("/sys"), &read_text(&meminfo)?)
    }

    /// Reads the page sizes from `sysfs`, laid out as `/sys`, and the text of `meminfo`.
    pub fn from_files(base: Bytes, sysfs: &Path, meminfo: &str) -> Result<Self, MemoryError> {
        let mut hugetlb = Vec::new();
        let folder = sysfs.join("kernel/mm/hugepages");
        match fs::read_dir(&folder) {
            Ok(entries) => hugetlb.extend(
                entries
                    .flatten()
                    .filter_map(|entry| parse_hugepage_folder(entry.file_name().to_str()?)),
            ),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(MemoryError::Read { path: folder, source }),
        }
        hugetlb.sort_unstable();
        Ok(Self {
            base_page_size: base,
            transparent: transparent_sizes(base, &sysfs.join("kernel/mm/transparent_hugepage")),
            hugetlb,
            default_hugetlb: kib_field(meminfo, "Hugepagesize"),
            sysfs: sysfs.to_owned(),
        })
    }

    /// Checks that a NUMA node has enough free hugetlb pages for a mapping that is bound to it.
    /// Such a mapping reserves pages in the pool of all nodes but allocates them from this node.
    pub fn check_node_pool(&self, node: u32, page: Bytes, size: Bytes) -> Result<(), MemoryError> {
        let pool = self
            .sysfs
            .join(format!("devices/system/node/node{node}/hugepages/hugepages-{}kB", page.0 >> 10));
        // A host without NUMA has one pool, which [`Self::check_hugetlb_pool`] checks.
        let number =
            |name| -> Option<u64> { fs::read_to_string(pool.join(name)).ok()?.trim().parse().ok() };
        let (Some(free), Some(total)) = (number("free_hugepages"), number("nr_hugepages")) else {
            return Ok(());
        };
        let needed = size.0.div_ceil(page.0);
        if free < needed {
            let missing = needed - free;
            return Err(MemoryError::Unavailable(format!(
                "NUMA node {node} has {free} free pages of {page}, {needed} are needed, {missing} \
                 are missing; as root: echo {total} > \
                 /sys/devices/system/node/node{node}/hugepages/hugepages-{kib}kB/nr_hugepages",
                total = total + missing,
                kib = page.0 >> 10
            )));
        }
        Ok(())
    }

    /// Reads the hugetlb pool of a page size.
    ///
    /// # Errors
    /// The host has no such pool, or a file of it cannot be read.
    pub fn hugetlb_pool(&self, page: Bytes) -> Result<HugetlbPool, MemoryError> {
        let folder = self.sysfs.join(format!("kernel/mm/hugepages/hugepages-{}kB", page.0 >> 10));
        let number = |name: &str| -> Result<u64, MemoryError> {
            let path = folder.join(name);
            let text = read_text(&path)?;
            text.trim().parse().map_err(|_| {
                let (path, found) = (path.display(), text.trim());
                let text = format!("{path} holds '{found}' where a number of pages was expected");
                MemoryError::Unexpected(text)
            })
        };
        let surplus = number("surplus_hugepages")?;
        let free = number("free_hugepages")?;
        let unreserved = free.saturating_sub(number("resv_hugepages")?);
        let unused_surplus = number("nr_overcommit_hugepages")?.saturating_sub(surplus);
        Ok(HugetlbPool {
            configured: number("nr_hugepages")?.saturating_sub(surplus),
            free,
            available: unreserved + unused_surplus,
        })
    }

    /// Checks that a mapping can reserve its hugetlb pages in the pool of all nodes.
    pub fn check_hugetlb_pool(&self, page: Bytes, size: Bytes) -> Result<(), MemoryError> {
        let HugetlbPool { configured, available, .. } = self.hugetlb_pool(page)?;
        let needed = size.0.div_ceil(page.0);
        if available < needed {
            let missing = needed - available;
            let total = configured + missing;
            let kib = page.0 >> 10;
            return Err(MemoryError::Unavailable(format!(
                "the memory needs {needed} hugetlb pages of {page} and the host has {available} \
                 available: {missing} are missing; add them with: echo {total} > \
                 /sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages \
                 (or boot the host with hugepagesz={page} hugepages={total})"
            )));
        }
        Ok(())
    }
}

/// Returns the sizes of the transparent huge pages that advised memory gets, smallest first, by the settings
/// in a folder. Before Linux 6.8 the block is the only size.
fn transparent_sizes(base: Bytes, folder: &Path) -> Vec<Bytes> {
    let mode = |file: &Path| fs::read_to_string(file).unwrap_or_default();
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let is_on = |text: &str| ["[always]", "[madvise]"].iter().any(|mode| text.contains(mode));
    let inherited = is_on(&mode(&folder.join("enabled")));
    let mut sizes = vec![(block_size(base), inherited)];
    for entry in entries.flatten() {
        let Some(size) = entry.file_name().to_str().and_then(parse_hugepage_folder) else {
            continue;
        };
        let own = mode(&entry.path().join("enabled"));
        sizes.retain(|(known, _)| *known != size);
        sizes.push((size, is_on(&own) || (inherited && own.contains("[inherit]"))));
    }
    let mut sizes: Vec<Bytes> =
        sizes.into_iter().filter(|(_, is_on)| *is_on).map(|(size, _)| size).collect();
    sizes.sort_unstable();
    sizes
}

/// Parses the page size in a folder name such as `hugepages-2048kB`.
fn parse_hugepage_folder(name: &str) -> Option<Bytes> {
    let kib = name.strip_prefix("hugepages-")?.strip_suffix("kB")?;
    Some(Bytes::kib(kib.parse().ok()?))
}

/// Returns the size of this host's base pages.
pub(crate) fn base_page_size() -> Bytes {
    Bytes(rustix::param::page_size() as u64)
}

fn read_text(path: &Path) -> Result<String, MemoryError> {
    fs::read_to_string(path).map_err(|source| MemoryError::Read { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(enabled: &str, pool: [u64; 5]) -> (tempfile::TempDir, HostPages) {
        let root = tempfile::tempdir().unwrap();
        let mm = root.path().join("kernel/mm");
        let folder = mm.join("hugepages/hugepages-2048kB");
        fs::create_dir_all(&folder).unwrap();
        fs::create_dir_all(mm.join("hugepages/hugepages-1048576kB")).unwrap();
        fs::create_dir_all(mm.join("transparent_hugepage")).unwrap();
        fs::write(mm.join("transparent_hugepage/enabled"), enabled).unwrap();
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
    fn block_size_is_the_range_of_a_last_level_table() {
        assert_eq!(block_size(Bytes::kib(4)), Bytes::mib(2));
        assert_eq!(block_size(Bytes::kib(16)), Bytes::mib(32));
        assert_eq!(block_size(Bytes::kib(64)), Bytes::mib(512));
    }

    #[test]
    fn a_node_with_too_few_pages_is_an_error() {
        let (root, pages) = host("never", [8, 8, 0, 0, 0]);
        let folder = root.path().join("devices/system/node/node1/hugepages/hugepages-2048kB");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("nr_hugepages"), "3\n").unwrap();
        fs::write(folder.join("free_hugepages"), "1\n").unwrap();
        let check = |node, size| pages.check_node_pool(node, Bytes::mib(2), size);

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
    fn huge_page_sizes_are_read_and_disabled_thp_is_absent() {
        let enabled = ("always [madvise] never", Some(Bytes::mib(2)));
        for (setting, thp) in [enabled, ("always madvise [never]", None)] {
            let (_root, pages) = host(setting, [0; 5]);
            let thp = Vec::from_iter(thp);

            assert_eq!(pages.hugetlb, [Bytes::mib(2), Bytes::gib(1)]);
            assert_eq!(pages.default_hugetlb, Some(Bytes::mib(2)));
            assert_eq!(pages.transparent, thp);
        }
    }

    #[test]
    fn each_size_of_transparent_pages_has_its_mode() {
        for (all, block, small, sizes) in [
            ("[madvise]", "[inherit]", "[madvise]", vec![Bytes::kib(64), Bytes::mib(2)]),
            ("[madvise]", "[inherit]", "[never]", vec![Bytes::mib(2)]),
            ("[madvise]", "[never]", "[inherit]", vec![Bytes::kib(64)]),
            ("[never]", "[inherit]", "[always]", vec![Bytes::kib(64)]),
        ] {
            let (root, _) = host(all, [0; 5]);
            for (folder, mode) in [("hugepages-2048kB", block), ("hugepages-64kB", small)] {
                let folder = root.path().join("kernel/mm/transparent_hugepage").join(folder);
                fs::create_dir_all(&folder).unwrap();
                fs::write(folder.join("enabled"), mode).unwrap();
            }

            let pages = HostPages::from_files(Bytes::kib(4), root.path(), "").unwrap();

            assert_eq!(pages.transparent, sizes);
        }
    }

    #[test]
    fn a_pool_needs_unreserved_or_surplus_pages() {
        for (pool, missing) in [
            ([40, 37, 5, 0, 0], None),
            ([0, 0, 0, 0, 32], None),
            ([40, 10, 5, 0, 0], Some((5, 27, 67))),
            ([40, 10, 5, 3, 4], Some((6, 26, 63))),
        ] {
            let (_root, pages) = host("[never]", pool);
            let checked = pages.check_hugetlb_pool(Bytes::mib(2), Bytes::mib(64));

            let Some((available, missing, total)) = missing else {
                checked.unwrap();
                continue;
            };
            let text = checked.unwrap_err().to_string();
            let counts = format!("has {available} available: {missing} are missing");
            let file = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
            assert!(text.contains("32 hugetlb pages of 2M") && text.contains(&counts), "{text}");
            assert!(text.contains(&format!("echo {total} > {file}")), "{text}");
        }
    }

    #[test]
    fn the_error_of_an_invalid_pool_file_names_the_file() {
        let (root, pages) = host("[never]", [0; 5]);
        fs::write(
            root.path().join("kernel/mm/hugepages/hugepages-2048kB/free_hugepages"),
            "many\n",
        )
        .unwrap();

        let error = pages.check_hugetlb_pool(Bytes::mib(2), Bytes::mib(2)).unwrap_err();

        assert!(error.to_string().contains("free_hugepages holds 'many'"), "{error}");
    }
}
