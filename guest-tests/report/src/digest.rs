// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SHA-256 of programs and inputs, in hexadecimal, as results and runs of the lab contain them.

use std::io::{self, Read};

use sha2::{Digest, Sha256};

/// Returns the SHA-256 of these bytes.
pub fn sha256(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

/// Returns the SHA-256 of what a reader has left.
///
/// # Errors
/// Reading fails.
pub fn sha256_of(mut reader: impl Read) -> io::Result<String> {
    let mut hasher = Sha256::new();
    io::copy(&mut reader, &mut hasher)?;
    Ok(hexadecimal(&hasher.finalize()))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_a_reader_have_the_same_digest() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

        assert_eq!(
            (sha256(b""), sha256_of(io::empty()).unwrap()),
            (empty.to_owned(), empty.to_owned())
        );
        assert_eq!(sha256_of(&b"granule"[..]).unwrap(), sha256(b"granule"));
    }
}
