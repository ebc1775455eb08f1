// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernel images. What unpacks to more than the limit is refused, so a small limit shows the same as
//! the real one and keeps runs fast.

use granule_types::units::Bytes;
use granule_vmm::arch::aarch64::boot::{image::Image, layout::BootLayout};

const MOST: Bytes = Bytes::mib(1);

pub fn run(data: &[u8]) {
    let Ok(image) = Image::within(data.to_vec(), MOST) else {
        return;
    };
    assert!(image.size.0 >= image.bytes.len() as u64);
    assert!(image.size <= MOST && image.text_offset <= MOST);
    for memory in [Bytes(4096), Bytes::mib(3), Bytes::mib(128)] {
        let Ok(places) = BootLayout::new(&image, Some(Bytes(data.len() as u64)), memory) else {
            continue;
        };
        let end = granule_vmm::vm::layout::MEMORY.0 + memory.0;
        assert!(places.kernel.0 + image.size.0 <= end);
        assert!(places.initrd.is_some_and(|initrd| initrd.end <= end));
    }
}
