// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Fuzz targets: what reaches `granule run` from outside, said at random.
//!
//! A [`Target`] takes any bytes and must neither panic, nor hang, nor break a rule it checks. Three
//! things feed it:
//!
//! * `scripts/fuzz`: libFuzzer's engine, which looks for bytes that reach code not reached before.
//!   What it found is in `corpus/TARGET`, made small by its set-cover merge;
//! * `tests/corpus.rs`, with every `cargo test`: that corpus again, and changes of it from a fixed
//!   seed for a few seconds;
//! * a finding's file, by `scripts/fuzz TARGET FILE`, until it is mended; then it goes into the corpus.
//!
//! The devices are driven here without their threads, so that the same bytes do the same again.

mod api;
pub mod bus;
mod devices;
pub mod guest;
mod image;
mod tree;

/// One thing that is fuzzed.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name, which is that of its corpus.
    pub name: &'static str,
    /// What it is: one line.
    pub about: &'static str,
    /// Takes any bytes.
    pub run: fn(&[u8]),
}

/// All of them.
pub const TARGETS: &[Target] = &[
    Target {
        name: "image",
        about: "kernel images: Image, gzip, zboot",
        run: image::run,
    },
    Target {
        name: "tree",
        about: "device trees of any machine, read back",
        run: tree::run,
    },
    Target {
        name: "block",
        about: "requests to a disk",
        run: devices::block,
    },
    Target {
        name: "net",
        about: "packets to and from a network card",
        run: devices::net,
    },
    Target {
        name: "entropy",
        about: "requests for random numbers",
        run: devices::entropy,
    },
    Target {
        name: "console",
        about: "output and input of a virtio console",
        run: devices::console,
    },
    Target {
        name: "balloon",
        about: "pages given back, reports and statistics",
        run: devices::balloon,
    },
    Target {
        name: "bus",
        about: "loads and stores on every device's registers",
        run: bus::run,
    },
    Target {
        name: "api",
        about: "requests to the control socket",
        run: api::run,
    },
];

/// The target of this name.
#[must_use]
pub fn by_name(name: &str) -> Option<Target> {
    TARGETS.iter().copied().find(|target| target.name == name)
}
