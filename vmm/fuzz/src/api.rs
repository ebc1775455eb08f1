// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Requests to the control socket. A client's bytes come in pieces: what a request is found to be
//! does not depend on where they are cut, and no more than 8K is ever waited for.

use granule_vmm::vm::api::{Parsed, parse};

/// The largest request and one read more.
const LARGEST: usize = (8 << 10) + 1024;

pub fn run(data: &[u8]) {
    let whole = parse(data);
    if data.len() >= LARGEST {
        assert_ne!(whole, Parsed::Part);
    }
    for end in cuts(data.len()) {
        match parse(&data[..end]) {
            Parsed::Part => {}
            // What stands behind a whole request is nobody's.
            early @ Parsed::Whole(_) => assert_eq!(early, whole),
            Parsed::Refused((status, _)) => assert!((400..500).contains(&status)),
        }
    }
}

/// Every cut of a short request, and some of a long one.
fn cuts(length: usize) -> impl Iterator<Item = usize> {
    (0..length).step_by(1 + length / 256)
}
