// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest memory in the files of a [snapshot](super::snapshot): all of it, and files of changes to it.

use std::{fs::File, sync::Arc};

use granule_types::units::Bytes;

use super::{
    outcome::{VmError, failed},
    signals,
    snapshot::{ChangesState, MAX_CHANGES_FILES, SnapshotDirectory},
};
use crate::memory::{
    GuestMemory,
    changes::Changes,
    image::{self, ImageData},
};

/// Part of the data of a memory file that the files of its changes may have together. A restore reads
/// all of them, and with this part it reads at most one and a half times the data.
const MAX_CHANGES_PART: u64 = 2;

/// Guest memory in the files of a snapshot.
#[derive(Debug)]
pub struct SavedMemory {
    /// Name of the memory file.
    pub name: String,
    /// Data of the memory file.
    pub data: ImageData,
    /// Files of changes, the oldest first.
    pub changes: Vec<ChangesState>,
    /// Bytes in the new file.
    pub written: Bytes,
    new_file: Arc<File>,
    /// The files before the new one.
    earlier_files: Vec<Arc<File>>,
}

impl SavedMemory {
    /// Writes all memory.
    ///
    /// # Errors
    /// The file cannot be written; it is then removed.
    pub fn write_all(memory: &GuestMemory, directory: &SnapshotDirectory) -> Result<Self, VmError> {
        let (name, file) = directory.create_memory()?;
        let data = image::save(memory, &directory.page_map, &file, &signals::none_is_pending)
            .map_err(failed(format!("{} {name}", directory.description())))
            .inspect_err(|_| directory.discard(&name))?;
        Ok(Self {
            name,
            data,
            changes: Vec::new(),
            written: data.bytes,
            new_file: Arc::new(file),
            earlier_files: Vec::new(),
        })
    }

    /// Writes changes to this memory.
    ///
    /// # Errors
    /// As for [`Self::write_all`].
    pub fn write_changes(
        &self,
        changes: &Changes<'_>,
        directory: &SnapshotDirectory,
    ) -> Result<Self, VmError> {
        let (name, file) = directory.create_changes()?;
        let data = changes
            .save(&file, &signals::none_is_pending)
            .map_err(failed(format!("{} {name}", directory.description())))
            .inspect_err(|_| directory.discard(&name))?;
        let state = ChangesState { name, bytes: data.bytes, crc: data.crc };
        Ok(Self {
            name: self.name.clone(),
            data: self.data,
            changes: self.changes.iter().cloned().chain([state]).collect(),
            written: data.bytes,
            new_file: Arc::new(file),
            earlier_files: self.files().cloned().collect(),
        })
    }

    /// Returns the name of the new file.
    pub fn new_name(&self) -> &str {
        self.changes.last().map_or(&self.name, |changes| &changes.name)
    }

    /// Returns the new file.
    pub fn new_file(&self) -> &File {
        &self.new_file
    }

    fn files(&self) -> impl Iterator<Item = &Arc<File>> {
        self.earlier_files.iter().chain([&self.new_file])
    }

    /// Returns whether all files are still in the directory, under their names.
    pub fn exists(&self, directory: &SnapshotDirectory) -> bool {
        let changes = self.changes.iter().map(|changes| &changes.name);
        let names = [&self.name].into_iter().chain(changes);
        names.zip(self.files()).all(|(name, file)| directory.has(name, file))
    }

    /// Returns whether the data of further changes leaves a restore fast enough.
    pub fn has_space_for(&self, data: Bytes) -> bool {
        let earlier: u64 = self.changes.iter().map(|changes| changes.bytes.0).sum();
        let bytes = earlier.saturating_add(data.0);
        bytes <= self.data.bytes.0 / MAX_CHANGES_PART && self.changes.len() < MAX_CHANGES_FILES
    }
}
