// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A snapshot to restore: its state, and the open files of memory that the state names.

use std::{fs::File, io, path::Path, sync::Arc};

use super::{
    super::outcome::{VmError, failed},
    VmState,
    directory::{CHANGES_PREFIX, MEMORY_PREFIX, file_number, open_regular, read_state},
};

/// Maximum number of states that are read until all files of one exist. Another VM needs a commit for
/// each, which takes longer than to open files.
pub(super) const MAX_READS: u32 = 8;

/// Maximum number of files of changes, all of which a restore reads.
pub const MAX_CHANGES_FILES: usize = 128;

/// An opened snapshot.
#[derive(Debug)]
pub struct OpenSnapshot {
    /// State of the VM.
    pub state: VmState,
    /// The memory file.
    pub memory: Arc<File>,
    /// Files of changes to it, in the order of the state.
    pub changes: Vec<Arc<File>>,
    /// Option and path, for error messages.
    pub name: String,
}

impl OpenSnapshot {
    /// Opens and checks the snapshot in a directory. The contents of its memory are checked when
    /// they are read.
    ///
    /// # Errors
    /// There is none, it is damaged, or another version has written it.
    pub fn open(path: &Path) -> Result<Self, VmError> {
        Self::open_by(path, || read_state(path))
    }

    /// Opens the snapshot whose state `read` returns. Another VM may commit a snapshot meanwhile, and
    /// remove the files that the earlier state names: `read` is then called again.
    pub(super) fn open_by(
        path: &Path,
        mut read: impl FnMut() -> io::Result<String>,
    ) -> Result<Self, VmError> {
        let name = format!("--restore {}", path.display());
        let mut read = || read().map_err(failed(name.as_str()));
        let mut text = read()?;
        let mut opened = Self::open_files(path, &name, &text);
        for _ in 1..MAX_READS {
            if opened.is_ok() {
                break;
            }
            let newer = read()?;
            if newer == text {
                break;
            }
            opened = Self::open_files(path, &name, &newer);
            text = newer;
        }
        opened
    }

    /// Parses a state and opens the files that it names.
    fn open_files(path: &Path, name: &str, text: &str) -> Result<Self, VmError> {
        let state = VmState::parse(text).map_err(failed(name))?;
        let open = |prefix: &str, kind: &str, file: &str| {
            if file_number(prefix, file).is_none() {
                let text = format!("the state names '{file}', which is no {kind} file");
                return Err(failed(name)(text));
            }
            let opened = open_regular(&path.join(file));
            Ok(Arc::new(opened.map_err(failed(format!("{name}: {file}")))?))
        };
        if state.changes.len() > MAX_CHANGES_FILES {
            let text = format!(
                "the state names {} files of changes; the maximum is {MAX_CHANGES_FILES}",
                state.changes.len()
            );
            return Err(failed(name)(text));
        }
        let memory = open(MEMORY_PREFIX, "memory", &state.memory)?;
        let changes = state.changes.iter();
        let changes = changes.map(|changes| open(CHANGES_PREFIX, "changes", &changes.name));
        let changes = changes.collect::<Result<_, _>>()?;
        Ok(Self { state, memory, changes, name: name.to_owned() })
    }
}
