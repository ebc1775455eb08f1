// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The file `in-use` of an entry of the cache: its time is the entry's last use, and a run that uses
//! the entry holds a shared lock on it.

use std::{fs::File, io, path::Path, time::SystemTime};

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
