// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! System calls of userfaultfd (`Documentation/admin-guide/mm/userfaultfd.rst`): a thread that
//! accesses a missing page of a registered range waits until another one fills the page. In a memory
//! file, also a page that exists and is not mapped can be registered; the other thread maps it.
//!
//! The ioctls are defined here, because the crate for them needs libclang to be built.

#![allow(missing_docs, reason = "the ioctl macros define undocumented functions")]

use std::{
    fs::File,
    io::{self, Read as _},
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
};

use granule_types::units::HostVirtAddr;
use rustix::mm::{UserfaultfdFlags, userfaultfd};
use vmm_sys_util::{
    ioctl::{ioctl_with_mut_ref, ioctl_with_ref},
    ioctl_ior_nr, ioctl_iowr_nr,
};

const UFFDIO: u32 = 0xaa;
/// Version of the interface, `UFFD_API`.
const API: u64 = 0xaa;
const REGISTER_MODE_MISSING: u64 = 1;
const REGISTER_MODE_MINOR: u64 = 1 << 2;
/// Features of Linux 5.13, `UFFD_FEATURE_MINOR_HUGETLBFS`, and 5.18, `UFFD_FEATURE_EXACT_ADDRESS`: before,
/// an attempt to map a hugetlb page that is mapped could take a reservation.
const FEATURES_MINOR: u64 = 1 << 9 | 1 << 11;
/// Feature of Linux 6.8 and newer, `UFFD_FEATURE_MOVE`.
const FEATURE_MOVE: u64 = 1 << 16;
/// Type of a message about a missing page, `UFFD_EVENT_PAGEFAULT`.
const EVENT_PAGEFAULT: u8 = 0x12;
/// Size of a message, `struct uffd_msg`.
pub const MESSAGE_SIZE: usize = 32;
const ADDRESS_OFFSET: usize = 16;

#[repr(C)]
#[derive(Default)]
struct ApiRequest {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RangeRequest {
    start: u64,
    length: u64,
}

#[repr(C)]
struct RegisterRequest {
    range: RangeRequest,
    mode: u64,
    ioctls: u64,
}

/// Pages to copy or to move to missing ones: `struct uffdio_copy` and `struct uffdio_move`.
#[repr(C)]
struct FillRequest {
    to: u64,
    from: u64,
    length: u64,
    mode: u64,
    filled: i64,
}

impl FillRequest {
    const fn new(to: HostVirtAddr, from: u64, length: u64) -> Self {
        Self { to: to.0, from, length, mode: 0, filled: 0 }
    }
}

/// Pages of a memory file to map: `struct uffdio_continue`.
#[repr(C)]
struct ContinueRequest {
    range: RangeRequest,
    mode: u64,
    mapped: i64,
}

ioctl_iowr_nr!(UFFDIO_API, UFFDIO, 0x3f, ApiRequest);
ioctl_iowr_nr!(UFFDIO_REGISTER, UFFDIO, 0x00, RegisterRequest);
ioctl_ior_nr!(UFFDIO_UNREGISTER, UFFDIO, 0x01, RangeRequest);
ioctl_ior_nr!(UFFDIO_WAKE, UFFDIO, 0x02, RangeRequest);
ioctl_iowr_nr!(UFFDIO_COPY, UFFDIO, 0x03, FillRequest);
ioctl_iowr_nr!(UFFDIO_MOVE, UFFDIO, 0x05, FillRequest);
ioctl_iowr_nr!(UFFDIO_CONTINUE, UFFDIO, 0x07, ContinueRequest);

/// Faults of this process on missing pages, of threads in user space and in the kernel.
#[derive(Debug)]
pub struct UserFaults {
    file: File,
    features: u64,
}

impl UserFaults {
    /// Opens a file descriptor for faults.
    ///
    /// # Errors
    /// The process lacks the privilege, or the kernel the feature.
    pub fn open() -> io::Result<Self> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        // SAFETY: no range is registered, so no memory of this process changes its behaviour.
        let file = File::from(unsafe { userfaultfd(flags) }?);
        let mut request = ApiRequest { api: API, ..ApiRequest::default() };
        // SAFETY: the kernel reads and writes this request only.
        check(unsafe { ioctl_with_mut_ref(&file, UFFDIO_API(), &mut request) })?;
        Ok(Self { file, features: request.features })
    }

    /// Returns another file descriptor for the same faults.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { file: self.file.try_clone()?, features: self.features })
    }

    /// Reports faults on missing pages of a range from now on.
    pub fn register(&self, range: &Range<HostVirtAddr>) -> io::Result<()> {
        self.register_mode(range, REGISTER_MODE_MISSING)
    }

    /// Reports faults on pages of a memory file that are missing, or exist and are not mapped.
    pub fn register_file(&self, range: &Range<HostVirtAddr>) -> io::Result<()> {
        self.register_mode(range, REGISTER_MODE_MISSING | REGISTER_MODE_MINOR)
    }

    fn register_mode(&self, range: &Range<HostVirtAddr>, mode: u64) -> io::Result<()> {
        let mut request = RegisterRequest { range: range_request(range), mode, ioctls: 0 };
        // SAFETY: the kernel reads and writes this request only; accesses to the range wait.
        check(unsafe { ioctl_with_mut_ref(&self.file, UFFDIO_REGISTER(), &mut request) })
    }

    /// Ends the reports of a range: missing pages are zero. Threads that wait continue.
    pub fn unregister(&self, range: &Range<HostVirtAddr>) -> io::Result<()> {
        let request = range_request(range);
        // SAFETY: the kernel reads this request only.
        check(unsafe { ioctl_with_ref(&self.file, UFFDIO_UNREGISTER(), &request) })
    }

    /// Continues the threads that wait for pages of a range.
    pub fn wake(&self, range: &Range<HostVirtAddr>) -> io::Result<()> {
        let request = range_request(range);
        // SAFETY: the kernel reads this request only.
        check(unsafe { ioctl_with_ref(&self.file, UFFDIO_WAKE(), &request) })
    }

    /// Fills missing pages from `to` on with `bytes`, and continues the threads that wait for them.
    /// Returns the number of bytes before a page that is not missing, or all.
    ///
    /// # Errors
    /// The first page is not missing (`EEXIST`), or the kernel cannot fill it.
    pub fn fill(&self, to: HostVirtAddr, bytes: &[u8]) -> io::Result<usize> {
        let from = bytes.as_ptr().expose_provenance() as u64;
        let mut request = FillRequest::new(to, from, bytes.len() as u64);
        // SAFETY: the kernel reads `bytes` and this request, and writes missing pages only.
        let result = unsafe { ioctl_with_mut_ref(&self.file, UFFDIO_COPY(), &mut request) };
        done(request.filled, result)
    }

    /// Returns whether the kernel can [move](Self::move_pages) pages (Linux 6.8 and newer).
    pub const fn can_move(&self) -> bool {
        self.features & FEATURE_MOVE != 0
    }

    /// Moves pages of private memory to missing pages from `to` on, which leaves zeros, and continues the
    /// threads that wait for them. A huge page is moved as a whole if `bytes` and `to` are aligned to it.
    /// Returns the number of bytes before a page that cannot be moved, or all.
    ///
    /// # Errors
    /// The kernel cannot move the first page.
    pub fn move_pages(&self, to: HostVirtAddr, bytes: &mut [u8]) -> io::Result<usize> {
        let from = bytes.as_mut_ptr().expose_provenance() as u64;
        let mut request = FillRequest::new(to, from, bytes.len() as u64);
        // SAFETY: the kernel writes this request, missing pages, and zeros to `bytes`, which nothing else
        // accesses.
        let result = unsafe { ioctl_with_mut_ref(&self.file, UFFDIO_MOVE(), &mut request) };
        done(request.filled, result)
    }

    /// Returns whether the kernel can [map pages](Self::map_pages) of hugetlb files (Linux 5.18 and newer).
    pub const fn can_map(&self) -> bool {
        self.features & FEATURES_MINOR == FEATURES_MINOR
    }

    /// Maps pages of a memory file, which exist, and continues the threads that wait for them. Returns the
    /// number of bytes before a page that cannot be mapped, or all.
    ///
    /// # Errors
    /// The first page is mapped (`EEXIST`), does not exist (`EFAULT`), or the kernel cannot map it.
    pub fn map_pages(&self, range: &Range<HostVirtAddr>) -> io::Result<usize> {
        let mut request = ContinueRequest { range: range_request(range), mode: 0, mapped: 0 };
        // SAFETY: the kernel reads and writes this request only, and maps pages of the file that the range
        // is a mapping of.
        let result = unsafe { ioctl_with_mut_ref(&self.file, UFFDIO_CONTINUE(), &mut request) };
        done(request.mapped, result)
    }

    /// Returns the address of the next fault, or `None` if there is none at present.
    pub fn next(&self) -> io::Result<Option<HostVirtAddr>> {
        let mut message = [0; MESSAGE_SIZE];
        match (&self.file).read_exact(&mut message) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            read => read?,
        }
        Ok(fault_address(&message))
    }
}

/// Returns the address in a message about a missing page, or `None` for another message.
pub fn fault_address(message: &[u8; MESSAGE_SIZE]) -> Option<HostVirtAddr> {
    let address = message[ADDRESS_OFFSET..].first_chunk();
    let address = address.map(|bytes| HostVirtAddr(u64::from_ne_bytes(*bytes)));
    address.filter(|_| message[0] == EVENT_PAGEFAULT)
}

impl AsFd for UserFaults {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

const fn range_request(range: &Range<HostVirtAddr>) -> RangeRequest {
    RangeRequest { start: range.start.0, length: range.end.0 - range.start.0 }
}

/// Returns the bytes of a call that may have ended early. The kernel writes `bytes` in both cases: the
/// bytes, or a negative error.
fn done(bytes: i64, result: libc::c_int) -> io::Result<usize> {
    let bytes = usize::try_from(bytes).unwrap_or(0);
    if bytes == 0 {
        check(result)?;
    }
    Ok(bytes)
}

fn check(result: libc::c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
