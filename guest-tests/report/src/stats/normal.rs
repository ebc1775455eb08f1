// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The standard normal distribution.

use std::f64::consts::SQRT_2;

use statrs::function::erf::{erfc, erfc_inv};

/// The share above `z`.
pub fn above(z: f64) -> f64 {
    0.5 * erfc(z / SQRT_2)
}

/// The value that a share lies above: the inverse of [`above`].
pub fn value_above(share: f64) -> f64 {
    SQRT_2 * erfc_inv(2.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_table_in_every_book() {
        for (z, share) in [(0.0, 0.5), (1.0, 0.158_655_253_9), (1.959_963_985, 0.025)] {
            assert!((above(z) - share).abs() < 1e-9);
            assert!((value_above(share) - z).abs() < 1e-8);
        }
    }
}
