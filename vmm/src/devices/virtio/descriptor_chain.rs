// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Descriptor chain: one request of the driver as a list of buffers in guest memory, first the
//! device-readable ones, then the device-writable ones (virtio 1.2, section 2.7.4.2).
//!
//! A chain is copied from the queue and validated once: each buffer lies in guest memory, readable
//! buffers come first, and no table is read beyond its length. The guest cannot change the copy, so
//! no later step validates it again.
//!
//! Vectored I/O transfers data between the buffers and a file descriptor, without a copy in this
//! process. Safe wrappers of other crates take slices, but Rust forbids slices of memory that a
//! guest changes concurrently.

use std::{
    io,
    ops::Range,
    os::fd::{AsFd, AsRawFd as _},
    sync::Arc,
};

use granule_types::units::{Bytes, GuestAddress};
use vm_memory::{Bytes as _, GuestMemoryBackend as _};

use super::DeviceError;
use crate::memory::{GuestMap, GuestMemory};

/// Maximum number of buffers in a chain and in one system call (`IOV_MAX`).
const MAX_BUFFERS: usize = 1024;

/// Direction of a buffer, from the view of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Buffer that the device reads.
    Readable,
    /// Buffer that the device writes.
    Writable,
}

/// Validated request of the driver.
#[derive(Debug)]
pub struct DescriptorChain {
    /// Guest memory that holds the buffers.
    pub memory: Arc<GuestMemory>,
    /// Index of the first descriptor, which identifies the chain in the used ring.
    pub head_index: u16,
    buffers: Vec<(GuestAddress, usize)>,
    /// Number of device-readable buffers, which come first.
    readable_count: usize,
}

impl DescriptorChain {
    pub fn parse(
        chain: virtio_queue::DescriptorChain<&GuestMap>,
        memory: &Arc<GuestMemory>,
    ) -> Result<Self, DeviceError> {
        let mut parsed = Self {
            memory: Arc::clone(memory),
            head_index: chain.head_index(),
            buffers: Vec::new(),
            readable_count: 0,
        };
        // The iterator also ends at an invalid link; only the last descriptor's flag reveals it.
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
                if parsed.readable_count < parsed.buffers.len() {
                    let problem = "a device-readable buffer follows a device-writable one";
                    return Err(DeviceError::Request(problem));
                }
                parsed.readable_count += 1;
            }
            parsed.buffers.push((address, length));
        }
        if !complete {
            return Err(DeviceError::Request("its descriptor chain is incomplete"));
        }
        // Devices write no buffers but those of a chain. The worker takes the chain and writes to it
        // between two snapshots, because it is stopped while one is taken: it has then completed the
        // chain, or returned it to the queue and parses it again. The mark is therefore in the log of
        // the snapshot that the writes are in.
        for &(start, length) in parsed.buffers(Direction::Writable) {
            memory.mark_device_write(start, Bytes(length as u64));
        }
        Ok(parsed)
    }

    /// Returns the buffers of one direction, each `(start, length)`.
    pub fn buffers(&self, direction: Direction) -> &[(GuestAddress, usize)] {
        match direction {
            Direction::Readable => &self.buffers[..self.readable_count],
            Direction::Writable => &self.buffers[self.readable_count..],
        }
    }

    /// Returns the total length of the buffers of one direction, in bytes. It is less than 4 GiB,
    /// the limit that the iterator of `virtio-queue` enforces.
    pub fn length(&self, direction: Direction) -> usize {
        let buffers = self.buffers(direction).iter();
        buffers.map(|(_, length)| length).sum()
    }

    /// Returns the guest memory ranges of up to `length` bytes at `offset` in the buffers of one
    /// direction.
    fn memory_ranges(
        &self,
        direction: Direction,
        mut offset: usize,
        mut length: usize,
    ) -> impl Iterator<Item = (GuestAddress, usize)> + '_ {
        self.buffers(direction).iter().filter_map(move |&(address, size)| {
            let skipped = offset.min(size);
            let taken = (size - skipped).min(length);
            offset -= skipped;
            length -= taken;
            (taken > 0).then(|| (GuestAddress(address.0 + skipped as u64), taken))
        })
    }

    /// Copies device-readable bytes at `offset` to `data` and returns the number of bytes copied.
    pub fn read(&self, offset: usize, data: &mut [u8]) -> usize {
        let mut transferred = 0;
        for (address, length) in self.memory_ranges(Direction::Readable, offset, data.len()) {
            let target = &mut data[transferred..transferred + length];
            if self.memory.map().read_slice(target, address).is_err() {
                break;
            }
            transferred += length;
        }
        transferred
    }

    /// Copies `data` to the device-writable buffers at `offset` and returns the number of bytes
    /// copied.
    pub fn write(&self, offset: usize, data: &[u8]) -> usize {
        let mut transferred = 0;
        for (address, length) in self.memory_ranges(Direction::Writable, offset, data.len()) {
            let source = &data[transferred..transferred + length];
            if self.memory.map().write_slice(source, address).is_err() {
                break;
            }
            transferred += length;
        }
        transferred
    }

    /// Transfers `range` of the buffers of one direction from or to the file at `offset`.
    pub fn transfer(
        &self,
        file: &impl AsFd,
        offset: u64,
        direction: Direction,
        range: Range<usize>,
    ) -> io::Result<()> {
        let fd = file.as_fd().as_raw_fd();
        let mut transferred = 0;
        while transferred < range.len() {
            let (iovecs, count) =
                self.iovecs(direction, range.start + transferred, range.len() - transferred)?;
            let position = offset.checked_add(transferred as u64).and_then(|at| at.try_into().ok());
            let position = position.ok_or(io::ErrorKind::InvalidInput)?;
            let call = match direction {
                Direction::Writable => libc::preadv,
                Direction::Readable => libc::pwritev,
            };
            // SAFETY: each buffer is guest memory, mapped and writable as long as `memory` exists.
            // The guest may access it concurrently; this process holds no references to it.
            let result = unsafe { call(fd, iovecs.as_ptr(), count, position) };
            match call_result(result) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => transferred += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Writes all device-readable buffers to `target` as one packet.
    ///
    /// # Errors
    /// The call fails, or the packet has too many parts for one call.
    pub fn write_packet(&self, target: &impl AsFd) -> io::Result<usize> {
        let (iovecs, count) = self.iovecs(Direction::Readable, 0, usize::MAX)?;
        let size: usize = iovecs.iter().map(|part| part.iov_len).sum();
        if size < self.length(Direction::Readable) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let fd = target.as_fd().as_raw_fd();
        // SAFETY: as in `transfer`; the call only reads the memory.
        call_result(unsafe { libc::writev(fd, iovecs.as_ptr(), count) })
    }

    /// Returns the `iovec`s of one system call and their number. A buffer that spans two memory
    /// regions needs two `iovec`s.
    fn iovecs(
        &self,
        direction: Direction,
        offset: usize,
        length: usize,
    ) -> io::Result<(Vec<libc::iovec>, libc::c_int)> {
        let slices = self
            .memory_ranges(direction, offset, length)
            .flat_map(|(address, length)| self.memory.map().get_slices(address, length))
            .take(MAX_BUFFERS);
        let iovecs = slices.map(|slice| {
            let slice = slice.map_err(io::Error::other)?;
            let iov_base = slice.ptr_guard_mut().as_ptr().cast();
            Ok(libc::iovec { iov_base, iov_len: slice.len() })
        });
        let iovecs = iovecs.collect::<io::Result<Vec<_>>>()?;
        let count = iovecs.len().try_into().map_err(io::Error::other)?;
        Ok((iovecs, count))
    }
}

fn call_result(count: isize) -> io::Result<usize> {
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::devices::virtio::testing::{MEMORY_START, guest_memory};

    #[test]
    fn a_packet_of_too_many_parts_is_not_sent_in_part() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tap");
        let tap = fs::File::create(&path).unwrap();
        let chain = |count| DescriptorChain {
            memory: guest_memory(),
            head_index: 0,
            // Each buffer has one part, and two if it spans two zones.
            buffers: vec![(GuestAddress(MEMORY_START), 1); count],
            readable_count: count,
        };

        let refused = chain(MAX_BUFFERS + 1).write_packet(&tap).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        assert_eq!(tap.metadata().unwrap().len(), 0);

        assert_eq!(chain(MAX_BUFFERS).write_packet(&tap).unwrap(), MAX_BUFFERS);
    }
}
