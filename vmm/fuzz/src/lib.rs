// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Fuzz targets: functions that process untrusted input of `granule run`.
//!
//! A [`Target`] takes any bytes and must not panic, hang, or violate an invariant that it checks.
//! `scripts/fuzz` runs it on libFuzzer, `tests/corpus.rs` on its corpus and mutations of it;
//! `docs/fuzzing.md` describes both.
//!
//! The device targets run without worker threads, so that an input always has the same effect.

mod bus;
mod devices;
mod guest;

use granule_types::units::Bytes;
use granule_vmm::{
    arch::aarch64::boot::{BootLayout, image::Image},
    vm::api_request::parse,
};

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
    Target { name: "image", run: image },
    Target { name: "block", run: devices::block },
    Target { name: "net", run: devices::net },
    Target { name: "entropy", run: devices::entropy },
    Target { name: "console", run: devices::console },
    Target { name: "balloon", run: devices::balloon },
    Target { name: "bus", run: bus::run },
    Target { name: "api", run: api },
];

/// Limit on the size of an unpacked image, smaller than the loader's own to keep runs fast.
const MAX_IMAGE: Bytes = Bytes::mib(1);

/// Maximum size of a request, plus one read.
const MAX_REQUEST: usize = (8 << 10) + 1024;

/// Loads an image. The loader refuses images that unpack to more than a limit.
fn image(data: &[u8]) {
    let Ok(image) = Image::with_limit(data.to_vec(), MAX_IMAGE) else {
        return;
    };
    assert!(image.size.0 >= image.bytes.len() as u64);
    assert!(image.size <= MAX_IMAGE && image.text_offset <= MAX_IMAGE);
    for memory in [Bytes(4096), Bytes::mib(3), Bytes::mib(128)] {
        let Ok(layout) = BootLayout::new(&image, Some(Bytes(data.len() as u64)), memory) else {
            continue;
        };
        let end = granule_vmm::arch::MEMORY.0 + memory.0;
        assert!(layout.kernel.0 + image.size.0 <= end);
        assert!(layout.initrd.is_some_and(|initrd| initrd.end.0 <= end));
    }
}

/// Parses a request, which a client may send in parts: the result does not depend on the boundaries
/// of the parts, and the parser never waits for more than 8K.
fn api(data: &[u8]) {
    let complete = parse(data);
    if data.len() >= MAX_REQUEST {
        assert_ne!(complete, Ok(None));
    }
    // All prefixes of a short request, and some of a long one.
    for end in (0..data.len()).step_by(1 + data.len() / 256) {
        match parse(&data[..end]) {
            Ok(None) => {}
            // The parser ignores bytes after a complete request.
            early @ Ok(Some(_)) => assert_eq!(early, complete),
            Err((status, _)) => assert!((400..500).contains(&status)),
        }
    }
}
