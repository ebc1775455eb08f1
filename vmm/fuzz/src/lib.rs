// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Fuzz targets: functions that process untrusted input of `granule run`.
//!
//! A [`Target`] takes any bytes and must not panic, hang, or violate a rule that it checks. Three
//! programs run it:
//!
//! * `scripts/fuzz`: libFuzzer, which searches for inputs that reach further code. A minimal set of
//!   them is the corpus, one archive `corpus/TARGET.tar.gz` per target;
//! * `tests/corpus.rs`: each input of the corpus, and mutations of it from a fixed seed for a few
//!   seconds, as a part of `cargo test`;
//! * `scripts/fuzz TARGET FILE`: one input, to reproduce a finding. A fixed finding is added to the
//!   corpus.
//!
//! The device targets run without worker threads, so that an input always has the same effect.

mod bus;
mod devices;
mod fdt;
mod guest;
mod parsers;

/// Fuzz target.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Name of the target and of its corpus.
    pub name: &'static str,
    /// Processes an input.
    pub run: fn(&[u8]),
}

/// List of the targets.
pub const TARGETS: &[Target] = &[
    target("image", parsers::image),
    target("fdt", fdt::run),
    target("block", devices::block),
    target("net", devices::net),
    target("entropy", devices::entropy),
    target("console", devices::console),
    target("balloon", devices::balloon),
    target("bus", bus::run),
    target("api", parsers::api),
];

const fn target(name: &'static str, run: fn(&[u8])) -> Target {
    Target { name, run }
}
