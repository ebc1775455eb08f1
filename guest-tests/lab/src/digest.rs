// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SHA-256, as cache keys, records and the serial framing use it.

use sha2::{Digest, Sha256};

/// Returns the SHA-256 in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
