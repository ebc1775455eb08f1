// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Target `api`: requests to the control socket. A client sends its bytes in parts: the parsed
//! request does not depend on the boundaries of the parts, and the parser never waits for more than
//! 8K.

use granule_vmm::vm::api_request::{ParseResult, parse};

/// Maximum size of a request, plus one read.
const MAX_SIZE: usize = (8 << 10) + 1024;

pub fn run(data: &[u8]) {
    let complete = parse(data);
    if data.len() >= MAX_SIZE {
        assert_ne!(complete, ParseResult::Incomplete);
    }
    for end in prefix_lengths(data.len()) {
        match parse(&data[..end]) {
            ParseResult::Incomplete => {}
            // The parser ignores bytes after a complete request.
            early @ ParseResult::Complete(_) => assert_eq!(early, complete),
            ParseResult::Rejected((status, _)) => assert!((400..500).contains(&status)),
        }
    }
}

/// Returns the lengths of prefixes: all of a short request, and some of a long one.
fn prefix_lengths(length: usize) -> impl Iterator<Item = usize> {
    (0..length).step_by(1 + length / 256)
}
