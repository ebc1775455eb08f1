// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Target `image`: kernel images. The loader refuses images that unpack to more than a limit; the
//! target uses a small limit to keep runs fast.

use granule_types::units::Bytes;
use granule_vmm::arch::aarch64::boot::{image::Image, layout::BootLayout};

const MAX_SIZE: Bytes = Bytes::mib(1);

pub fn run(data: &[u8]) {
    let Ok(image) = Image::with_limit(data.to_vec(), MAX_SIZE) else {
        return;
    };
    assert!(image.size.0 >= image.bytes.len() as u64);
    assert!(image.size <= MAX_SIZE && image.text_offset <= MAX_SIZE);
    for memory in [Bytes(4096), Bytes::mib(3), Bytes::mib(128)] {
        let Ok(layout) = BootLayout::new(&image, Some(Bytes(data.len() as u64)), memory) else {
            continue;
        };
        let end = granule_vmm::arch::layout::MEMORY.0 + memory.0;
        assert!(layout.kernel.0 + image.size.0 <= end);
        assert!(layout.initrd.is_some_and(|initrd| initrd.end.0 <= end));
    }
}
