// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Errors of the vsock backend, with their remedies.

use std::io;

use vhost::Error;

/// Error returned when the vsock backend cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum VsockError {
    /// It cannot be opened.
    #[error("/dev/vhost-vsock cannot be opened{advice}")]
    Open {
        /// Remedy, if known.
        advice: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// The CID is in use.
    #[error("the CID {0} is taken, by another guest or by this host: choose another one")]
    CidInUse(u32),
    /// The kernel refuses a call.
    #[error("the vsock of this host cannot be used ({doing})")]
    Call {
        /// Purpose of the call.
        doing: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// The kernel lacks features that every device offers.
    #[error("the vsock of this host lacks the virtio features {0:#x}: its kernel is too old")]
    Features(u64),
    /// The host is out of file descriptors.
    #[error("no event file descriptor can be created")]
    Event(#[source] io::Error),
}

/// Returns a conversion of errors of the `vhost` crate for `map_err`.
pub(super) fn vsock_error(doing: &'static str) -> impl Fn(Error) -> VsockError {
    move |error| VsockError::Call { doing, source: host_error(error) }
}

/// Returns the error of the kernel, if it is one.
pub(super) fn host_error(error: Error) -> io::Error {
    match error {
        Error::VhostOpen(source) | Error::IoctlError(source) | Error::IOError(source) => source,
        other => io::Error::other(other),
    }
}

pub(super) fn advice(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => {
            ": this host has no vhost-vsock; try 'modprobe vhost_vsock', as root"
        }
        Some(libc::EACCES | libc::EPERM) => {
            ": permission denied; start as root with --user, or have root permit it"
        }
        _ => "",
    }
}
