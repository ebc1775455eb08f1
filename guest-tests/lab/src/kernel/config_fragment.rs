// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Configuration fragments: symbols whose value in a kernel differs from the requested one.

use std::collections::BTreeMap;

/// Symbols without which the host cannot boot, test or report. Others may be unknown to a version.
const REQUIRED: [&str; 14] = [
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

/// A symbol whose value differs from the requested one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    pub symbol: String,
    pub requested: String,
    pub actual: String,
    /// The lab requires the symbol.
    pub required: bool,
}

/// Returns the symbols whose value differs between fragments (later ones override) and `config`.
pub fn mismatches<'a>(fragments: impl IntoIterator<Item = &'a str>, config: &str) -> Vec<Mismatch> {
    let mut requested = BTreeMap::new();
    for fragment in fragments {
        requested.extend(settings(fragment));
    }
    let actual = settings(config);
    requested
        .into_iter()
        .filter_map(|(symbol, requested)| {
            let actual = actual.get(symbol).copied().unwrap_or("n");
            (actual != requested).then(|| Mismatch {
                symbol: symbol.to_owned(),
                requested: requested.to_owned(),
                actual: actual.to_owned(),
                required: REQUIRED.contains(&symbol),
            })
        })
        .collect()
}

/// Parses `CONFIG_X=value` and `# CONFIG_X is not set` (`n`).
fn settings(text: &str) -> BTreeMap<&str, &str> {
    text.lines()
        .filter_map(|line| match line.strip_prefix("# ") {
            Some(comment) => Some((comment.strip_suffix(" is not set")?, "n")),
            None => line.split_once('='),
        })
        .filter(|(symbol, _)| symbol.starts_with("CONFIG_"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_that_differ_from_the_fragments_are_found() {
        let lab = "# a remark\nCONFIG_KVM=y\nCONFIG_SMP=y\nCONFIG_NR_CPUS=128\nCONFIG_NEW=y\n";
        let debug = "# CONFIG_SMP is not set\n";
        let config = "CONFIG_NR_CPUS=64\nCONFIG_OTHER=y\n# CONFIG_KVM is not set\n";

        let mismatches = mismatches([lab, debug], config);

        let found: Vec<_> =
            mismatches.iter().map(|m| (m.symbol.as_str(), m.actual.as_str(), m.required)).collect();
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
