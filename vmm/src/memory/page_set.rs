// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Set of pages of a region of guest memory, or of its image.

use std::ops::Range;

use super::parts;

/// Set of pages, with one bit for each, lowest first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PageSet(Vec<u64>);

impl PageSet {
    /// Adds the pages whose bits are set.
    pub fn add(&mut self, words: &[u64]) {
        if self.0.len() < words.len() {
            self.0.resize(words.len(), 0);
        }
        for (word, new) in self.0.iter_mut().zip(words) {
            *word |= new;
        }
    }

    /// Adds pages by their numbers.
    pub fn insert(&mut self, pages: Range<usize>) {
        if self.0.len() * 64 < pages.end {
            self.0.resize(pages.end.div_ceil(64), 0);
        }
        for page in pages {
            self.0[page / 64] |= 1 << (page % 64);
        }
    }

    /// Returns the parts of a region of `size` bytes that the pages cover, as offsets. Pages have
    /// `page` bytes; those that touch are one part.
    pub fn parts(&self, page: u64, size: u64) -> Vec<Range<u64>> {
        let mut parts: Vec<Range<u64>> = Vec::new();
        for (first, word) in (0..).step_by(64).zip(&self.0) {
            let mut rest = *word;
            while rest != 0 {
                let start = (first + u64::from(rest.trailing_zeros())) * page;
                rest &= rest - 1;
                if start < size {
                    parts::push(&mut parts, start..start + page);
                }
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_touch_are_one_part_and_those_beyond_the_region_are_none() {
        let mut pages = PageSet::default();

        pages.add(&[0b1011 | 1 << 63]);
        pages.add(&[0b100, 0b1001]);

        assert_eq!(pages.parts(4096, 67 * 4096), [0..4 * 4096, 63 * 4096..65 * 4096]);
        assert!(PageSet::default().parts(4096, 1 << 20).is_empty());
    }

    #[test]
    fn a_page_that_is_inserted_again_adds_nothing() {
        let mut pages = PageSet::default();

        for _ in 0..2 {
            pages.insert(62..66);
            pages.insert(3..4);
            pages.insert(0..0);
        }

        assert_eq!(pages, PageSet(vec![1 << 3 | 0b11 << 62, 0b11]));
    }
}
