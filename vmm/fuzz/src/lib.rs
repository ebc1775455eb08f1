// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Fuzz targets: functions that process untrusted input of `granule run`.
//!
//! A [`FuzzTarget`] takes any bytes; it must not panic, hang, or violate an invariant it checks.
//! `scripts/fuzz` runs it on libFuzzer, `tests/corpus.rs` on its corpus and mutations of it;
//! `docs/fuzzing.md` describes both.
//!
//! The device targets run without worker threads, so that an input always has the same effect.

mod bus;
mod changes;
mod devices;
mod guest;
mod order;
mod snapshot;
mod userfaults;

use std::io::Cursor;

use granule_types::units::Bytes;
use granule_vmm::{
    arch::aarch64::boot::{BootLayout, image::Image},
    vm::api_request::parse,
};

/// Fuzz target.
#[derive(Debug, Clone, Copy)]
pub struct FuzzTarget {
    /// Name of the target and of its corpus.
    pub name: &'static str,
    /// Processes an input.
    pub run: fn(&[u8]),
}

/// Targets by name.
pub const TARGETS: &[FuzzTarget] = &[
    FuzzTarget { name: "image", run: load_image },
    FuzzTarget { name: "block", run: devices::block },
    FuzzTarget { name: "net", run: devices::net },
    FuzzTarget { name: "entropy", run: devices::entropy },
    FuzzTarget { name: "console", run: devices::console },
    FuzzTarget { name: "balloon", run: devices::balloon },
    FuzzTarget { name: "bus", run: bus::run },
    FuzzTarget { name: "api", run: parse_api_request },
    FuzzTarget { name: "snapshot", run: snapshot::run },
    FuzzTarget { name: "order", run: order::run },
    FuzzTarget { name: "changes", run: changes::run },
    FuzzTarget { name: "userfaults", run: userfaults::run },
];

/// Maximum size of an unpacked image, below the loader's limit so that runs are fast.
const MAX_IMAGE_SIZE: Bytes = Bytes::mib(1);

/// Maximum size of a request, plus one read.
const MAX_REQUEST_SIZE: usize = (8 << 10) + 1024;

/// Loads a kernel image, with a limit on its unpacked size.
fn load_image(data: &[u8]) {
    let Ok(image) = Image::with_limit(Cursor::new(data), MAX_IMAGE_SIZE) else {
        return;
    };
    let mut length = data.len() as u64;
    if let Some(payload) = &image.payload {
        length = 0;
        // A stream may be damaged behind its header.
        let _ = payload.write(Cursor::new(data), image.size, |offset, bytes| {
            assert_eq!(offset, length);
            length += bytes.len() as u64;
            Ok(())
        });
    }
    assert!(image.size.0 >= length);
    assert!(image.size <= MAX_IMAGE_SIZE && image.text_offset <= MAX_IMAGE_SIZE);
    for memory in [Bytes(4096), Bytes::mib(3), Bytes::mib(128)] {
        let Ok(layout) = BootLayout::new(&image, Some(Bytes(data.len() as u64)), memory) else {
            continue;
        };
        let end = granule_vmm::arch::MEMORY_START.0 + memory.0;
        assert!(layout.kernel.0 + image.size.0 <= end);
        assert!(layout.initrd.is_some_and(|initrd| initrd.end.0 <= end));
    }
}

/// Parses a request and its prefixes, because a client may send it in parts. The result must not
/// depend on the parts, and the parser must not wait for more than 8K.
fn parse_api_request(data: &[u8]) {
    let complete = parse(data);
    if data.len() >= MAX_REQUEST_SIZE {
        assert_ne!(complete, Ok(None));
    }
    // The step is one byte for a short request and more for a long one.
    for end in (0..data.len()).step_by(1 + data.len() / 256) {
        match parse(&data[..end]) {
            Ok(None) => {}
            // The parser ignores bytes after a complete request.
            early @ Ok(Some(_)) => assert_eq!(early, complete),
            Err((status, _)) => assert!((400..500).contains(&status)),
        }
    }
}
