// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Mutated inputs: any text is read or refused, and what is read compares with itself.
//!
//! `PROPTEST_CASES=1000000 cargo test --release -p granule-report --lib fuzz` takes some minutes.

use std::cell::Cell;

use proptest::{
    prelude::*,
    sample::{Index, select},
    test_runner::TestRunner,
};

use crate::{
    Comparison, Options,
    fixture::{patched, runs},
    input::{self, criterion::Samples},
    render,
};

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

/// Change of an input at a place.
#[derive(Debug, Clone)]
enum Edit {
    FlipBit(u8),
    Truncate,
    Remove(usize),
    /// Inserts a piece of an input.
    Copy(usize, Index, usize),
    Insert(&'static str),
    SwapLines(Index),
    ReplaceDigit(u8),
}

fn edit() -> impl Strategy<Value = Edit> {
    prop_oneof![
        (0..8_u8).prop_map(Edit::FlipBit),
        Just(Edit::Truncate),
        (0..200_usize).prop_map(Edit::Remove),
        (0..4_usize, any::<Index>(), 0..64_usize).prop_map(|(a, b, c)| Edit::Copy(a, b, c)),
        select(&WORDS[..]).prop_map(Edit::Insert),
        any::<Index>().prop_map(Edit::SwapLines),
        select(&b"0123456789.s-"[..]).prop_map(Edit::ReplaceDigit),
    ]
}

fn apply(bytes: &mut Vec<u8>, at: Index, edit: &Edit, inputs: &[Vec<u8>]) {
    let at = at.index(bytes.len() + 1);
    match *edit {
        Edit::FlipBit(bit) => bytes.iter_mut().skip(at).take(1).for_each(|b| *b ^= 1 << bit),
        Edit::Truncate => bytes.truncate(at),
        Edit::Remove(count) => drop(bytes.drain(at..bytes.len().min(at + count))),
        Edit::Copy(from, start, count) => {
            let from = &inputs[from];
            let start = start.index(from.len());
            let piece = &from[start..from.len().min(start + count)];
            bytes.splice(at..at, piece.iter().copied());
        }
        Edit::Insert(word) => drop(bytes.splice(at..at, word.bytes())),
        Edit::SwapLines(other) => {
            let mut lines: Vec<&[u8]> = bytes.split_inclusive(|&b| b == b'\n').collect();
            if let Some(last) = lines.len().checked_sub(1) {
                lines.swap(at.min(last), other.index(last + 1));
            }
            *bytes = lines.concat();
        }
        Edit::ReplaceDigit(with) => {
            let digit = bytes.iter_mut().skip(at).find(|byte| byte.is_ascii_digit());
            digit.into_iter().for_each(|byte| *byte = with);
        }
    }
}

#[test]
fn mutated_inputs_are_read_or_refused() {
    let records = patched(runs(&[1, 2], &[3, 4]));
    let records = records.iter().map(|record| serde_json::to_string(record).unwrap() + "\n");
    let inputs = [
        include_bytes!("../golden/console.log").to_vec(),
        include_bytes!("../golden/perf.log").to_vec(),
        records.collect::<String>().into_bytes(),
        br#"{"sampling_mode":"Linear","iters":[10.0,20.0],"times":[15.0,31.0]}"#.to_vec(),
    ];
    let mut config = ProptestConfig::default();
    config.cases = config.cases.max(8_000);
    let edits = prop::collection::vec((any::<Index>(), edit()), 1..5);
    let read = Cell::new(0);
    let outcome = TestRunner::new(config).run(&(0..inputs.len(), edits), |(input, edits)| {
        let mut bytes = inputs[input].clone();
        for (at, edit) in &edits {
            apply(&mut bytes, *at, edit, &inputs);
        }
        let text = String::from_utf8_lossy(&bytes);
        let _ = serde_json::from_str::<Samples>(&text).map(|samples| samples.runs());
        let Ok(samples) = input::samples(&text) else {
            return Ok(());
        };
        prop_assert!(!samples.is_empty(), "neither samples nor an error");
        read.set(read.get() + 1);
        if read.get() % 64 == 0
            && let Ok(comparison) = Comparison::of(&samples, &samples, &Options::default())
        {
            prop_assert_eq!(comparison.regressions().count(), 0);
            prop_assert!(!render::text(&comparison).is_empty());
        }
        Ok(())
    });
    outcome.unwrap();
    assert!(read.get() > 100, "only {} inputs are readable: mutate less", read.get());
}
