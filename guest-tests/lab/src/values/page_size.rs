// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Base page size of a host kernel, and the backings that it has.

use clap::ValueEnum;
use granule_types::{backing::Backing, units::Bytes};
use serde::{Deserialize, Serialize};

use crate::error::LabError;

/// Base page size of a host kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum PageSize {
    /// 4096 bytes
    #[default]
    #[value(name = "4k")]
    #[serde(rename = "4k")]
    Kib4,
    /// 16384 bytes
    #[value(name = "16k")]
    #[serde(rename = "16k")]
    Kib16,
    /// 65536 bytes
    #[value(name = "64k")]
    #[serde(rename = "64k")]
    Kib64,
}

impl PageSize {
    /// Returns whether this is the size of most kernels.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the page size in the flags of an arm64 image; `None` if the image does not state it
    /// (`Documentation/arch/arm64/booting.rst`, 4: bits 1 and 2).
    pub const fn of_image_flags(flags: u64) -> Option<Self> {
        match flags >> 1 & 3 {
            1 => Some(Self::Kib4),
            2 => Some(Self::Kib16),
            3 => Some(Self::Kib64),
            _ => None,
        }
    }

    /// Returns the page size that a configuration sets, whose later lines take precedence; `None` if
    /// it sets none.
    pub fn of_config(config: &str) -> Option<Self> {
        let is_set = |size: &Self| {
            let mut lines = config.lines().rev();
            let last = lines.find(|line| line.contains(size.symbol()));
            last.is_some_and(|line| line.trim_end() == format!("{}=y", size.symbol()))
        };
        // A fragment may set one symbol of the choice and leave that of 4K set.
        [Self::Kib16, Self::Kib64, Self::Kib4].into_iter().find(is_set)
    }

    /// Refuses a backing that a host with this page size lacks; `option` is the option that set it.
    pub(crate) fn check(self, backing: Backing, option: &str) -> Result<(), LabError> {
        if self.has(backing) {
            return Ok(());
        }
        Err(LabError::Unusable(format!(
            "a host with base pages of {} has no pages for {option} {backing}; expected one of: {}",
            self.base(),
            self.backing_names()
        )))
    }

    /// Returns the size of a level-2 block: that of transparent huge pages, and the default size of
    /// hugetlb pages.
    pub const fn huge_page(self) -> Bytes {
        match self {
            Self::Kib4 => Bytes::mib(2),
            Self::Kib16 => Bytes::mib(32),
            Self::Kib64 => Bytes::mib(512),
        }
    }

    /// Returns the sizes of hugetlb pages: blocks, and contiguous pages or blocks
    /// (`Documentation/arch/arm64/hugetlbpage.rst`).
    const fn hugetlb_pages(self) -> &'static [Bytes] {
        const OF_4K: &[Bytes] = &[Bytes::kib(64), Bytes::mib(2), Bytes::mib(32), Bytes::gib(1)];
        const OF_16K: &[Bytes] = &[Bytes::mib(2), Bytes::mib(32), Bytes::gib(1)];
        const OF_64K: &[Bytes] = &[Bytes::mib(2), Bytes::mib(512), Bytes::gib(16)];
        match self {
            Self::Kib4 => OF_4K,
            Self::Kib16 => OF_16K,
            Self::Kib64 => OF_64K,
        }
    }

    /// Returns the size of the pages of a backing, of which the memory must be a multiple.
    pub fn of_backing(self, backing: Backing) -> Bytes {
        match backing {
            Backing::Anonymous | Backing::Shmem => self.base(),
            Backing::AnonymousThp | Backing::AnonymousHugetlb(None) | Backing::SharedHugetlb => {
                self.huge_page()
            }
            Backing::AnonymousHugetlb(Some(size)) | Backing::AnonymousMthp(size) => size,
        }
    }

    /// Returns the backings that are measured by default: base pages, transparent huge pages, and
    /// hugetlb pages of a block and, if they exist, of 1G.
    pub fn default_backings(self) -> Vec<Backing> {
        let hugetlb = |size| Backing::AnonymousHugetlb(Some(size));
        let mut backings =
            vec![Backing::Anonymous, Backing::AnonymousThp, hugetlb(self.huge_page())];
        backings.extend([hugetlb(Bytes::gib(1))].into_iter().filter(|last| self.has(*last)));
        backings
    }

    /// Returns whether a host with this page size has the pages of a backing.
    pub fn has(self, backing: Backing) -> bool {
        match backing {
            Backing::AnonymousHugetlb(Some(size)) => self.hugetlb_pages().contains(&size),
            _ => true,
        }
    }

    /// Returns the names of all backings of a host with this page size.
    pub fn backing_names(self) -> String {
        let sized = self.hugetlb_pages().iter().map(|size| Backing::AnonymousHugetlb(Some(*size)));
        let all = Backing::WITHOUT_SIZE.iter().copied().chain(sized);
        all.map(|backing| backing.to_string()).collect::<Vec<_>>().join(", ")
    }

    /// Returns the size in bytes.
    pub const fn base(self) -> Bytes {
        match self {
            Self::Kib4 => Bytes::kib(4),
            Self::Kib16 => Bytes::kib(16),
            Self::Kib64 => Bytes::kib(64),
        }
    }

    /// Returns the configuration symbol of this page size.
    pub const fn symbol(self) -> &'static str {
        match self {
            Self::Kib4 => "CONFIG_ARM64_4K_PAGES",
            Self::Kib16 => "CONFIG_ARM64_16K_PAGES",
            Self::Kib64 => "CONFIG_ARM64_64K_PAGES",
        }
    }

    /// Returns the configuration fragment of this page size.
    pub const fn fragment(self) -> &'static str {
        match self {
            Self::Kib4 => "CONFIG_ARM64_4K_PAGES=y",
            Self::Kib16 => "# CONFIG_ARM64_4K_PAGES is not set\nCONFIG_ARM64_16K_PAGES=y",
            Self::Kib64 => "# CONFIG_ARM64_4K_PAGES is not set\nCONFIG_ARM64_64K_PAGES=y",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_backings_are_those_of_the_page_size() {
        for (page_size, expected) in [
            (PageSize::Kib4, "anonymous_hugetlb_2mb anonymous_hugetlb_1gb"),
            (PageSize::Kib16, "anonymous_hugetlb_32mb anonymous_hugetlb_1gb"),
            (PageSize::Kib64, "anonymous_hugetlb_512mb"),
        ] {
            let backings = page_size.default_backings();

            let names: Vec<String> = backings.iter().map(Backing::to_string).collect();
            assert_eq!(names.join(" "), format!("anonymous anonymous_thp {expected}"));
            assert!(backings.iter().all(|backing| page_size.has(*backing)));
        }
        assert!(!PageSize::Kib64.has("1g".parse().unwrap()));
        assert!(
            PageSize::Kib64
                .backing_names()
                .ends_with("_2mb, anonymous_hugetlb_512mb, anonymous_hugetlb_16gb")
        );
    }

    #[test]
    fn the_page_size_of_a_configuration_is_that_of_its_last_lines() {
        let lab = PageSize::Kib4.fragment();

        for size in [PageSize::Kib4, PageSize::Kib16, PageSize::Kib64] {
            let both = format!("{lab}\n{}\n", size.fragment());
            assert_eq!(PageSize::of_config(&both), Some(size));
        }
        let without_4k = format!("{lab}\nCONFIG_ARM64_64K_PAGES=y\n");
        assert_eq!(PageSize::of_config(&without_4k), Some(PageSize::Kib64));
        assert_eq!(PageSize::of_config("CONFIG_SMP=y\n"), None);
    }

    #[test]
    fn the_page_size_is_read_from_the_flags_of_an_image() {
        let sizes = [0b000, 0b010, 0b1100, 0b1110].map(PageSize::of_image_flags);

        assert_eq!(
            sizes,
            [None, Some(PageSize::Kib4), Some(PageSize::Kib16), Some(PageSize::Kib64)]
        );
    }
}
