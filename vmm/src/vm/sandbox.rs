// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Confinement of the process while it runs a guest.
//!
//! A guest that exploits a device runs code in a thread of this process. Two mechanisms limit it:
//!
//! * Landlock limits the file system to the folders of `/proc` and `/sys` from which
//!   memory and counters are read. All other files are [open](super::open_files) already. In the
//!   folder of the control socket files can be removed, as the socket is at the end.
//! * seccomp limits each kind of thread to the system calls that it uses. Programs
//!   cannot be executed, and network sockets cannot be created.
//!
//! On a host kernel without one of them the VM runs without it, and a warning is logged.

use std::{io, path::PathBuf};

use thiserror::Error;

/// Error returned when the process cannot be confined.
#[derive(Debug, Error)]
pub enum SandboxError {
    /// A seccomp filter cannot be compiled.
    #[error("a seccomp filter cannot be compiled")]
    Compile(#[from] seccompiler::BackendError),
    /// A seccomp filter cannot be installed.
    #[error("a seccomp filter cannot be installed; --sandbox off runs without it")]
    Install(#[from] seccompiler::Error),
    /// Landlock refuses the rules.
    #[error("Landlock refuses the rules; --sandbox off runs without it")]
    Landlock(#[from] landlock::RulesetError),
    /// A folder for a Landlock rule cannot be opened.
    #[error("{path} cannot be opened for a Landlock rule", path = path.display())]
    Path {
        /// The folder.
        path: PathBuf,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// The handler of SIGSYS cannot be installed.
    #[error("the handler of SIGSYS cannot be installed")]
    Handler(#[source] io::Error),
}
