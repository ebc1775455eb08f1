// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Random bytes of the host's kernel.

use rustix::rand::{GetRandomFlags, getrandom};

/// Returns random bytes, or `None` on a host whose random number generator is not initialised.
pub fn random_bytes<const N: usize>() -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let filled = getrandom(&mut bytes, GetRandomFlags::NONBLOCK).ok()?;
    (filled == N).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_calls_return_different_bytes() {
        assert_ne!(random_bytes::<16>().unwrap(), random_bytes::<16>().unwrap());
    }
}
