// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Spreads seeds: splitmix64.

/// One step of splitmix64: spreads every bit of the input over the whole output.
pub const fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix_is_splitmix() {
        // The first outputs of the reference implementation for the seed 1234567.
        let step = 0x9e37_79b9_7f4a_7c15_u64;
        assert_eq!(mix(1_234_567), 6_457_827_717_110_365_317);
        assert_eq!(
            mix(1_234_567_u64.wrapping_add(step)),
            3_203_168_211_198_807_973
        );
    }
}
