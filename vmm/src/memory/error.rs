// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The error of guest memory. Its messages name the remedy.

use std::{io, path::PathBuf};

use granule_types::{backing::Backing, units::Bytes};
use thiserror::Error;

/// Error returned when guest memory is not available as requested.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The host does not offer the pages of the backing, or has too few of them.
    #[error("{0}")]
    Unavailable(String),
    /// The size, the addresses or the backing are not valid for the request.
    #[error("{0}")]
    Invalid(String),
    /// The kernel reports or has mapped other pages than requested.
    #[error("{0}")]
    Unexpected(String),
    /// The kernel cannot collapse pages.
    #[error("this host's kernel cannot collapse pages on request (MADV_COLLAPSE, Linux 6.1)")]
    NoCollapse,
    /// A file of the host cannot be read.
    #[error("cannot read {path}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// A system call failed.
    #[error("{doing} failed for {size} of {backing}")]
    Call {
        /// Purpose of the call.
        doing: &'static str,
        /// Size of the memory.
        size: Bytes,
        /// Backing of the memory.
        backing: Backing,
        /// Error of the kernel.
        source: io::Error,
    },
}
