// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Descriptor chain: one request of the driver as a list of buffers in guest memory, first the
//! device-readable ones, then the device-writable ones (virtio 1.2, section 2.7.4.2).
//!
//! A chain is copied out of the queue and validated once: each buffer lies in guest memory, the
//! order is right, and no table is followed beyond its length. The guest cannot change the copy, so
//! that no later step validates it again.

use std::ops::Range;

use granule_types::units::GuestAddress;
use vm_memory::{Bytes as _, GuestMemoryBackend as _, GuestMemoryMmap};

use super::DeviceError;
use crate::memory::GuestMemory;

/// Maximum number of buffers in a chain: `IOV_MAX`, the maximum of one system call.
const MAX_BUFFERS: usize = 1024;

/// Direction of a buffer, from the view of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The device reads the buffer.
    Readable,
    /// The device writes the buffer.
    Writable,
}

/// Validated request of the driver.
#[derive(Debug)]
pub struct DescriptorChain {
    head: u16,
    buffers: Vec<(GuestAddress, usize)>,
    /// Number of device-readable buffers, which come first.
    readable: usize,
}

impl DescriptorChain {
    pub(super) fn parse(
        chain: virtio_queue::DescriptorChain<&GuestMemoryMmap>,
        memory: &GuestMemory,
    ) -> Result<Self, DeviceError> {
        let mut parsed = Self { head: chain.head_index(), buffers: Vec::new(), readable: 0 };
        // The iterator ends at an invalid link; only the flag of the last descriptor reveals it.
        let mut complete = false;
        for descriptor in chain {
            complete = !descriptor.has_next();
            let (address, length) = (descriptor.addr(), descriptor.len() as usize);
            if parsed.buffers.len() >= MAX_BUFFERS {
                return Err(DeviceError::Request("it has more than 1024 buffers"));
            }
            if !memory.map().check_range(address, length) {
                return Err(DeviceError::Request("a buffer is outside of guest memory"));
            }
            if !descriptor.is_write_only() {
                if parsed.readable < parsed.buffers.len() {
                    let problem = "a device-readable buffer follows a device-writable one";
                    return Err(DeviceError::Request(problem));
                }
                parsed.readable += 1;
            }
            parsed.buffers.push((address, length));
        }
        if !complete {
            return Err(DeviceError::Request("its descriptor chain is incomplete"));
        }
        Ok(parsed)
    }

    /// Returns the index of the first descriptor, which identifies the chain in the used ring.
    #[must_use]
    pub const fn head(&self) -> u16 {
        self.head
    }

    /// Returns the buffers of one direction: first byte and length.
    #[must_use]
    pub fn buffers(&self, direction: Direction) -> &[(GuestAddress, usize)] {
        match direction {
            Direction::Readable => &self.buffers[..self.readable],
            Direction::Writable => &self.buffers[self.readable..],
        }
    }

    /// Returns the number of bytes in all buffers of one direction, which is less than 4 GiB: the
    /// iterator of `virtio-queue` ends before.
    #[must_use]
    pub fn length(&self, direction: Direction) -> usize {
        let buffers = self.buffers(direction).iter();
        buffers.map(|(_, length)| length).sum()
    }

    /// Returns the ranges of guest memory behind `range`, which counts bytes through all buffers of
    /// one direction. The ranges end with the buffers.
    pub fn ranges(
        &self,
        direction: Direction,
        range: Range<usize>,
    ) -> impl Iterator<Item = (GuestAddress, usize)> + '_ {
        let (mut skip, mut left) = (range.start, range.len());
        self.buffers(direction).iter().filter_map(move |&(address, size)| {
            let skipped = skip.min(size);
            let taken = (size - skipped).min(left);
            skip -= skipped;
            left -= taken;
            (taken > 0).then(|| (GuestAddress(address.0 + skipped as u64), taken))
        })
    }

    /// Copies device-readable bytes from byte `offset` on and returns how many there were.
    pub fn read(&self, memory: &GuestMemory, offset: usize, data: &mut [u8]) -> usize {
        let mut done = 0;
        let range = offset..offset.saturating_add(data.len());
        for (address, length) in self.ranges(Direction::Readable, range) {
            let target = &mut data[done..done + length];
            if memory.map().read_slice(target, address).is_err() {
                break;
            }
            done += length;
        }
        done
    }

    /// Copies `data` to the device-writable buffers from byte `offset` on and returns how many
    /// bytes they had space for.
    pub fn write(&self, memory: &GuestMemory, offset: usize, data: &[u8]) -> usize {
        let mut done = 0;
        let range = offset..offset.saturating_add(data.len());
        for (address, length) in self.ranges(Direction::Writable, range) {
            let source = &data[done..done + length];
            if memory.map().write_slice(source, address).is_err() {
                break;
            }
            done += length;
        }
        done
    }
}
