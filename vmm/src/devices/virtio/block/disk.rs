// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a disk is on the host.
//!
//! A disk is locked as long as it is open (`flock`): by one guest for writing, or by several for
//! reading. Two guests that write to one file system destroy it.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{self, Seek as _, SeekFrom},
    os::{fd::AsRawFd, unix::fs::FileExt as _},
    path::{Path, PathBuf},
};

use thiserror::Error;

use super::SECTOR;

/// Why a disk cannot be used.
#[derive(Debug, Error)]
pub enum DiskError {
    /// It cannot be opened.
    #[error("the disk {path} cannot be opened{advice}")]
    Open {
        /// The disk.
        path: PathBuf,
        /// What to do, if that is known.
        advice: &'static str,
        /// Why.
        source: io::Error,
    },
    /// Someone else uses it.
    #[error(
        "the disk {0} is in use by another guest: stop that one, or give both the disk with \
         readonly=on"
    )]
    InUse(PathBuf),
    /// It cannot be locked.
    #[error("the disk {path} cannot be locked")]
    Lock {
        /// The disk.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It has no sectors.
    #[error("the disk {0} holds less than 512 bytes: it must be a raw image or a block device")]
    Empty(PathBuf),
}

/// An open disk.
#[derive(Debug)]
pub struct Disk {
    file: File,
    path: PathBuf,
    sectors: u64,
    read_only: bool,
}

impl Disk {
    /// Opens and locks a raw image or a block device.
    ///
    /// # Errors
    /// It cannot be opened or locked, or it is empty. Bytes past the last whole sector are not
    /// part of the disk.
    pub fn open(path: &Path, read_only: bool) -> Result<Self, DiskError> {
        let open = |source: io::Error| DiskError::Open {
            path: path.to_owned(),
            advice: match source.kind() {
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem
                    if !read_only =>
                {
                    ": readonly=on needs no right to write"
                }
                _ => "",
            },
            source,
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(!read_only)
            .open(path)
            .map_err(open)?;
        let locked = match read_only {
            true => file.try_lock_shared(),
            false => file.try_lock(),
        };
        locked.map_err(|error| match error {
            TryLockError::WouldBlock => DiskError::InUse(path.to_owned()),
            TryLockError::Error(source) => DiskError::Lock {
                path: path.to_owned(),
                source,
            },
        })?;
        let sectors = file.seek(SeekFrom::End(0)).map_err(open)? / SECTOR;
        if sectors == 0 || file.metadata().map_err(open)?.is_dir() {
            return Err(DiskError::Empty(path.to_owned()));
        }
        Ok(Self {
            file,
            path: path.to_owned(),
            sectors,
            read_only,
        })
    }

    /// The same disk, open and locked once for both, with the size that it has now.
    ///
    /// # Errors
    /// The host has no descriptor to give, or the disk has become empty.
    pub fn try_clone(&self) -> Result<Self, DiskError> {
        let open = |source| DiskError::Open {
            path: self.path.clone(),
            advice: "",
            source,
        };
        let mut file = self.file.try_clone().map_err(open)?;
        let sectors = file.seek(SeekFrom::End(0)).map_err(open)? / SECTOR;
        if sectors == 0 {
            return Err(DiskError::Empty(self.path.clone()));
        }
        Ok(Self {
            file,
            path: self.path.clone(),
            sectors,
            read_only: self.read_only,
        })
    }

    /// The file.
    pub(super) const fn file(&self) -> &File {
        &self.file
    }

    /// Its path, for messages.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Its size in sectors of 512 bytes.
    #[must_use]
    pub const fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Whether the guest may not write.
    #[must_use]
    pub const fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Everything written is on the host's storage afterwards.
    pub(super) fn flush(&self) -> io::Result<()> {
        match self.read_only {
            true => Ok(()),
            false => self.file.sync_data(),
        }
    }

    /// Gives the range back to the host. What it holds afterwards is zeros, or what it was.
    pub(super) fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.allocate(libc::FALLOC_FL_PUNCH_HOLE, offset, length)
    }

    /// Fills the range with zeros, and may give it back to the host for that.
    pub(super) fn write_zeros(&self, offset: u64, length: u64, unmap: bool) -> io::Result<()> {
        let mode = match unmap {
            true => libc::FALLOC_FL_PUNCH_HOLE,
            false => libc::FALLOC_FL_ZERO_RANGE,
        };
        match self.allocate(mode, offset, length) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                self.write_zeros_slowly(offset, length)
            }
            result => result,
        }
    }

    /// For file systems that know neither holes nor ranges of zeros.
    fn write_zeros_slowly(&self, offset: u64, length: u64) -> io::Result<()> {
        const ZEROS: &[u8] = &[0; 1 << 16];
        let mut done = 0;
        while done < length {
            let count = usize::try_from(length - done).map_or(ZEROS.len(), |l| l.min(ZEROS.len()));
            self.file.write_all_at(&ZEROS[..count], offset + done)?;
            done += count as u64;
        }
        Ok(())
    }

    fn allocate(&self, mode: libc::c_int, offset: u64, length: u64) -> io::Result<()> {
        if length == 0 {
            return Ok(());
        }
        let number = |value: u64| libc::off_t::try_from(value).map_err(io::Error::other);
        let (offset, length) = (number(offset)?, number(length)?);
        let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: fallocate takes numbers only; the descriptor is this value's own.
        match unsafe { libc::fallocate(self.file.as_raw_fd(), mode, offset, length) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}
