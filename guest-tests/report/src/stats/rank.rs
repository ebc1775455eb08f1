// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ranks. Values that are equal share the middle of their ranks.

/// Ranks from 1, doubled so that they are whole, and how large each group of equals is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranks {
    /// Twice the rank of each value, in the order of the values.
    pub doubled: Vec<u64>,
    /// The sizes of groups of equal values, from 2 on.
    pub ties: Vec<u64>,
}

impl Ranks {
    /// Ranks some values.
    pub fn of(values: &[f64]) -> Self {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_unstable_by(|&a, &b| values[a].total_cmp(&values[b]));
        let mut doubled = vec![0; values.len()];
        let mut ties = Vec::new();
        let mut start = 0;
        while start < order.len() {
            let value = values[order[start]];
            let equals = order[start..].iter().take_while(|&&at| values[at] == value);
            // A value that equals nothing, not even itself, is a group of its own.
            let end = start + equals.count().max(1);
            for &at in &order[start..end] {
                doubled[at] = (start + 1 + end) as u64;
            }
            if end - start > 1 {
                ties.push((end - start) as u64);
            }
            start = end;
        }
        Self { doubled, ties }
    }

    /// The sum of t³ − t over groups of t equals, by which variances are corrected.
    pub fn tie_term(&self) -> f64 {
        let term = |t: f64| t * t * t - t;
        self.ties.iter().map(|&t| term(t as f64)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_share_the_middle_rank() {
        let ranks = Ranks::of(&[5.0, 1.0, 5.0, 9.0, 5.0]);
        assert_eq!(ranks.doubled, [6, 2, 6, 10, 6]);
        assert_eq!(ranks.ties, [3]);
        assert_eq!(ranks.tie_term(), 24.0);
    }

    #[test]
    fn without_ties_ranks_are_positions() {
        let ranks = Ranks::of(&[0.3, 0.1, 0.2]);
        assert_eq!(ranks.doubled, [6, 2, 4]);
        assert!(ranks.ties.is_empty());
    }
}
