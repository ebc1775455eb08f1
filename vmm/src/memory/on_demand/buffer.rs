// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory of a thread that fills others from there.

use std::slice;

use granule_types::units::GuestAddress;

use super::GuestRam;
use crate::memory::{MemoryError, mapping::Mapping};

/// Bytes to copy, and a huge page to move.
#[derive(Debug, Default)]
pub(super) struct Buffer {
    bytes: Vec<u8>,
    huge_page: Option<Mapping>,
}

impl Buffer {
    /// Returns `length` bytes.
    pub(super) fn bytes(&mut self, length: usize) -> &mut [u8] {
        self.bytes.resize(length, 0);
        &mut self.bytes
    }

    /// Returns the bytes of a page as those of `ram`, which is huge if the host has one.
    pub(super) fn huge_page(&mut self, ram: &GuestRam) -> Result<&mut [u8], MemoryError> {
        let page = match self.huge_page.take() {
            Some(page) => page,
            None => {
                let (plan, size) = (ram.plan(), ram.plan().page_size());
                Mapping::new(plan.clone(), size, GuestAddress(0), size, None)?
            }
        };
        let page = self.huge_page.insert(page);
        // SAFETY: the mapping has this length and is writable, and only this value uses it.
        Ok(unsafe { slice::from_raw_parts_mut(page.as_ptr(), page.len()) })
    }

    /// Drops what has not been moved of the huge page, so that the next one is huge again.
    pub(super) fn drop_huge_page(&mut self) {
        self.huge_page = None;
    }
}
