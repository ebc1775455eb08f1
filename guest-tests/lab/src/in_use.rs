// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The file `in-use` of an entry of the cache: its time is the entry's last use, and a run that uses
//! the entry holds a shared lock on it.

use std::{
    fs::{File, TryLockError},
    io,
    path::Path,
    time::SystemTime,
};

const FILE: &str = "in-use";

/// Records the use of an entry, which is in use until the file is dropped.
pub fn mark(entry: &Path) -> io::Result<File> {
    let file = File::create(entry.join(FILE))?;
    file.set_modified(SystemTime::now())?;
    file.lock_shared()?;
    Ok(file)
}

/// Records the use of an entry, without an error if it cannot be recorded.
pub fn touch(entry: &Path) {
    drop(mark(entry));
}

/// Returns the time of the last recorded use.
pub fn last_use(entry: &Path) -> io::Result<SystemTime> {
    entry.join(FILE).metadata().or_else(|_| entry.symlink_metadata())?.modified()
}

/// Locks an entry against use; returns `None` if it is in use.
pub fn lock_for_removal(entry: &Path) -> io::Result<Option<File>> {
    let file = match File::options().write(true).open(entry.join(FILE)) {
        Ok(file) => file,
        Err(error)
            if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            return File::open(entry).map(Some);
        }
        Err(error) => return Err(error),
    };
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}
