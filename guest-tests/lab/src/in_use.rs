// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The file `in-use` of an entry of the cache: its time is the entry's last use, and a run that uses
//! the entry holds a shared lock on it.

use std::{fs::File, io, path::Path, time::SystemTime};

use crate::file_lock::FileLock;

const FILE: &str = "in-use";

/// Records the use of an entry, which is in use until the lock is dropped.
pub fn mark(entry: &Path) -> io::Result<FileLock> {
    let file = File::create(entry.join(FILE))?;
    file.set_modified(SystemTime::now())?;
    FileLock::shared(file)
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
pub fn lock_for_removal(entry: &Path) -> io::Result<Option<FileLock>> {
    let file = match File::options().write(true).open(entry.join(FILE)) {
        Ok(file) => file,
        Err(error)
            if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            File::open(entry)?
        }
        Err(error) => return Err(error),
    };
    FileLock::try_exclusive(file).map(Result::ok)
}
