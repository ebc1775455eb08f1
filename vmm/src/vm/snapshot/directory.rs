// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Files of a snapshot.
//!
//! | file | contents |
//! |---|---|
//! | `state.jsonl` | the [state](super::state), which names the other files |
//! | `memory-N` | contents of guest memory, a sparse file |
//! | `changes-N` | pages that changed since the file with the next lower number, of an incremental snapshot |
//!
//! A new snapshot is written beside the old one: first its memory or changes under a new name, then its
//! state, whose renaming replaces the old state. Both are on the disk before the renaming, so the
//! directory contains one whole snapshot at any time. When the renaming is on the disk, too, the files that
//! the state does not name are removed; the next process removes those that an interruption has left. A
//! snapshot with changes keeps the files of the earlier one. Memory that a VM has mapped stays as it is
//! after its file was removed.

#[cfg(test)]
mod tests;

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::{OpenOptionsExt as _, fchown},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, Dir, FlockOperation, Mode, OFlags, flock},
    io::Errno,
};

use super::{
    super::{
        outcome::{VmError, failed},
        privileges::Identity,
    },
    VmState,
};
use crate::{folder::folder_of, memory::PageMap};

pub(super) const STATE_NAME: &str = "state.jsonl";
const PARTIAL_STATE_NAME: &str = "state.partial";
pub(super) const MEMORY_PREFIX: &str = "memory-";
pub(super) const CHANGES_PREFIX: &str = "changes-";
/// Maximum size of a state; one with 512 vCPUs has some megabytes.
const MAX_STATE_SIZE: u64 = 64 << 20;

/// Directory for snapshots, which is open since the process was confined.
#[derive(Debug)]
pub struct SnapshotDirectory {
    file: File,
    is_new: bool,
    /// The page map, which a process that has changed its user cannot open.
    pub(in super::super) page_map: PageMap,
    /// Option and path, for error messages.
    name: String,
}

/// A snapshot that has become that of its directory.
#[derive(Debug)]
pub(in super::super) struct Committed {
    /// Indicates that it is certain on the disk.
    pub is_durable: bool,
    /// Names of the files of memory and changes.
    files: Vec<String>,
}

impl SnapshotDirectory {
    /// Opens a directory, which is created if it does not exist. It is locked until the value is dropped,
    /// because another VM would remove or reuse the files.
    ///
    /// # Errors
    /// It cannot be opened or created, is not a directory, or another VM saves to it.
    pub fn open(path: &Path) -> Result<Self, VmError> {
        let name = format!("--snapshot {}", path.display());
        let open = || {
            let is_new = match fs::create_dir(path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                created => created.is_ok(),
            };
            if is_new {
                sync_parent(path)?;
            }
            let mut flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            // A new directory is given to `--user`, and may have been replaced by a link to one of the
            // system. The components have no slash at the end, which would follow it.
            flags.set(OFlags::NOFOLLOW, is_new);
            let name: PathBuf = path.components().collect();
            let file = File::from(rustix::fs::open(&name, flags, Mode::empty())?);
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) => {
                    Err(io::Error::other("another VM saves to this directory: use another one"))
                }
                locked => Ok(locked.map(|()| (file, is_new))?),
            }
        };
        let (file, is_new) = open().map_err(failed(name.as_str()))?;
        let directory = Self { file, is_new, page_map: PageMap::open()?, name };
        directory.remove_leftovers(path);
        Ok(directory)
    }

    /// Returns option and path.
    pub fn description(&self) -> &str {
        &self.name
    }

    /// Creates a file for the memory of the next snapshot. Returns its name and the file.
    pub(in super::super) fn create_memory(&self) -> Result<(String, File), VmError> {
        self.create_next(MEMORY_PREFIX)
    }

    /// Creates a file for the changes since the last snapshot. Returns its name and the file.
    pub(in super::super) fn create_changes(&self) -> Result<(String, File), VmError> {
        self.create_next(CHANGES_PREFIX)
    }

    fn create_next(&self, prefix: &str) -> Result<(String, File), VmError> {
        let create = || {
            let last = self.data_files()?.into_iter().map(|(number, _)| number).max();
            let next = last.map_or(Some(0), |last| last.checked_add(1));
            let next = next.ok_or_else(|| io::Error::other("a file has the last number"))?;
            let name = format!("{prefix}{next}");
            let file = self.create(&name)?;
            Ok((name, file))
        };
        create().map_err(self.failed())
    }

    /// Makes a new file of memory or changes and the state the snapshot of the directory. The files of the
    /// earlier one remain until [`Self::remove_earlier`].
    pub(in super::super) fn commit(
        &self,
        new: &File,
        state: &VmState,
    ) -> Result<Committed, VmError> {
        let commit = || -> io::Result<()> {
            new.sync_data()?;
            self.remove_partial_state()?;
            let mut file = self.create(PARTIAL_STATE_NAME)?;
            file.write_all(state.to_text()?.as_bytes())?;
            file.sync_data()?;
            match rustix::fs::renameat(&self.file, PARTIAL_STATE_NAME, &self.file, STATE_NAME) {
                // A server of files may have renamed it, and its answer be lost.
                Err(_) if self.has(STATE_NAME, &file) => Ok(()),
                renamed => Ok(renamed?),
            }
        };
        commit().map_err(self.failed())?;
        // The snapshot is the new one from here on.
        let synced = self.file.sync_data().inspect_err(|error| {
            log::error!(
                "{}: if the host stops now, the earlier snapshot may be back: {error}",
                self.name
            );
        });
        Ok(Committed { is_durable: synced.is_ok(), files: state.files() })
    }

    /// Removes the files of the snapshot before a committed one, if the latter is certain on the disk.
    /// This frees their blocks, which takes long for large files: do it while the guest runs.
    pub(in super::super) fn remove_earlier(&self, committed: &Committed) {
        if committed.is_durable
            && let Err(error) = self.remove_others(&committed.files)
        {
            log::warn!("{}: the earlier snapshot is not removed: {error}", self.name);
        }
    }

    /// Returns whether a file is in the directory, under this name.
    pub(in super::super) fn has(&self, name: &str, file: &File) -> bool {
        let named = rustix::fs::statat(&self.file, name, AtFlags::SYMLINK_NOFOLLOW);
        let opened = rustix::fs::fstat(file);
        named.is_ok_and(|named| {
            opened
                .is_ok_and(|opened| (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino))
        })
    }

    /// Removes the new file of a snapshot that was not committed.
    pub(in super::super) fn discard(&self, name: &str) {
        if let Err(error) = self.remove(name) {
            log::warn!("{} {name}: {error}", self.name);
        }
    }

    /// Makes the directory accessible to a user, if this process has created it.
    pub(in super::super) fn set_owner(&self, identity: Identity) -> io::Result<()> {
        let Identity { user, group } = identity;
        match self.is_new {
            true => fchown(&self.file, Some(user), Some(group)),
            false => Ok(()),
        }
    }

    /// Removes what a process that was killed has left beside a snapshot, or before the first one.
    /// Otherwise these files fill the disk until a later snapshot is complete.
    fn remove_leftovers(&self, path: &Path) {
        // The state may have been renamed by a process that could not write this to the disk.
        let removed = self.file.sync_data().and_then(|()| match read_state(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.remove_others(&[]),
            // A state of another version names files, too.
            text => match text.ok().and_then(|text| VmState::parse(&text).ok()) {
                Some(state) => self.remove_others(&state.files()),
                None => Ok(()),
            },
        });
        if let Err(error) = removed {
            log::warn!("{}: files of a snapshot that was not taken remain: {error}", self.name);
        }
    }

    /// Removes all files of memory and changes but those of a state.
    fn remove_others(&self, kept: &[String]) -> io::Result<()> {
        for (_, name) in self.data_files()? {
            if !kept.contains(&name) {
                log::debug!("{}: {name} is removed", self.name);
                self.remove(&name)?;
            }
        }
        self.remove_partial_state()
    }

    fn remove_partial_state(&self) -> io::Result<()> {
        match self.remove(PARTIAL_STATE_NAME) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// Returns number and name of each file of memory or changes.
    fn data_files(&self) -> io::Result<Vec<(u64, String)>> {
        let mut files = Vec::new();
        for entry in Dir::read_from(&self.file)? {
            let name = entry?.file_name().to_owned();
            let Ok(name) = name.into_string() else { continue };
            let number = [MEMORY_PREFIX, CHANGES_PREFIX]
                .into_iter()
                .find_map(|prefix| file_number(prefix, &name));
            files.extend(number.map(|number| (number, name)));
        }
        Ok(files)
    }

    fn create(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        Ok(File::from(rustix::fs::openat(&self.file, name, flags, Mode::RUSR | Mode::WUSR)?))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.file, name, AtFlags::empty())?)
    }

    fn failed(&self) -> impl FnOnce(io::Error) -> VmError {
        failed(self.name.as_str())
    }
}

/// Writes the entry of a new directory to the disk.
fn sync_parent(path: &Path) -> io::Result<()> {
    match File::open(folder_of(path)) {
        // A directory that may be changed but not read cannot be opened.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        opened => opened?.sync_all(),
    }
}

/// Returns the number in the name of a file, after the prefix.
pub(super) fn file_number(prefix: &str, name: &str) -> Option<u64> {
    let number = name.strip_prefix(prefix)?;
    number.bytes().all(|byte| byte.is_ascii_digit()).then(|| number.parse().ok()).flatten()
}

/// Reads the state of the snapshot in a directory.
pub(super) fn read_state(path: &Path) -> io::Result<String> {
    let path = path.join(STATE_NAME);
    let no_snapshot = |error: io::Error| match Errno::from_io_error(&error) {
        Some(Errno::NOENT | Errno::NOTDIR) => {
            let text = format!("there is no snapshot: {} does not exist", path.display());
            io::Error::new(error.kind(), text)
        }
        _ => error,
    };
    let state = open_regular(&path).map_err(no_snapshot)?;
    let mut text = String::new();
    let size = state.take(MAX_STATE_SIZE + 1).read_to_string(&mut text)?;
    if size as u64 > MAX_STATE_SIZE {
        return Err(io::Error::other("the state has more than 64M"));
    }
    Ok(text)
}

/// Opens a file of a snapshot, whose directory another user may have filled.
pub(super) fn open_regular(path: &Path) -> io::Result<File> {
    open_without_links(OpenOptions::new().read(true), path)
}

/// Opens a regular file: a link could name any file that this user may access, and a pipe or device would
/// never end.
pub(super) fn open_without_links(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
    let file = file.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::LOOP) => {
            io::Error::other("it is a symbolic link, which a restore does not follow")
        }
        // A pipe without a reader, or a socket.
        Some(Errno::NXIO) => not_regular(),
        _ => error,
    })?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(not_regular()),
    }
}

fn not_regular() -> io::Error {
    io::Error::other("it is not a regular file")
}
