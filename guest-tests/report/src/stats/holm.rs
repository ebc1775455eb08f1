// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Holm's correction: of a whole table without a difference, at most 5% report any.

/// The corrected p of each p, in the order given: the least is multiplied by how many there are,
/// the next by one less, and none is less than one before it.
pub fn holm(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[a].total_cmp(&p[b]));
    let mut corrected = vec![1.0; p.len()];
    let mut greatest = 0.0_f64;
    for (done, at) in order.into_iter().enumerate() {
        let left = (p.len() - done) as f64;
        greatest = greatest.max((p[at] * left).min(1.0));
        corrected[at] = greatest;
    }
    corrected
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_steps_down() {
        let corrected = holm(&[0.01, 0.04, 0.03, 0.005]);
        for (found, wanted) in corrected.iter().zip([0.03, 0.06, 0.06, 0.02]) {
            assert!((found - wanted).abs() < 1e-12);
        }
        assert_eq!(holm(&[0.9, 0.8]), [1.0, 1.0]);
        assert!(holm(&[]).is_empty());
    }
}
