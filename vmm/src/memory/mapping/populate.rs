// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Population of a mapping by several threads.

use std::{io, thread};

use granule_types::units::Bytes;

use super::Mapping;
use crate::memory::MemoryError;

impl Mapping {
    /// Populates the memory for writing, each of `threads` threads a part of it. The memory must
    /// hold zeros: kernels before Linux 5.14 cannot populate it, and zeros are written instead.
    pub fn populate(&self, threads: usize) -> Result<(), MemoryError> {
        let page = usize::try_from(self.plan.page().0).unwrap_or(usize::MAX);
        let part = self.len.div_ceil(threads.max(1)).next_multiple_of(page);
        let populate = |offset| self.populate_part(offset, part.min(self.len - offset));
        let result = thread::scope(|scope| {
            let others: Vec<_> = (0..self.len)
                .step_by(part)
                .skip(1)
                .map(|offset| scope.spawn(move || populate(offset)))
                .collect();
            let first = populate(0);
            others.into_iter().fold(first, |result, thread| {
                let panicked = |_| Err(io::Error::other("a thread panicked"));
                result.and(thread.join().unwrap_or_else(panicked))
            })
        });
        result.map_err(|error| self.error("populating the memory (MADV_POPULATE_WRITE)", error))
    }

    fn populate_part(&self, offset: usize, len: usize) -> io::Result<()> {
        match self.madvise(offset, len, libc::MADV_POPULATE_WRITE) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                let page = match self.plan.is_hugetlb() {
                    true => self.plan.page(),
                    false => self.plan.base_page(),
                };
                self.write_zeros(offset, len, page);
                Ok(())
            }
            result => result,
        }
    }

    /// Writes a zero to every page of a part, without a read before: a read would map the zero page,
    /// and the write would split a huge zero page.
    fn write_zeros(&self, offset: usize, len: usize, page: Bytes) {
        let Ok(step) = usize::try_from(page.0) else {
            return;
        };
        for offset in (offset..offset + len).step_by(step) {
            let address = self.memory.cast::<u8>().wrapping_add(offset);
            // SAFETY: `offset` is less than the length of the mapping, which is writable.
            unsafe { address.write_volatile(0) };
        }
    }
}
