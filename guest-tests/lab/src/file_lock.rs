// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Locks on files (`flock`) that end with their values.
//!
//! A lock belongs to an open file, not to a process, and a program that another thread starts shares all
//! open files until it executes. If the file was only closed, its lock could outlive the value by that
//! time, and refuse the next who takes it: the end of a value unlocks the file for all who share it.

use std::{
    fs::{File, TryLockError},
    io,
};

/// A locked file.
#[derive(Debug)]
pub struct FileLock(File);

impl FileLock {
    /// Waits until no other process holds an exclusive lock.
    pub fn shared(file: File) -> io::Result<Self> {
        file.lock_shared()?;
        Ok(Self(file))
    }

    /// Waits until no other process holds a lock.
    pub fn exclusive(file: File) -> io::Result<Self> {
        file.lock()?;
        Ok(Self(file))
    }

    /// Returns the file, not locked, if another process holds a lock.
    pub fn try_exclusive(file: File) -> io::Result<Result<Self, File>> {
        match file.try_lock() {
            Ok(()) => Ok(Ok(Self(file))),
            Err(TryLockError::WouldBlock) => Ok(Err(file)),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // It fails for closed descriptors only.
        _ = self.0.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_ends_with_its_value_although_its_file_is_still_open() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let lock = FileLock::exclusive(file.reopen().unwrap()).unwrap();
        let _as_a_started_program = lock.0.try_clone().unwrap();
        let attempt = || FileLock::try_exclusive(file.reopen().unwrap()).unwrap();

        let during = attempt();
        drop(lock);

        assert!(during.is_err());
        assert!(attempt().is_ok());
    }
}
