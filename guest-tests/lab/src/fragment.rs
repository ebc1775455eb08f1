// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Configuration fragments: what they ask for, and what of it a kernel did not take.

use std::collections::BTreeMap;

/// Without these the lab's host cannot boot, test or report; other symbols may be unknown to a
/// version.
const NEEDED: [&str; 14] = [
    "CONFIG_KVM",
    "CONFIG_VIRTUALIZATION",
    "CONFIG_SMP",
    "CONFIG_ARM64_4K_PAGES",
    "CONFIG_BLK_DEV_INITRD",
    "CONFIG_BINFMT_ELF",
    "CONFIG_SERIAL_AMBA_PL011_CONSOLE",
    "CONFIG_PRINTK",
    "CONFIG_DEVTMPFS",
    "CONFIG_PROC_FS",
    "CONFIG_SYSFS",
    "CONFIG_TMPFS",
    "CONFIG_HUGETLBFS",
    "CONFIG_TRANSPARENT_HUGEPAGE",
];

/// A symbol that came out otherwise than asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The symbol.
    pub symbol: String,
    /// What was asked for: `y`, `n`, a number, a string.
    pub wanted: String,
    /// What it is.
    pub got: String,
    /// Whether the lab cannot do without.
    pub needed: bool,
}

/// What a configuration did not take of its fragments, later fragments overriding earlier ones.
pub fn refused<'a>(fragments: impl IntoIterator<Item = &'a str>, config: &str) -> Vec<Refused> {
    let mut wanted = BTreeMap::new();
    for fragment in fragments {
        wanted.extend(settings(fragment));
    }
    let got = settings(config);
    wanted
        .into_iter()
        .filter_map(|(symbol, wanted)| {
            let got = got.get(symbol).copied().unwrap_or("n");
            (got != wanted).then(|| Refused {
                symbol: symbol.to_owned(),
                wanted: wanted.to_owned(),
                got: got.to_owned(),
                needed: NEEDED.contains(&symbol),
            })
        })
        .collect()
}

/// `CONFIG_X=value`, and `# CONFIG_X is not set` for `n`.
fn settings(text: &str) -> BTreeMap<&str, &str> {
    text.lines()
        .filter_map(|line| match line.strip_prefix("# ") {
            Some(remark) => Some((remark.strip_suffix(" is not set")?, "n")),
            None => line.split_once('='),
        })
        .filter(|(symbol, _)| symbol.starts_with("CONFIG_"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_taken_is_found() {
        let lab = "# a remark\nCONFIG_KVM=y\nCONFIG_SMP=y\nCONFIG_NR_CPUS=128\nCONFIG_NEW=y\n";
        let debug = "# CONFIG_SMP is not set\n";
        let config = "CONFIG_NR_CPUS=64\nCONFIG_OTHER=y\n# CONFIG_KVM is not set\n";

        let refused = refused([lab, debug], config);

        let found: Vec<_> = refused
            .iter()
            .map(|r| (r.symbol.as_str(), r.got.as_str(), r.needed))
            .collect();
        assert_eq!(
            found,
            [
                ("CONFIG_KVM", "n", true),
                ("CONFIG_NEW", "n", false),
                ("CONFIG_NR_CPUS", "64", false),
            ]
        );
    }
}
