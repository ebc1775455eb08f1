// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a backing means on a host: everything that mapping, advising, aligning, dropping and
//! checking it need to know, decided in one place.

use granule_types::{backing::Backing, units::Bytes};

use super::{HostPages, MemoryError, smaps::Residency};

/// How a backing is obtained on one host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    backing: Backing,
    base: Bytes,
    page: Bytes,
}

/// How the memory behind a mapping is given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DropMethod {
    /// `MADV_DONTNEED`.
    Advice,
    /// `fallocate` with a hole in the file.
    Hole,
    /// A new mapping in place of the old one.
    Remap,
}

impl Plan {
    /// Decides how `backing` is obtained on `host`.
    ///
    /// # Errors
    /// The host does not offer it.
    pub fn new(backing: Backing, host: &HostPages) -> Result<Self, MemoryError> {
        let no_hugetlb = || MemoryError::NoHugetlb {
            backing,
            offered: host.hugetlb.clone(),
        };
        let page = match backing {
            Backing::Anonymous | Backing::Shmem => host.base,
            Backing::AnonymousThp => host.thp.ok_or(MemoryError::ThpOff)?,
            Backing::AnonymousHugetlb(Some(size)) => size,
            Backing::AnonymousHugetlb(None) | Backing::SharedHugetlb => {
                host.default_hugetlb.ok_or_else(no_hugetlb)?
            }
        };
        let plan = Self {
            backing,
            base: host.base,
            page,
        };
        if plan.is_hugetlb() && !host.hugetlb.contains(&page) {
            return Err(no_hugetlb());
        }
        Ok(plan)
    }

    /// The backing.
    pub const fn backing(&self) -> Backing {
        self.backing
    }

    /// The host's base page.
    pub const fn base_page(&self) -> Bytes {
        self.base
    }

    /// The page the backing is made of. It is also the largest block KVM can map from it, hence
    /// the alignment that guest and host addresses must share.
    pub const fn page(&self) -> Bytes {
        self.page
    }

    /// Whether the pages come from a hugetlb pool.
    pub const fn is_hugetlb(&self) -> bool {
        matches!(
            self.backing,
            Backing::AnonymousHugetlb(_) | Backing::SharedHugetlb
        )
    }

    /// Whether the memory is a file's (memfd).
    pub const fn is_file(&self) -> bool {
        matches!(self.backing, Backing::Shmem | Backing::SharedHugetlb)
    }

    /// The size as the kernel takes it in `mmap` and `memfd_create` flags: its logarithm, shifted
    /// to `MAP_HUGE_SHIFT`.
    const fn huge_size_bits(&self) -> i32 {
        self.page.0.trailing_zeros().cast_signed() << libc::MAP_HUGE_SHIFT
    }

    /// Flags for `mmap`, `MAP_FIXED` aside. Hugetlb comes without `MAP_NORESERVE`, so that its
    /// pages are promised at once and no later touch ends in SIGBUS.
    pub const fn map_flags(&self) -> i32 {
        match self.backing {
            Backing::Anonymous | Backing::AnonymousThp => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            Backing::AnonymousHugetlb(_) => {
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | self.huge_size_bits()
            }
            Backing::Shmem | Backing::SharedHugetlb => libc::MAP_SHARED,
        }
    }

    /// Flags for `memfd_create`; `None` where the backing is no file.
    pub const fn memfd_flags(&self) -> Option<u32> {
        match self.backing {
            Backing::Shmem => Some(libc::MFD_CLOEXEC),
            Backing::SharedHugetlb => {
                Some(libc::MFD_CLOEXEC | libc::MFD_HUGETLB | self.huge_size_bits().cast_unsigned())
            }
            _ => None,
        }
    }

    /// Advice to give before the first touch.
    pub const fn advice(&self) -> Option<i32> {
        match self.backing {
            Backing::Anonymous | Backing::Shmem => Some(libc::MADV_NOHUGEPAGE),
            Backing::AnonymousThp => Some(libc::MADV_HUGEPAGE),
            Backing::AnonymousHugetlb(_) | Backing::SharedHugetlb => None,
        }
    }

    /// How the memory is dropped. Private hugetlb is mapped anew on every kernel: `MADV_DONTNEED`
    /// is refused there up to Linux 5.17 and loses the promise of pages up to 6.7.
    pub const fn drop_method(&self) -> DropMethod {
        match self.backing {
            Backing::Anonymous | Backing::AnonymousThp => DropMethod::Advice,
            Backing::Shmem | Backing::SharedHugetlb => DropMethod::Hole,
            Backing::AnonymousHugetlb(_) => DropMethod::Remap,
        }
    }

    /// Whether the mapping must be made anew before the memory is used again: a hole in a hugetlb
    /// file also gives the promise of its pages back.
    pub const fn remap_after_drop(&self) -> bool {
        matches!(self.backing, Backing::SharedHugetlb)
    }

    /// Whether every page that is resident is of the kind asked for.
    ///
    /// # Errors
    /// [`MemoryError::WrongPages`] with what to do.
    pub fn check(&self, usage: &Residency) -> Result<(), MemoryError> {
        let resident = usage.resident();
        let wrong_pages = |wrong: Bytes, what, advice| {
            Err(MemoryError::WrongPages {
                backing: self.backing,
                wrong,
                resident,
                what,
                advice,
            })
        };
        match self.backing {
            Backing::Anonymous | Backing::Shmem if usage.huge.0 > 0 => wrong_pages(
                usage.huge,
                "huge pages",
                "the kernel ignored the advice against them; \
                 see /sys/kernel/mm/transparent_hugepage",
            ),
            Backing::AnonymousThp if usage.small.0 > 0 => wrong_pages(
                usage.small,
                "small pages",
                "populate the memory beforehand (bench --prefault, run --memory …,prefault=on), or \
                 write 0 to \
                 /sys/kernel/mm/transparent_hugepage/use_zero_page so that a first read does not \
                 fix a small page; if that is done, free host memory is fragmented",
            ),
            Backing::AnonymousHugetlb(_) | Backing::SharedHugetlb
                if usage.kernel_page != self.page || usage.small.0 + usage.huge.0 > 0 =>
            {
                wrong_pages(
                    resident,
                    "pages of another size",
                    "the mapping was replaced after it was made",
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
        host.thp = Some(Bytes::mib(2));
        host.hugetlb = vec![Bytes::kib(64), Bytes::mib(2), Bytes::gib(1)];
        host.default_hugetlb = Some(Bytes::mib(2));
        host
    }

    fn plan(name: &str) -> Plan {
        Plan::new(name.parse().unwrap(), &host()).unwrap()
    }

    #[test]
    fn each_backing_has_its_page() {
        for (name, page) in [
            ("anonymous", Bytes::kib(4)),
            ("anonymous_thp", Bytes::mib(2)),
            ("anonymous_hugetlb", Bytes::mib(2)),
            ("anonymous_hugetlb_64kb", Bytes::kib(64)),
            ("anonymous_hugetlb_1gb", Bytes::gib(1)),
            ("shmem", Bytes::kib(4)),
            ("shared_hugetlb", Bytes::mib(2)),
        ] {
            assert_eq!(plan(name).page(), page, "{name}");
        }
    }

    #[test]
    fn hugetlb_flags_carry_the_size_and_reserve() {
        let flags = plan("anonymous_hugetlb_1gb").map_flags();

        assert_eq!(flags & libc::MAP_HUGE_1GB, libc::MAP_HUGE_1GB);
        assert_ne!(flags & libc::MAP_HUGETLB, 0);
        assert_eq!(flags & libc::MAP_NORESERVE, 0);
    }

    #[test]
    fn a_size_the_host_does_not_offer_is_refused_with_those_it_does() {
        let backing = "anonymous_hugetlb_32mb".parse().unwrap();

        let error = Plan::new(backing, &host()).unwrap_err();

        assert!(error.to_string().contains("64K, 2M, 1G"), "{error}");
    }

    #[test]
    fn a_host_without_huge_pages_says_so() {
        let mut bare = host();
        bare.thp = None;
        bare.default_hugetlb = None;

        for name in ["anonymous_thp", "anonymous_hugetlb", "shared_hugetlb"] {
            assert!(Plan::new(name.parse().unwrap(), &bare).is_err(), "{name}");
        }
    }

    #[test]
    fn small_pages_behind_thp_are_an_error_that_says_how_many() {
        let usage = Residency {
            kernel_page: Bytes::kib(4),
            small: Bytes::mib(2),
            huge: Bytes::mib(62),
            hugetlb: Bytes(0),
        };

        let error = plan("anonymous_thp").check(&usage).unwrap_err();

        assert!(error.to_string().contains("2M of 64M"), "{error}");
    }

    #[test]
    fn huge_pages_behind_small_ones_are_an_error() {
        let usage = Residency {
            kernel_page: Bytes::kib(4),
            small: Bytes(0),
            huge: Bytes::mib(2),
            hugetlb: Bytes(0),
        };

        assert!(plan("anonymous").check(&usage).is_err());
        assert!(plan("anonymous_thp").check(&usage).is_ok());
    }

    #[test]
    fn hugetlb_of_another_size_is_an_error() {
        let usage = Residency {
            kernel_page: Bytes::mib(2),
            small: Bytes(0),
            huge: Bytes(0),
            hugetlb: Bytes::mib(64),
        };

        assert!(plan("anonymous_hugetlb_1gb").check(&usage).is_err());
        assert!(plan("anonymous_hugetlb_2mb").check(&usage).is_ok());
    }
}
