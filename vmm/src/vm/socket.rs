// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The control socket's file: taken over from a killed run, removed by its owner alone.

use std::{
    fs, io,
    os::unix::{
        fs::{FileTypeExt as _, MetadataExt as _, lchown},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
};

use super::privileges::Identity;

/// The socket's file, told from one that somebody else has put in its place since.
#[derive(Debug, Clone)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    fn of(path: &Path) -> io::Result<Self> {
        let file = fs::symlink_metadata(path)?;
        Ok(Self {
            path: path.to_owned(),
            device: file.dev(),
            inode: file.ino(),
        })
    }

    /// Removes it, if it is still there and may be removed: whoever became another user may not, and
    /// the next one takes it over then.
    pub fn remove(&self) {
        let there = Self::of(&self.path);
        if there.is_ok_and(|file| (file.device, file.inode) == (self.device, self.inode)) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes the file when dropped.
#[derive(Debug)]
pub(super) struct Owned(SocketFile);

impl Owned {
    /// The file.
    pub(super) const fn file(&self) -> &SocketFile {
        &self.0
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.0.remove();
    }
}

/// The socket, that nobody serves yet; its file goes where that comes to nothing.
#[derive(Debug)]
pub struct Bound {
    pub(super) listener: UnixListener,
    pub(super) file: Owned,
}

impl Bound {
    /// Binds a socket at `path`. One that a killed run has left there is taken over.
    ///
    /// # Errors
    /// Something else is there, somebody listens there, or the folder cannot be written.
    pub fn new(path: &Path) -> io::Result<Self> {
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                if UnixStream::connect(path).is_ok() {
                    return Err(io::Error::new(
                        error.kind(),
                        "another machine listens there: give each its own socket",
                    ));
                }
                if !is_socket(path) {
                    return Err(io::Error::new(error.kind(), "it is there and is no socket"));
                }
                fs::remove_file(path)?;
                UnixListener::bind(path)?
            }
            other => other?,
        };
        let file = Owned(SocketFile::of(path)?);
        Ok(Self { listener, file })
    }

    /// Gives it to a user and a group.
    ///
    /// # Errors
    /// The process may not.
    pub fn give_to(&self, identity: Identity) -> io::Result<()> {
        let Identity { user, group } = identity;
        lchown(&self.file.0.path, Some(user), Some(group))
    }
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket())
}
