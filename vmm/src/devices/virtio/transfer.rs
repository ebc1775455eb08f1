// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Moves bytes between a request's buffers and a file descriptor without a copy in between.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
};

use vm_memory::GuestMemoryBackend as _;

use super::{DescriptorChain, Direction};
use crate::memory::GuestMemory;

/// As many pieces as one call takes (`IOV_MAX`).
const MOST_PIECES: usize = 1024;

/// What to move.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    /// First byte within the request's part.
    pub skip: usize,
    /// Number of bytes.
    pub length: usize,
}

/// Reads `span.length` bytes of the file at `offset` into the request's writable buffers.
///
/// # Errors
/// The file cannot be read, or ends before.
pub fn read_at(
    file: &impl AsRawFd,
    offset: u64,
    memory: &GuestMemory,
    chain: &DescriptorChain,
    span: Span,
) -> io::Result<()> {
    all(memory, chain, Direction::Writable, span, |pieces, done| {
        let (fd, at) = (file.as_raw_fd(), position(offset, done)?);
        let count = libc::c_int::try_from(pieces.len()).map_err(io::Error::other)?;
        // SAFETY: every piece is guest memory, mapped and writable for as long as `memory` lives;
        // the guest may see or change it meanwhile, which is its own affair.
        result(unsafe { libc::preadv(fd, pieces.as_ptr(), count, at) })
    })
}

/// Writes `span.length` bytes of the request's readable buffers to the file at `offset`.
///
/// # Errors
/// The file cannot be written.
pub fn write_at(
    file: &impl AsRawFd,
    offset: u64,
    memory: &GuestMemory,
    chain: &DescriptorChain,
    span: Span,
) -> io::Result<()> {
    all(memory, chain, Direction::Readable, span, |pieces, done| {
        let (fd, at) = (file.as_raw_fd(), position(offset, done)?);
        let count = libc::c_int::try_from(pieces.len()).map_err(io::Error::other)?;
        // SAFETY: as in `read_at`; the memory is only read.
        result(unsafe { libc::pwritev(fd, pieces.as_ptr(), count, at) })
    })
}

/// Writes the request's readable buffers in one call: a packet.
///
/// # Errors
/// The call's.
pub fn write_packet(fd: RawFd, memory: &GuestMemory, chain: &DescriptorChain) -> io::Result<usize> {
    let mut pieces = Vec::new();
    collect(
        memory,
        chain,
        Direction::Readable,
        Span {
            skip: 0,
            length: usize::MAX,
        },
        &mut pieces,
    )?;
    let count = libc::c_int::try_from(pieces.len()).map_err(io::Error::other)?;
    // SAFETY: as in `read_at`; the memory is only read.
    result(unsafe { libc::writev(fd, pieces.as_ptr(), count) })
}

fn position(offset: u64, done: usize) -> io::Result<libc::off_t> {
    let at = offset
        .checked_add(done as u64)
        .and_then(|at| at.try_into().ok());
    at.ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

fn result(count: isize) -> io::Result<usize> {
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// Repeats `call` until everything is moved.
fn all(
    memory: &GuestMemory,
    chain: &DescriptorChain,
    part: Direction,
    span: Span,
    call: impl Fn(&[libc::iovec], usize) -> io::Result<usize>,
) -> io::Result<()> {
    let mut pieces = Vec::new();
    let mut done = 0;
    while done < span.length {
        let rest = Span {
            skip: span.skip + done,
            length: span.length - done,
        };
        collect(memory, chain, part, rest, &mut pieces)?;
        match call(&pieces, done) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn collect(
    memory: &GuestMemory,
    chain: &DescriptorChain,
    part: Direction,
    span: Span,
    pieces: &mut Vec<libc::iovec>,
) -> io::Result<()> {
    pieces.clear();
    for (address, length) in chain.pieces(part, span.skip, span.length) {
        // One buffer lies in several pieces where regions of memory touch.
        for slice in memory.map().get_slices(address, length) {
            if pieces.len() == MOST_PIECES {
                return Ok(());
            }
            let slice = slice.map_err(io::Error::other)?;
            pieces.push(libc::iovec {
                iov_base: slice.ptr_guard_mut().as_ptr().cast(),
                iov_len: slice.len(),
            });
        }
    }
    Ok(())
}
