// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lists of parts of memory or of a file, in ascending order and without parts that touch.

use std::ops::Range;

/// Adds a part that starts at the end of the last one or later.
pub(super) fn push<T: PartialEq>(parts: &mut Vec<Range<T>>, part: Range<T>) {
    match parts.last_mut() {
        Some(last) if last.end == part.start => last.end = part.end,
        _ => parts.push(part),
    }
}

/// Sorts parts, and joins those that overlap or touch.
pub(super) fn join(mut parts: Vec<Range<u64>>) -> Vec<Range<u64>> {
    parts.sort_unstable_by_key(|part| part.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for part in parts {
        match joined.last_mut() {
            Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
            _ => joined.push(part),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_touch_are_one() {
        let mut parts = Vec::new();

        push(&mut parts, 0..4);
        push(&mut parts, 4..8);
        push(&mut parts, 9..12);

        assert_eq!(parts, [0..8, 9..12]);
        assert_eq!(join(vec![9..12, 2..8, 0..4, 8..9, 20..21]), [0..12, 20..21]);
    }
}
