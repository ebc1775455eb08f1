// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Disk image or block device on the host.
//!
//! An open disk is locked (`flock`): exclusively for one writing guest, or shared for read-only
//! guests. Two guests that write to one file system would corrupt it.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{self, BufWriter, Read as _, Seek as _, SeekFrom, Write as _},
    mem,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use parking_lot::Mutex;
use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
};

use super::{super::BackendError, SECTOR_SIZE};

/// Open disk.
#[derive(Debug)]
pub struct Disk {
    pub(super) file: File,
    /// Path that messages show.
    pub(super) path: PathBuf,
    /// Size in sectors of 512 bytes.
    pub(super) sectors: u64,
    /// Indicates that the guest may not write.
    pub(super) is_read_only: bool,
    /// Indicates that a flush failed which the guest did not request: its next one fails, too. Locked
    /// while the disk is flushed, because the kernel reports data that it could not write once for each
    /// open file.
    hidden_failure: Arc<Mutex<bool>>,
}

impl Disk {
    /// Opens and locks a raw image or a block device. Bytes after the last whole sector are not
    /// part of the disk.
    ///
    /// # Errors
    /// It cannot be opened or locked, or it is empty.
    pub fn open(path: &Path, is_read_only: bool) -> Result<Self, BackendError> {
        let failed = |source: io::Error| {
            let denied = matches!(
                source.kind(),
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem
            );
            let advice = match denied && !is_read_only {
                true => ": use readonly=on, which needs no write permission",
                false => "",
            };
            open_error(path, "opened", advice, source)
        };
        let mut options = OpenOptions::new();
        options.read(true).write(!is_read_only);
        // A pipe, which a snapshot may name, is refused below instead of waited for.
        let file = options.custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
        let locked = match is_read_only {
            true => file.try_lock_shared(),
            false => file.try_lock(),
        };
        locked.map_err(|error| match error {
            TryLockError::WouldBlock => BackendError::new(
                format!(
                    "the disk {} is in use by another guest: stop that one, or attach the disk to \
                     both with readonly=on",
                    path.display()
                ),
                None,
            ),
            TryLockError::Error(source) => open_error(path, "locked", "", source),
        })?;
        if file.metadata().map_err(failed)?.is_dir() {
            return Err(too_small_error(path));
        }
        Self::from_file(file, path, is_read_only, Arc::default())
    }

    /// Returns the same open and locked disk, with its current size.
    ///
    /// # Errors
    /// The host is out of file descriptors, or the disk has become empty.
    pub fn try_clone(&self) -> Result<Self, BackendError> {
        let file = self.file.try_clone();
        let file = file.map_err(|source| open_error(&self.path, "opened", "", source))?;
        Self::from_file(file, &self.path, self.is_read_only, Arc::clone(&self.hidden_failure))
    }

    fn from_file(
        mut file: File,
        path: &Path,
        is_read_only: bool,
        hidden_failure: Arc<Mutex<bool>>,
    ) -> Result<Self, BackendError> {
        let size = file.seek(SeekFrom::End(0));
        match size.map_err(|source| open_error(path, "opened", "", source))? {
            ..SECTOR_SIZE => Err(too_small_error(path)),
            size => {
                let sectors = size / SECTOR_SIZE;
                Ok(Self { file, path: path.into(), sectors, is_read_only, hidden_failure })
            }
        }
    }

    /// Flushes all completed writes to the storage of the host, as the guest has requested. Fails also
    /// if a flush that it did not request has failed before.
    pub(super) fn flush_for_guest(&self) -> io::Result<()> {
        let mut hidden_failure = self.hidden_failure.lock();
        let flushed = self.sync();
        match mem::take(&mut *hidden_failure) {
            true => flushed.and(Err(lost_writes())),
            false => flushed,
        }
    }

    /// Flushes all completed writes before a snapshot, beside the guest or while it is stopped.
    ///
    /// # Errors
    /// The host cannot write data, or could not and the guest has not seen the error yet: no snapshot
    /// refers to lost data.
    pub fn flush_for_snapshot(&self) -> Result<(), BackendError> {
        let mut hidden_failure = self.hidden_failure.lock();
        let flushed = match *hidden_failure {
            true => Err(lost_writes()),
            false => self.sync().inspect_err(|_| *hidden_failure = true),
        };
        flushed.map_err(|source| open_error(&self.path, "flushed", "", source))
    }

    fn sync(&self) -> io::Result<()> {
        match self.is_read_only {
            true => Ok(()),
            false => self.file.sync_data(),
        }
    }

    /// Deallocates a non-empty range, which then reads as zeros or keeps its contents.
    pub(super) fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, mode, offset, length)?)
    }

    /// Fills a non-empty range with zeros; `unmap` permits deallocating it.
    pub(super) fn write_zeros(&self, offset: u64, length: u64, unmap: bool) -> io::Result<()> {
        let mode = match unmap {
            true => FallocateFlags::PUNCH_HOLE,
            false => FallocateFlags::ZERO_RANGE,
        };
        match fallocate(&self.file, mode | FallocateFlags::KEEP_SIZE, offset, length) {
            Err(Errno::OPNOTSUPP) => self.write_zero_bytes(offset, length),
            result => Ok(result?),
        }
    }

    /// Writes zeros, for file systems that support neither holes nor zero ranges.
    fn write_zero_bytes(&self, offset: u64, length: u64) -> io::Result<()> {
        let mut writer = BufWriter::with_capacity(1 << 16, &self.file);
        writer.seek(SeekFrom::Start(offset))?;
        io::copy(&mut io::repeat(0).take(length), &mut writer)?;
        writer.flush()
    }
}

fn open_error(path: &Path, action: &str, advice: &str, source: io::Error) -> BackendError {
    let path = path.display();
    BackendError::new(format!("the disk {path} cannot be {action}{advice}"), source)
}

fn lost_writes() -> io::Error {
    io::Error::other("an earlier flush has failed, so what the guest has written may be lost")
}

fn too_small_error(path: &Path) -> BackendError {
    let path = path.display();
    let message = format!(
        "the disk {path} holds less than 512 bytes: it must be a raw image or a block device"
    );
    BackendError::new(message, None)
}
