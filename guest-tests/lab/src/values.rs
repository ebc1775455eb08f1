// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Values on the command line that select a kernel: version, revisions, build settings, page size.

use std::{fmt, str::FromStr};

use clap::ValueEnum;
use granule_types::{backing::Backing, units::Bytes};
use serde::{Deserialize, Serialize};

use crate::error::LabError;

/// Linux version without its sublevel: `5.10`. It is also the name of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct LinuxVersion {
    /// `VERSION` of the Makefile.
    pub major: u32,
    /// `PATCHLEVEL` of the Makefile.
    pub minor: u32,
}

impl LinuxVersion {
    /// Oldest version that the lab supports: the first with the stage-2 code of this test.
    pub const OLDEST: Self = Self { major: 5, minor: 10 };

    /// Returns the version that a top Makefile contains.
    pub fn of_makefile(makefile: &str) -> Option<Self> {
        let number = |name: &str| {
            let mut lines = makefile.lines();
            let value = lines.find_map(|line| line.strip_prefix(name)?.trim().strip_prefix('='));
            value?.trim().parse().ok()
        };
        Some(Self { major: number("VERSION")?, minor: number("PATCHLEVEL")? })
    }
}

impl fmt::Display for LinuxVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl FromStr for LinuxVersion {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| {
            let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| text.parse().ok()).flatten()
        };
        let parsed = text
            .split_once('.')
            .and_then(|(major, minor)| Some(Self { major: number(major)?, minor: number(minor)? }));
        parsed.ok_or_else(|| {
            "expected a version of Debian's linux-source, such as 5.10; for any other kernel set \
             --git TREE REVISION or --source TREE"
                .to_owned()
        })
    }
}

/// Revisions on the command line: `REVISION`, or `BEFORE..AFTER`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Revisions {
    /// One revision.
    One(String),
    /// Both ends; an omitted end is `HEAD`.
    Range {
        /// Revision before.
        before: String,
        /// Revision after.
        after: String,
    },
}

impl FromStr for Revisions {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let end = |text: &str| if text.is_empty() { "HEAD" } else { text }.to_owned();
        match text.split_once("..") {
            _ if text.is_empty() || text == ".." || text.starts_with('-') => {
                Err("expected a revision, or BEFORE..AFTER".to_owned())
            }
            Some((_, after)) if after.starts_with('.') || after.contains("..") => {
                Err("a symmetric difference has no direction: expected BEFORE..AFTER".to_owned())
            }
            Some((before, after)) => Ok(Self::Range { before: end(before), after: end(after) }),
            None => Ok(Self::One(text.to_owned())),
        }
    }
}

impl fmt::Display for Revisions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(revision) => f.write_str(revision),
            Self::Range { before, after } => write!(f, "{before}..{after}"),
        }
    }
}

/// Variable of `make` and its value: `LLVM=1`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct MakeVariable {
    /// Name of the variable.
    pub name: String,
    /// Value of the variable; may be empty.
    pub value: String,
}

impl FromStr for MakeVariable {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const RESERVED: [&str; 4] = ["ARCH", "O", "KBUILD_OUTPUT", "CROSS_COMPILE"];
        let is_name = |name: &str| {
            name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
                && name.starts_with(|first: char| first.is_ascii_alphabetic())
        };
        match text.split_once('=') {
            Some((name, _)) if RESERVED.contains(&name) => {
                Err(format!("the lab sets {name} itself"))
            }
            Some((name, value)) if is_name(name) => {
                Ok(Self { name: name.to_owned(), value: value.to_owned() })
            }
            _ => Err("expected VARIABLE=VALUE, such as LLVM=1 or KCFLAGS=-fno-inline".to_owned()),
        }
    }
}

impl fmt::Display for MakeVariable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.value)
    }
}

/// Setting of a build: a configuration symbol or a variable of `make`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum BuildSetting {
    /// Line of a configuration fragment.
    Config(String),
    /// Variable of `make`.
    Make(MakeVariable),
}

impl FromStr for BuildSetting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !text.starts_with("CONFIG_") {
            return text.parse().map(Self::Make);
        }
        match text.split_once('=') {
            Some((symbol, "n")) => Ok(Self::Config(format!("# {symbol} is not set"))),
            Some((_, value)) if !value.is_empty() => Ok(Self::Config(text.to_owned())),
            _ => Err("expected CONFIG_SYMBOL=VALUE, such as CONFIG_PREEMPT=y".to_owned()),
        }
    }
}

impl fmt::Display for BuildSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unset = |line: &str| {
            Some(line.strip_prefix("# ")?.strip_suffix(" is not set")?.to_owned() + "=n")
        };
        match self {
            Self::Config(line) => f.write_str(&unset(line).unwrap_or_else(|| line.clone())),
            Self::Make(variable) => variable.fmt(f),
        }
    }
}

/// Values in the JSON of a plan are those of the command line.
macro_rules! serialize_as_on_the_command_line {
    ($($type:ty),*) => {$(
        impl From<$type> for String {
            fn from(value: $type) -> Self {
                value.to_string()
            }
        }

        impl TryFrom<String> for $type {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                text.parse()
            }
        }
    )*};
}

serialize_as_on_the_command_line!(LinuxVersion, Revisions, MakeVariable, BuildSetting);

/// Parses a setting of `--variant`; the text names the kernel.
pub fn parse_variant(text: &str) -> Result<(String, BuildSetting), String> {
    Ok((text.to_owned(), text.parse()?))
}

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

    #[test]
    fn a_version_is_read_from_a_makefile() {
        let makefile = "# SPDX\nVERSION = 6\nPATCHLEVEL = 12\nSUBLEVEL = 0\nEXTRAVERSION = -rc2\n";

        let version = LinuxVersion::of_makefile(makefile).unwrap();

        assert_eq!(version.to_string(), "6.12");
        assert_eq!(LinuxVersion::of_makefile("all:\n"), None);
    }

    #[test]
    fn versions_are_ordered_by_number() {
        let version = |text: &str| text.parse::<LinuxVersion>().unwrap();

        assert!(version("5.10") > version("5.9") && version("6.1") < version("6.12"));
    }

    #[test]
    fn another_name_of_a_kernel_is_refused_with_the_option_for_it() {
        for text in ["mainline", "7.3-rc2", "7", "7.3.1", "+5.10", ""] {
            let error = text.parse::<LinuxVersion>().unwrap_err();

            assert!(error.contains("--git TREE"), "{text}: {error}");
        }
    }

    #[test]
    fn a_range_has_two_ends() {
        let range = |before: &str, after: &str| {
            Ok(Revisions::Range { before: before.to_owned(), after: after.to_owned() })
        };

        assert_eq!("v6.1..topic".parse(), range("v6.1", "topic"));
        assert_eq!("HEAD~3..".parse(), range("HEAD~3", "HEAD"));
        assert_eq!("v6.12".parse(), Ok(Revisions::One("v6.12".to_owned())));
        for text in ["a...b", "", "..", "-x", "a..b..c"] {
            assert!(text.parse::<Revisions>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_make_variable_has_a_name_that_the_lab_does_not_set() {
        let llvm: MakeVariable = "LLVM=1".parse().unwrap();

        assert_eq!(llvm, MakeVariable { name: "LLVM".to_owned(), value: "1".to_owned() });
        for text in ["LLVM", "=1", "ARCH=x86", "a b=1"] {
            assert!(text.parse::<MakeVariable>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_json_of_values_is_their_text_on_the_command_line() {
        fn round_trip<T>(text: &str) -> String
        where
            T: FromStr<Err = String> + Serialize + serde::de::DeserializeOwned,
        {
            let json = serde_json::to_value(text.parse::<T>().unwrap()).unwrap();
            let again: T = serde_json::from_value(json).unwrap();
            serde_json::to_value(again).unwrap().as_str().unwrap().to_owned()
        }

        let texts = [
            round_trip::<LinuxVersion>("5.10"),
            round_trip::<Revisions>("v6.1..topic"),
            round_trip::<Revisions>("v6.1"),
            round_trip::<MakeVariable>("KCFLAGS=-O1 -g"),
            round_trip::<BuildSetting>("CONFIG_SMP=n"),
            round_trip::<BuildSetting>("LLVM=1"),
        ];

        let expected = ["5.10", "v6.1..topic", "v6.1", "KCFLAGS=-O1 -g", "CONFIG_SMP=n", "LLVM=1"];
        assert_eq!(texts, expected);
        assert_eq!(serde_json::to_value(PageSize::Kib16).unwrap(), "16k");
    }

    #[test]
    fn a_setting_is_a_symbol_or_a_variable() {
        let setting = |text: &str| text.parse::<BuildSetting>();

        assert_eq!(
            setting("CONFIG_SMP=n"),
            Ok(BuildSetting::Config("# CONFIG_SMP is not set".into()))
        );
        assert!(matches!(setting("LLVM=1"), Ok(BuildSetting::Make(_))));
        assert!(setting("CONFIG_SMP").is_err() && setting("x").is_err());
    }
}
