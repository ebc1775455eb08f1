// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One request of the driver's: a chain of buffers in guest memory, first those the device reads,
//! then those it writes (virtio 1.2, section 2.7.4.2).
//!
//! A chain is taken out of the ring whole and checked once: every buffer lies in guest memory, the
//! order is right, and no table is followed further than it is long. After that it is plain data
//! that the guest cannot change, so nothing has to be checked a second time.

use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};

use super::DeviceError;
use crate::memory::GuestMemory;

/// More buffers than a well-meaning driver puts into one request: as many as one call of the
/// host's takes (`IOV_MAX`).
const MOST_BUFFERS: usize = 1024;

/// Which buffers of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Those the device reads.
    Readable,
    /// Those the device writes.
    Writable,
}

/// A request.
#[derive(Debug)]
pub struct DescriptorChain {
    head: u16,
    buffers: Vec<(GuestAddress, usize)>,
    /// How many of the buffers are readable: these come first.
    readable: usize,
}

impl DescriptorChain {
    pub(super) fn parse(
        chain: virtio_queue::DescriptorChain<&GuestMemoryMmap>,
        memory: &GuestMemory,
    ) -> Result<Self, DeviceError> {
        let head = chain.head_index();
        let mut parsed = Self {
            head,
            buffers: Vec::new(),
            readable: 0,
        };
        // A chain that breaks off gives no further item: only the last item's flag shows it.
        let mut whole = false;
        for descriptor in chain {
            whole = !descriptor.has_next();
            let (address, length) = (descriptor.addr(), descriptor.len() as usize);
            if parsed.buffers.len() >= MOST_BUFFERS {
                return Err(DeviceError::Request("it has more than 1024 buffers"));
            }
            if !memory.map().check_range(address, length) {
                return Err(DeviceError::Request("a buffer lies outside memory"));
            }
            if !descriptor.is_write_only() {
                if parsed.readable < parsed.buffers.len() {
                    return Err(DeviceError::Request(
                        "a readable buffer follows a writable one",
                    ));
                }
                parsed.readable += 1;
            }
            parsed.buffers.push((address, length));
        }
        if !whole {
            return Err(DeviceError::Request("its chain of buffers breaks off"));
        }
        Ok(parsed)
    }

    /// By what the ring knows it.
    #[must_use]
    pub const fn head(&self) -> u16 {
        self.head
    }

    /// The buffers: first byte and length.
    #[must_use]
    pub fn buffers(&self, part: Direction) -> &[(GuestAddress, usize)] {
        match part {
            Direction::Readable => &self.buffers[..self.readable],
            Direction::Writable => &self.buffers[self.readable..],
        }
    }

    /// Bytes in all buffers of a part.
    #[must_use]
    pub fn length(&self, part: Direction) -> usize {
        // A chain has less than 4 GiB: the iterator of virtio-queue ends before.
        self.buffers(part).iter().map(|(_, length)| length).sum()
    }

    /// The pieces of memory that make up `length` bytes from `skip` on, or fewer where the buffers
    /// end.
    pub fn pieces(
        &self,
        part: Direction,
        skip: usize,
        length: usize,
    ) -> impl Iterator<Item = (GuestAddress, usize)> + '_ {
        let (mut skip, mut left) = (skip, length);
        self.buffers(part)
            .iter()
            .filter_map(move |&(address, size)| {
                let passed = skip.min(size);
                let taken = (size - passed).min(left);
                skip -= passed;
                left -= taken;
                (taken > 0).then(|| (GuestAddress(address.0 + passed as u64), taken))
            })
    }

    /// Copies from the readable buffers, from byte `skip` on. Says how many bytes there were.
    pub fn copy_out(&self, memory: &GuestMemory, skip: usize, data: &mut [u8]) -> usize {
        let mut done = 0;
        for (address, length) in self.pieces(Direction::Readable, skip, data.len()) {
            let place = &mut data[done..done + length];
            if memory.map().read_slice(place, address).is_err() {
                break;
            }
            done += length;
        }
        done
    }

    /// Copies to the writable buffers, from byte `skip` on. Says for how many bytes there was
    /// room.
    pub fn copy_in(&self, memory: &GuestMemory, skip: usize, data: &[u8]) -> usize {
        let mut done = 0;
        for (address, length) in self.pieces(Direction::Writable, skip, data.len()) {
            let source = &data[done..done + length];
            if memory.map().write_slice(source, address).is_err() {
                break;
            }
            done += length;
        }
        done
    }
}
