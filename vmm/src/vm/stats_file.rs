// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where `--stats` goes: a line for each life of a guest, written when it ends.

use std::{
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
};

use granule_types::record::Host;

use super::{
    config::VmConfig,
    stats::{self, Life, Record},
};

/// The file, and what it says of its origin.
pub(super) struct Report {
    pub(super) path: PathBuf,
    file: File,
    /// Whether a life is in it already.
    begun: bool,
    host: Host,
}

impl Report {
    /// Opens it. What another run left there stays until there is something to write.
    pub(super) fn open(path: &Path, host: Host) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            file: File::options().create(true).append(true).open(path)?,
            begun: false,
            host,
        })
    }

    /// Writes a life that ended in this way.
    pub(super) fn write(
        &mut self,
        config: &VmConfig,
        ended: &'static str,
        life: &Life,
    ) -> io::Result<()> {
        let record = Record {
            schema: stats::SCHEMA,
            host: &self.host,
            config,
            ended,
            marks: life.marks(),
            phases: life.phases(),
        };
        let mut line = serde_json::to_vec(&record)?;
        line.push(b'\n');
        if !std::mem::replace(&mut self.begun, true) {
            self.file.set_len(0).or_else(|error| match error.kind() {
                // A pipe or a terminal.
                io::ErrorKind::InvalidInput => Ok(()),
                _ => Err(error),
            })?;
        }
        (&self.file).write_all(&line)
    }
}
