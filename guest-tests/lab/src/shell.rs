// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Executes commands and file operations or, in a dry run, prints them as shell. A dry run executes
//! read-only file operations.

use std::{
    collections::BTreeMap,
    fmt, fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

pub use granule_report::digest::sha256;
use granule_report::digest::sha256_of;

use crate::command::{Command, CommandError, quote};

/// Executor of commands and file operations; prints them in a dry run.
#[derive(Debug, Clone, Copy)]
pub struct Shell {
    mode: Mode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Execute,
    Print,
    /// A dry run that prints nothing.
    Silent,
}

impl Shell {
    /// Returns a shell that executes operations or, if `dry_run`, only prints them.
    pub const fn new(dry_run: bool) -> Self {
        Self { mode: if dry_run { Mode::Print } else { Mode::Execute } }
    }

    /// Returns a shell that neither executes nor prints operations.
    pub const fn silent() -> Self {
        Self { mode: Mode::Silent }
    }

    pub const fn is_dry_run(self) -> bool {
        !matches!(self.mode, Mode::Execute)
    }

    /// Prints a line in a dry run; otherwise has no effect.
    pub fn print(self, line: impl fmt::Display) {
        if self.mode == Mode::Print {
            // A reader may close the pipe early (`| head`); that is not an error.
            let _ = writeln!(io::stdout(), "{line}");
        }
    }

    pub fn run(self, command: &Command) -> Result<(), CommandError> {
        if self.is_dry_run() {
            self.print(command);
            return Ok(());
        }
        command.run()
    }

    pub fn create_dir(self, path: &Path) -> Result<(), CommandError> {
        self.print(format_args!("mkdir -p {}", quote(path)));
        self.perform("create the directory", path, || fs::create_dir_all(path))
    }

    pub fn write(self, path: &Path, content: impl AsRef<[u8]>) -> Result<(), CommandError> {
        if self.is_dry_run() {
            let text = String::from_utf8_lossy(content.as_ref()).into_owned();
            self.print(format_args!("printf %s {} >{}", quote(text), quote(path)));
        }
        self.perform("write", path, || fs::write(path, content))
    }

    /// Replaces a file, or creates it: a reader sees the earlier content or all of the new one.
    pub fn replace(self, path: &Path, content: impl AsRef<[u8]>) -> Result<(), CommandError> {
        let partial = partial_path(path);
        self.write(&partial, content)?;
        self.rename(&partial, path)
    }

    pub fn copy(self, from: &Path, to: &Path) -> Result<(), CommandError> {
        self.print(format_args!("cp {} {}", quote(from), quote(to)));
        self.perform("copy", from, || fs::copy(from, to).map(drop))
    }

    pub fn rename(self, from: &Path, to: &Path) -> Result<(), CommandError> {
        self.print(format_args!("mv -T {} {}", quote(from), quote(to)));
        self.perform("rename", from, || fs::rename(from, to))
    }

    /// Removes a directory and its contents, if it exists.
    pub fn remove_dir(self, path: &Path) -> Result<(), CommandError> {
        self.print(format_args!("rm -rf {}", quote(path)));
        self.perform("remove", path, || match fs::remove_dir_all(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        })
    }

    fn perform(
        self,
        operation: &'static str,
        path: &Path,
        action: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), CommandError> {
        if self.is_dry_run() {
            return Ok(());
        }
        action().map_err(|e| CommandError::file(operation, path, e))
    }
}

/// Returns the path at which `path` is written before it is renamed.
pub fn partial_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    path.with_file_name(name)
}

pub fn absolute(path: &Path) -> Result<PathBuf, CommandError> {
    std::path::absolute(path).map_err(|e| CommandError::file("find", path, e))
}

pub fn read(path: &Path) -> Result<Vec<u8>, CommandError> {
    fs::read(path).map_err(|e| CommandError::file("read", path, e))
}

/// Returns the names of a directory's entries, sorted.
pub fn sorted_entries(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// SHA-256 of files, each read once.
#[derive(Debug, Default)]
pub struct FileHashes(Mutex<BTreeMap<PathBuf, String>>);

impl FileHashes {
    pub fn sha256(&self, path: &Path) -> Result<String, CommandError> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(hash) = known.get(path) {
            return Ok(hash.clone());
        }
        let hash = fs::File::open(path)
            .and_then(sha256_of)
            .map_err(|error| CommandError::file("read", path, error))?;
        known.insert(path.to_owned(), hash.clone());
        Ok(hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dry_run_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x");
        let shell = Shell::new(true);

        shell.create_dir(&path).unwrap();
        shell.write(&path, "x").unwrap();
        shell.run(&Command::new("x", "touch").arg(&path)).unwrap();

        assert!(!path.exists());
    }
}
