// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The file of a ledger: JSON Lines, to which one line is added at a time.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use super::line::{Key, Line, SCHEMA};
use crate::{
    command::CommandError,
    error::LabError,
    file_lock::FileLock,
    shell::{Shell, absolute},
};

#[derive(Debug)]
pub struct LedgerFile {
    path: PathBuf,
    text: String,
    lines: Vec<Line>,
}

impl LedgerFile {
    /// Reads a ledger; a missing file is an empty one. Refuses any other file, and a ledger whose
    /// last line is truncated.
    pub fn open(path: &Path) -> Result<Self, LabError> {
        let path = absolute(path)?;
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            text => text.map_err(|error| CommandError::file("read the ledger", &path, error))?,
        };
        if let Some(directory) = path.parent().filter(|directory| !directory.is_dir()) {
            return Err(LabError::Unusable(format!(
                "the directory of the ledger, {}, does not exist: create it",
                directory.display()
            )));
        }
        let lines = parse(&text).map_err(|(number, reason)| {
            let path = path.display();
            LabError::Unusable(format!("{path}, line {number}: {reason}"))
        })?;
        Ok(Self { path, text, lines })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn lines(&self) -> &[Line] {
        &self.lines
    }

    /// Returns the last line with a key.
    pub fn find(&self, key: &Key) -> Option<&Line> {
        self.lines.iter().rev().find(|line| line.key == *key)
    }

    /// Adds a line, unless the last one with its key is equal. A reader sees the file without or
    /// with the whole line.
    pub fn append(&mut self, line: Line) -> Result<(), LabError> {
        // Another run may have added lines in the meantime, and adds no line from here on. The file
        // is replaced, so the lock is that of its directory.
        let directory = self.path.parent().unwrap_or(&self.path);
        let locked = File::open(directory).and_then(FileLock::exclusive);
        let _lock = locked.map_err(|error| CommandError::file("lock", directory, error))?;
        *self = Self::open(&self.path)?;
        if self.find(&line.key) == Some(&line) {
            return Ok(());
        }
        self.text += &format!("{}\n", serde_json::to_string(&line)?);
        self.lines.push(line);
        Ok(Shell::new(false).replace(&self.path, &self.text)?)
    }
}

/// Parses a ledger. The error contains the number of the line.
fn parse(text: &str) -> Result<Vec<Line>, (usize, String)> {
    let count = text.lines().count();
    let parse_line = |(index, text_of_line): (usize, &str)| {
        let schema = serde_json::from_str::<serde_json::Value>(text_of_line)
            .ok()
            .and_then(|value| Some(value.get("schema")?.as_str()?.to_owned()));
        let reason = match (schema, serde_json::from_str::<Line>(text_of_line)) {
            (Some(schema), Ok(line)) if schema == SCHEMA => return Ok(line),
            (Some(schema), Err(error)) if schema == SCHEMA => {
                format!("the line is damaged: {error}")
            }
            (None, _) if index > 0 && index + 1 == count && !text.ends_with('\n') => {
                "the line is truncated: delete it".to_owned()
            }
            (None, _) if index > 0 => "the line is damaged: restore or delete it".to_owned(),
            _ => format!("the file is no ledger ({SCHEMA}): set another file"),
        };
        Err((index + 1, reason))
    };
    let lines: Vec<Line> = text.lines().enumerate().map(parse_line).collect::<Result<_, _>>()?;
    match text.is_empty() || text.ends_with('\n') {
        true => Ok(lines),
        false => Err((count, "the line has no end: add a newline, or delete the line".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::line::tests::line, *};

    #[test]
    fn lines_are_appended_and_found_by_their_keys() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ledger.jsonl");
        let mut file = LedgerFile::open(&path).unwrap();
        let mut same_revision = line("6.1.2", 7);
        same_revision.key.compiler = "clang".to_owned();

        file.append(line("6.1.2", 7)).unwrap();
        let first = fs::read_to_string(&path).unwrap();
        file.append(same_revision.clone()).unwrap();
        file.append(line("6.1.2", 7)).unwrap();

        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(&first), "{text}");
        let read = LedgerFile::open(&path).unwrap();
        assert_eq!(read.lines(), [line("6.1.2", 7), same_revision.clone()]);
        assert_eq!(read.find(&same_revision.key), Some(&same_revision));
        assert_eq!(read.find(&line("6.12.1", 7).key), None);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn lines_that_another_run_added_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ledger.jsonl");
        let (mut one, mut other) =
            (LedgerFile::open(&path).unwrap(), LedgerFile::open(&path).unwrap());

        one.append(line("6.1.2", 7)).unwrap();
        other.append(line("6.12.1", 7)).unwrap();

        assert_eq!(LedgerFile::open(&path).unwrap().lines().len(), 2);
    }

    #[test]
    fn lines_of_runs_at_the_same_time_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ledger.jsonl");
        let lines: Vec<Line> = (0..16).map(|run| line(&format!("6.1.{run}"), run)).collect();

        std::thread::scope(|scope| {
            for line in &lines {
                let mut file = LedgerFile::open(&path).unwrap();
                scope.spawn(move || file.append(line.clone()).unwrap());
            }
        });

        assert_eq!(LedgerFile::open(&path).unwrap().lines().len(), lines.len());
    }

    #[test]
    fn any_other_file_is_refused_and_unchanged() {
        let directory = tempfile::tempdir().unwrap();
        let whole = serde_json::to_string(&line("6.1.2", 7)).unwrap();
        let other_schema = whole.replace(SCHEMA, "granule.ledger/2");
        let without_tree = whole.replace("\"tree\"", "\"wood\"");
        for (text, reason) in [
            ("<!doctype html>\n".to_owned(), "line 1: the file is no ledger"),
            ("# Ledger\n".to_owned(), "line 1: the file is no ledger"),
            (format!("{other_schema}\n"), "line 1: the file is no ledger"),
            (format!("{without_tree}\n"), "line 1: the line is damaged: missing field `tree`"),
            (whole.clone(), "line 1: the line has no end"),
            (format!("{whole}\n{}", &whole[..50]), "line 2: the line is truncated"),
            (format!("{whole}\n{}\n{whole}\n", &whole[..50]), "line 2: the line is damaged"),
        ] {
            let path = directory.path().join("file");
            fs::write(&path, &text).unwrap();

            let error = LedgerFile::open(&path).unwrap_err().to_string();

            assert!(error.contains(reason), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert!(LedgerFile::open(directory.path()).is_err());
        let error = LedgerFile::open(&directory.path().join("no/ledger.jsonl")).unwrap_err();
        assert!(error.to_string().contains("does not exist: create it"), "{error}");
    }
}
