// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The digest of this program in the results that it writes, by which `granule compare` notes that
//! different builds made two results.

use std::{collections::BTreeMap, env, fs::File};

use granule_report::digest::sha256_of;
use granule_types::{host::FACTS_VARIABLE, record};

/// Returns the SHA-256 of this program for [`record::Record::programs`]; empty if the file cannot be
/// read, and in the lab, which records the digests itself: an emulated host would spend seconds.
pub fn programs() -> BTreeMap<String, String> {
    if env::var_os(FACTS_VARIABLE).is_some() {
        return BTreeMap::new();
    }
    // The link refers to the program even after it was rebuilt.
    let digest = File::open("/proc/self/exe").and_then(sha256_of);
    digest.into_iter().map(|digest| (record::GRANULE.to_owned(), digest)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_has_a_digest() {
        let programs = programs();

        let digest = &programs[record::GRANULE];
        assert_eq!((programs.len(), digest.len()), (1, 64));
        assert!(digest.bytes().all(|byte| byte.is_ascii_hexdigit()));
    }
}
