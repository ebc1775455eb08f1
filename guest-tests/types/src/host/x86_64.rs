// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Properties of an x86_64 host.

use std::{collections::BTreeMap, fs};

/// Does nothing: the emulator plugin counts arm64 instructions only.
pub fn hint<const IMMEDIATE: u8>() {}

/// Returns no features: caches are coherent on this architecture.
pub fn cache_features() -> BTreeMap<String, u64> {
    BTreeMap::new()
}

/// Returns the CPU's name.
pub fn cpu_name() -> Option<String> {
    name_in_cpuinfo(&fs::read_to_string("/proc/cpuinfo").ok()?)
}

fn name_in_cpuinfo(text: &str) -> Option<String> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == "model name")
        .map(|(_, name)| name.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_name_is_the_model_name() {
        let text = "processor\t: 0\nmodel\t\t: 106\nmodel name\t: X 3000\n";

        assert_eq!(name_in_cpuinfo(text).as_deref(), Some("X 3000"));
        assert_eq!(name_in_cpuinfo(""), None);
    }
}
