// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Mutated inputs: whatever a file holds, reading it ends, and ends in samples or in an error.
//!
//! A mutation flips, drops, doubles or swaps bytes, lines or pieces of other inputs. The draws are
//! seeded. CI takes some thousands; a million takes about four minutes:
//!
//! ```sh
//! cargo test --release -p granule-report --lib fuzz -- --ignored
//! ```

use crate::{
    Comparison, Options,
    fixture::{patched, runs},
    input::{self, criterion},
    render,
};
use granule_types::seed::mix;

/// A stream of draws.
struct Draws(u64);

impl Draws {
    fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        usize::try_from(mix(self.0) % count.max(1) as u64).unwrap_or(0)
    }

    /// A piece of some bytes.
    fn piece<'a>(&mut self, of: &'a [u8]) -> &'a [u8] {
        let start = self.below(of.len() + 1);
        let end = start + self.below((of.len() - start).min(64) + 1);
        &of[start..end]
    }

    fn mutate(&mut self, bytes: &mut Vec<u8>, others: &[Vec<u8>]) {
        const WORDS: [&str; 18] = [
            "Testing guest mode: ",
            "Iteration 4294967295 dirty memory time: 0.000000001s\n",
            "KVM_CREATE_MAPPINGS: total execution time: 18446744073.709551615s\n",
            "Number of testing vCPUs: 99999999999\n",
            "\n",
            "\r\n",
            "\u{1b}[31m",
            "\u{1b}[",
            "\u{1b}]0;",
            "\u{1b}(B",
            "\u{7}",
            "granule: iteration 4294967295 of 4294967295\n",
            "0x",
            "-1",
            "Get dirty log over 0 iterations took ",
            "granule: iteration ",
            "1e999",
            "\u{feff}{",
        ];
        let at = self.below(bytes.len() + 1);
        match self.below(8) {
            0 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
            1 => bytes.truncate(at),
            2 => {
                let end = at + self.below((bytes.len() - at).min(200) + 1);
                bytes.drain(at..end);
            }
            3 => {
                let piece = self.piece(bytes).to_vec();
                bytes.splice(at..at, piece);
            }
            4 => {
                let other = self.below(others.len());
                let piece = self.piece(&others[other]).to_vec();
                bytes.splice(at..at, piece);
            }
            5 => {
                let word = WORDS[self.below(WORDS.len())];
                bytes.splice(at..at, word.bytes());
            }
            6 => {
                let mut lines: Vec<&[u8]> = bytes.split_inclusive(|&b| b == b'\n').collect();
                let (one, two) = (self.below(lines.len()), self.below(lines.len()));
                if !lines.is_empty() {
                    lines.swap(one, two);
                }
                *bytes = lines.concat();
            }
            _ => {
                let digit = bytes.iter().skip(at).position(u8::is_ascii_digit);
                if let Some(distance) = digit {
                    bytes[at + distance] = b"0123456789.s-"[self.below(13)];
                }
            }
        }
    }
}

fn inputs() -> Vec<Vec<u8>> {
    let records: String = patched(runs(&[1, 2], &[3, 4]))
        .iter()
        .map(|record| serde_json::to_string(record).unwrap() + "\n")
        .collect();
    let sample = r#"{"sampling_mode":"Linear","iters":[10.0,20.0],"times":[15.0,31.0]}"#;
    vec![
        include_bytes!("../golden/console.log").to_vec(),
        include_bytes!("../golden/perf.log").to_vec(),
        records.into_bytes(),
        sample.as_bytes().to_vec(),
    ]
}

/// Reads so many mutated inputs, and compares what could be read with itself.
fn read_mutated(seed: u64, count: usize) -> usize {
    let inputs = inputs();
    let mut draws = Draws(seed);
    let mut read = 0;
    for _ in 0..count {
        let mut bytes = inputs[draws.below(inputs.len())].clone();
        for _ in 0..=draws.below(4) {
            draws.mutate(&mut bytes, &inputs);
        }
        let text = String::from_utf8_lossy(&bytes);
        let _ = criterion::runs(&text);
        let _ = criterion::median(&text);
        let Ok(samples) = input::samples(&text) else {
            continue;
        };
        assert!(!samples.is_empty(), "neither samples nor an error:\n{text}");
        read += 1;
        if read % 64 == 0
            && let Ok(comparison) = Comparison::of(&samples, &samples, &Options::default())
        {
            assert_eq!(comparison.regressions().count(), 0);
            assert!(!render::text(&comparison).is_empty());
        }
    }
    read
}

#[test]
fn mutated_inputs_are_read_or_refused() {
    let read = read_mutated(1, 8_000);
    assert!(
        read > 100,
        "only {read} inputs survived: the mutations are too wild"
    );
}

#[test]
#[ignore = "a million inputs; see the head of this file for the command"]
fn a_million_mutated_inputs_are_read_or_refused() {
    read_mutated(2, 1_000_000);
}
