// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The file of the control socket. A socket that a killed run left is replaced; only its owner
//! removes it.

use std::{
    fs, io,
    os::unix::{
        fs::{FileTypeExt as _, MetadataExt as _, lchown},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
};

use super::privileges::Identity;

/// A socket file, identified by device and inode, so that a replacement is not mistaken for it.
#[derive(Debug, Clone)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    fn of(path: &Path) -> io::Result<Self> {
        let file = fs::symlink_metadata(path)?;
        Ok(Self { path: path.to_owned(), device: file.dev(), inode: file.ino() })
    }

    /// Removes the file, if it has not been replaced. A process that has changed its user may lack the
    /// permission; the next run replaces the file then.
    pub fn remove(&self) {
        let current = Self::of(&self.path);
        if current.is_ok_and(|file| (file.device, file.inode) == (self.device, self.inode)) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A guard that removes the file when dropped.
#[derive(Debug)]
pub(super) struct SocketGuard(SocketFile);

impl SocketGuard {
    /// Returns the file.
    pub(super) const fn file(&self) -> &SocketFile {
        &self.0
    }
}

impl Drop for SocketGuard {
    fn drop(&mut self) {
        self.0.remove();
    }
}

/// A bound control socket that is not served yet. Dropping it removes the file.
#[derive(Debug)]
pub struct BoundSocket {
    pub(super) listener: UnixListener,
    pub(super) file: SocketGuard,
}

impl BoundSocket {
    /// Binds a socket at `path`. Replaces a socket that a killed run left.
    ///
    /// # Errors
    /// Another file or a listening socket exists, or the folder is not writable.
    pub fn new(path: &Path) -> io::Result<Self> {
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                if UnixStream::connect(path).is_ok() {
                    return Err(io::Error::new(
                        error.kind(),
                        "another VM listens on this socket: use another path",
                    ));
                }
                if !is_socket(path) {
                    return Err(io::Error::new(
                        error.kind(),
                        "the file exists and is not a socket",
                    ));
                }
                fs::remove_file(path)?;
                UnixListener::bind(path)?
            }
            other => other?,
        };
        let file = SocketGuard(SocketFile::of(path)?);
        Ok(Self { listener, file })
    }

    /// Changes the owner of the file.
    ///
    /// # Errors
    /// The process lacks the permission.
    pub fn set_owner(&self, identity: Identity) -> io::Result<()> {
        let Identity { user, group } = identity;
        lchown(&self.file.0.path, Some(user), Some(group))
    }
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket())
}
