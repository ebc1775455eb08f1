// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Plan of a backing on one host. [`BackingPlan::new`] selects the page type and private or shared
//! memory; mapping, advice, alignment, dropping and checks follow from these two.

use granule_types::{backing::Backing, units::Bytes};

use super::{HostPages, MemoryError, host_pages::block_size, residency::Residency};

/// Plan of a backing on one host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackingPlan {
    backing: Backing,
    page_type: PageType,
    /// Indicates a shared mapping of a memory file (memfd) instead of private anonymous memory.
    is_shared: bool,
    base_page_size: Bytes,
    page_size: Bytes,
}

/// Page type of a backing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PageType {
    /// Base pages only.
    Base,
    /// Transparent huge pages of a block.
    Transparent,
    /// Transparent huge pages smaller than a block.
    SmallTransparent(Bytes),
    /// Hugetlb pages.
    Hugetlb,
}

impl BackingPlan {
    /// Plans `backing` on `host`.
    pub fn new(backing: Backing, host: &HostPages) -> Result<Self, MemoryError> {
        let (page_type, is_shared) = match backing {
            Backing::Anonymous => (PageType::Base, false),
            Backing::AnonymousThp => (PageType::Transparent, false),
            Backing::AnonymousMthp(size) => (PageType::SmallTransparent(size), false),
            Backing::AnonymousHugetlb(_) => (PageType::Hugetlb, false),
            Backing::Shmem => (PageType::Base, true),
            Backing::SharedHugetlb => (PageType::Hugetlb, true),
        };
        let page_size = match page_type {
            PageType::Base => host.base_page_size,
            PageType::Transparent => {
                let size = block_size(host.base_page_size);
                let size = Some(size).filter(|size| host.transparent.contains(size));
                size.ok_or_else(|| {
                    MemoryError::Unavailable(format!(
                        "{backing} needs transparent huge pages, which are disabled on this host: \
                         write 'madvise' to /sys/kernel/mm/transparent_hugepage/enabled"
                    ))
                })?
            }
            // The kernel takes the largest size that is enabled.
            PageType::SmallTransparent(size) => {
                let file = |size: Bytes| {
                    let kib = size.0 >> 10;
                    format!("/sys/kernel/mm/transparent_hugepage/hugepages-{kib}kB/enabled")
                };
                let found = match host.transparent.last() {
                    Some(largest) if *largest == size => Ok(size),
                    Some(larger) if *larger > size => Err(format!(
                        "and the host also has larger ones: write 'never' to {}",
                        file(*larger)
                    )),
                    _ => Err(format!(
                        "which are disabled on this host: write 'madvise' to {} (Linux 6.8 or newer)",
                        file(size)
                    )),
                };
                found.map_err(|reason| {
                    let text =
                        format!("{backing} needs transparent huge pages of {size}, {reason}");
                    MemoryError::Unavailable(text)
                })?
            }
            PageType::Hugetlb => {
                let size = match backing {
                    Backing::AnonymousHugetlb(Some(size)) => Some(size),
                    _ => host.default_hugetlb,
                };
                size.filter(|size| host.hugetlb.contains(size)).ok_or_else(|| {
                    let offered = match host.hugetlb.as_slice() {
                        [] => "none (CONFIG_HUGETLBFS)".to_owned(),
                        sizes => sizes.iter().map(Bytes::to_string).collect::<Vec<_>>().join(", "),
                    };
                    MemoryError::Unavailable(format!(
                        "{backing} needs hugetlb pages that this host does not offer; it offers \
                         {offered}"
                    ))
                })?
            }
        };
        Ok(Self { backing, page_type, is_shared, base_page_size: host.base_page_size, page_size })
    }

    /// Returns the backing.
    pub const fn backing(&self) -> Backing {
        self.backing
    }

    pub(super) const fn page_type(&self) -> PageType {
        self.page_type
    }

    /// Returns the base page size of the host.
    pub const fn base_page_size(&self) -> Bytes {
        self.base_page_size
    }

    /// Returns the page size of the backing. It is also the largest block that KVM can map, hence
    /// the alignment that guest and host addresses must share.
    pub const fn page_size(&self) -> Bytes {
        self.page_size
    }

    /// Returns whether the pages come from a hugetlb pool.
    pub const fn is_hugetlb(&self) -> bool {
        matches!(self.page_type, PageType::Hugetlb)
    }

    /// Returns whether the memory has private transparent huge pages of a block, which the kernel can move.
    pub(super) const fn is_movable(&self) -> bool {
        !self.is_shared && matches!(self.page_type, PageType::Transparent)
    }

    /// Returns the hugetlb page size as encoded in the flags of `mmap` and `memfd_create`: its
    /// binary logarithm, shifted by `MAP_HUGE_SHIFT`.
    const fn huge_size_bits(&self) -> i32 {
        self.page_size.0.trailing_zeros().cast_signed() << libc::MAP_HUGE_SHIFT
    }

    /// Returns the flags of `mmap`, without `MAP_FIXED`. They omit `MAP_NORESERVE`, so that `mmap`
    /// reserves hugetlb pages and no later touch causes SIGBUS.
    pub(super) const fn map_flags(&self) -> i32 {
        match (self.is_shared, self.page_type) {
            (true, _) => libc::MAP_SHARED,
            (false, PageType::Hugetlb) => {
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | self.huge_size_bits()
            }
            (false, _) => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        }
    }

    /// Returns the flags of `memfd_create`, or `None` for anonymous memory.
    pub(super) const fn memfd_flags(&self) -> Option<u32> {
        match (self.is_shared, self.page_type) {
            (false, _) => None,
            (true, PageType::Hugetlb) => {
                Some(libc::MFD_CLOEXEC | libc::MFD_HUGETLB | self.huge_size_bits().cast_unsigned())
            }
            (true, _) => Some(libc::MFD_CLOEXEC),
        }
    }

    /// Returns the `madvise` advice to apply before the first touch.
    pub(super) const fn advice(&self) -> Option<i32> {
        match self.page_type {
            PageType::Base => Some(libc::MADV_NOHUGEPAGE),
            PageType::Transparent | PageType::SmallTransparent(_) => Some(libc::MADV_HUGEPAGE),
            PageType::Hugetlb => None,
        }
    }

    /// Returns whether the memory is dropped by mapping it again. For private hugetlb memory, Linux
    /// up to 5.17 refuses `MADV_DONTNEED`, and Linux up to 6.7 then loses the reservation.
    pub(super) const fn drops_by_remap(&self) -> bool {
        !self.is_shared && self.is_hugetlb()
    }

    /// Returns whether the memory must be mapped again after a drop: punching a hole in a hugetlb
    /// file also releases the reservation.
    pub(super) const fn needs_remap_after_drop(&self) -> bool {
        self.is_shared && self.is_hugetlb()
    }

    /// Checks that all resident pages are of the requested type.
    pub(super) fn check_residency(&self, residency: &Residency) -> Result<(), MemoryError> {
        let resident = residency.total();
        let wrong_pages = |wrong: Bytes, pages: &str, advice: &str| {
            Err(MemoryError::Unexpected(format!(
                "{wrong} of {resident} resident memory of {} are in {pages}: {advice}",
                self.backing
            )))
        };
        let Residency { base_pages, thp, .. } = *residency;
        match self.page_type {
            PageType::Base if thp.0 > 0 => wrong_pages(
                thp,
                "huge pages",
                "the kernel ignored MADV_NOHUGEPAGE; \
                 see /sys/kernel/mm/transparent_hugepage",
            ),
            PageType::SmallTransparent(_) if thp.0 > 0 => wrong_pages(
                thp,
                "pages of a block",
                "see hugepages-*/enabled in /sys/kernel/mm/transparent_hugepage",
            ),
            PageType::SmallTransparent(_) if base_pages.0 > 0 && residency.small_thp.is_none() => {
                Err(MemoryError::Unavailable(
                    "the sizes of transparent huge pages smaller than a block can be checked only with \
                     CAP_SYS_ADMIN: run as root"
                        .to_owned(),
                ))
            }
            PageType::SmallTransparent(_) if base_pages.0 > 0 => wrong_pages(
                base_pages,
                "base pages",
                "populate the memory beforehand (bench --prefault, run --memory …,prefault=on): a first \
                 read maps a base page",
            ),
            PageType::Transparent if base_pages.0 > 0 => wrong_pages(
                base_pages,
                "small pages",
                "populate the memory beforehand (bench --prefault, run --memory …,prefault=on), or \
                 write 0 to \
                 /sys/kernel/mm/transparent_hugepage/use_zero_page so that a first read does not \
                 map a small page; if both are done, free host memory is fragmented",
            ),
            PageType::Hugetlb
                if residency.kernel_page_size != self.page_size || base_pages.0 + thp.0 > 0 =>
            {
                wrong_pages(
                    resident,
                    "pages of another size",
                    "the mapping was replaced by another one",
                )
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn host() -> HostPages {
        let mut host = HostPages::from_files(Bytes::kib(4), Path::new("/nonexistent"), "").unwrap();
        host.transparent = vec![Bytes::mib(2)];
        host.hugetlb = vec![Bytes::kib(64), Bytes::mib(2), Bytes::gib(1)];
        host.default_hugetlb = Some(Bytes::mib(2));
        host
    }

    fn plan(name: &str) -> BackingPlan {
        BackingPlan::new(name.parse().unwrap(), &host()).unwrap()
    }

    fn residency(kernel_page: Bytes, base_pages: Bytes, thp: Bytes, hugetlb: Bytes) -> Residency {
        Residency { kernel_page_size: kernel_page, base_pages, small_thp: None, thp, hugetlb }
    }

    #[test]
    fn each_backing_has_its_page_size() {
        for (name, page) in [
            ("anonymous", Bytes::kib(4)),
            ("anonymous_thp", Bytes::mib(2)),
            ("anonymous_hugetlb", Bytes::mib(2)),
            ("anonymous_hugetlb_64kb", Bytes::kib(64)),
            ("anonymous_hugetlb_1gb", Bytes::gib(1)),
            ("shmem", Bytes::kib(4)),
            ("shared_hugetlb", Bytes::mib(2)),
        ] {
            assert_eq!(plan(name).page_size(), page, "{name}");
        }
    }

    #[test]
    fn hugetlb_flags_encode_the_size_and_reserve_pages() {
        let flags = plan("anonymous_hugetlb_1gb").map_flags();

        assert_eq!(flags & libc::MAP_HUGE_1GB, libc::MAP_HUGE_1GB);
        assert_ne!(flags & libc::MAP_HUGETLB, 0);
        assert_eq!(flags & libc::MAP_NORESERVE, 0);
    }

    #[test]
    fn pages_that_the_host_lacks_are_refused() {
        let mut bare = host();
        (bare.transparent, bare.default_hugetlb) = (Vec::new(), None);
        let mut small = host();
        small.transparent = vec![Bytes::kib(64)];
        assert!(BackingPlan::new(Backing::AnonymousMthp(Bytes::kib(64)), &small).is_ok());
        for (name, host, why) in [
            ("anonymous_mthp_64kb", bare.clone(), "hugepages-64kB/enabled (Linux 6.8 or newer)"),
            (
                "anonymous_mthp_64kb",
                host(),
                "write 'never' to /sys/kernel/mm/transparent_hugepage/hugepages-2048kB/enabled",
            ),
            ("anonymous_thp", small, "transparent_hugepage/enabled"),
            ("anonymous_hugetlb_32mb", host(), "it offers 64K, 2M, 1G"),
            ("anonymous_thp", bare.clone(), "transparent_hugepage/enabled"),
            ("anonymous_hugetlb", bare.clone(), "it offers 64K, 2M, 1G"),
            ("shared_hugetlb", bare, "it offers 64K, 2M, 1G"),
        ] {
            let error = BackingPlan::new(name.parse().unwrap(), &host).unwrap_err();
            assert!(error.to_string().ends_with(why), "{error}");
        }
    }

    #[test]
    fn only_pages_of_the_requested_type_pass_the_check() {
        let (none, base, huge) = (Bytes(0), Bytes::kib(4), Bytes::mib(2));
        let huge_only = residency(base, none, huge, none);
        let hugetlb_2m = residency(huge, none, none, Bytes::mib(64));

        let mut small = host();
        small.transparent = vec![Bytes::kib(64)];
        let mthp = BackingPlan::new(Backing::AnonymousMthp(Bytes::kib(64)), &small).unwrap();
        let check = |small_thp: Option<Bytes>| {
            let hidden = residency(base, Bytes::mib(1), none, none);
            mthp.check_residency(&small_thp.map_or(hidden, |bytes| hidden.with_small_thp(bytes)))
        };

        assert!(mthp.check_residency(&residency(base, none, none, none)).is_ok());
        assert!(check(None).unwrap_err().to_string().contains("CAP_SYS_ADMIN"));
        assert!(check(Some(Bytes::mib(1))).is_ok());
        let partly = check(Some(Bytes::kib(960))).unwrap_err().to_string();
        assert!(partly.starts_with("64K of 1M"), "{partly}");
        assert!(mthp.check_residency(&huge_only).is_err());
        assert!(plan("anonymous").check_residency(&huge_only).is_err());
        assert!(plan("anonymous_thp").check_residency(&huge_only).is_ok());
        assert!(plan("anonymous_hugetlb_1gb").check_residency(&hugetlb_2m).is_err());
        assert!(plan("anonymous_hugetlb_2mb").check_residency(&hugetlb_2m).is_ok());
        let mixed = residency(base, huge, Bytes::mib(62), none);
        let error = plan("anonymous_thp").check_residency(&mixed).unwrap_err();
        assert!(error.to_string().contains("2M of 64M"), "{error}");
    }
}
