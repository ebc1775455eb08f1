// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Vectored I/O between the buffers of a descriptor chain and a file descriptor, without a copy in
//! this process. The safe wrappers of other crates take slices, which memory that a guest changes
//! concurrently cannot have.

use std::{
    io,
    ops::Range,
    os::fd::{AsRawFd, RawFd},
};

use vm_memory::GuestMemoryBackend as _;

use super::{DescriptorChain, Direction};
use crate::memory::GuestMemory;

/// Maximum number of buffers of one system call (`IOV_MAX`).
const MAX_IOVECS: usize = 1024;

/// Transfers `range` of the buffers of one direction from or to the file at `offset`.
///
/// # Errors
/// The file cannot be read or written, or it ends before.
pub fn file_transfer(
    file: &impl AsRawFd,
    offset: u64,
    memory: &GuestMemory,
    chain: &DescriptorChain,
    direction: Direction,
    range: Range<usize>,
) -> io::Result<()> {
    let mut done = 0;
    while done < range.len() {
        let iovecs = collect_iovecs(memory, chain, direction, range.start + done..range.end)?;
        let (fd, position) = (file.as_raw_fd(), file_position(offset, done)?);
        let count = libc::c_int::try_from(iovecs.len()).map_err(io::Error::other)?;
        let result = match direction {
            // SAFETY: each buffer is guest memory, mapped and writable as long as `memory` exists.
            // The guest may access it concurrently; this process holds no references to it.
            Direction::Writable => unsafe { libc::preadv(fd, iovecs.as_ptr(), count, position) },
            // SAFETY: as above; the call only reads the memory.
            Direction::Readable => unsafe { libc::pwritev(fd, iovecs.as_ptr(), count, position) },
        };
        match call_result(result) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes all device-readable buffers in one call, which is one packet.
///
/// # Errors
/// The call fails.
pub fn write_packet(fd: RawFd, memory: &GuestMemory, chain: &DescriptorChain) -> io::Result<usize> {
    let iovecs = collect_iovecs(memory, chain, Direction::Readable, 0..usize::MAX)?;
    let count = libc::c_int::try_from(iovecs.len()).map_err(io::Error::other)?;
    // SAFETY: as in `file_transfer`; the call only reads the memory.
    call_result(unsafe { libc::writev(fd, iovecs.as_ptr(), count) })
}

fn file_position(offset: u64, done: usize) -> io::Result<libc::off_t> {
    let position = offset.checked_add(done as u64).and_then(|at| at.try_into().ok());
    position.ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

fn call_result(count: isize) -> io::Result<usize> {
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// Returns the buffers of one system call. A buffer that spans two memory regions needs two.
fn collect_iovecs(
    memory: &GuestMemory,
    chain: &DescriptorChain,
    direction: Direction,
    range: Range<usize>,
) -> io::Result<Vec<libc::iovec>> {
    chain
        .ranges(direction, range)
        .flat_map(|(address, length)| memory.map().get_slices(address, length))
        .take(MAX_IOVECS)
        .map(|slice| {
            let slice = slice.map_err(io::Error::other)?;
            Ok(libc::iovec {
                iov_base: slice.ptr_guard_mut().as_ptr().cast(),
                iov_len: slice.len(),
            })
        })
        .collect()
}
