// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The file of `--stats`: one line for each boot, written when the guest exits.

use std::{
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
};

use granule_types::record::Host;

use super::{
    boot_stats::{BootRecord, BootStats, SCHEMA},
    config::VmConfig,
};

/// The open file and the host's description.
pub(super) struct StatsFile {
    pub(super) path: PathBuf,
    file: File,
    /// Set when a boot of this run has been written.
    written: bool,
    host: Host,
}

impl StatsFile {
    /// Opens the file. Records of an earlier run are kept until the first write.
    pub(super) fn open(path: &Path, host: Host) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            file: File::options().create(true).append(true).open(path)?,
            written: false,
            host,
        })
    }

    /// Writes the record of a boot.
    pub(super) fn write(
        &mut self,
        config: &VmConfig,
        ended: &'static str,
        boot: &BootStats,
    ) -> io::Result<()> {
        let record = BootRecord {
            schema: SCHEMA,
            host: &self.host,
            config,
            ended,
            marks: boot.marks(),
            phases: boot.phases(),
        };
        let mut line = serde_json::to_vec(&record)?;
        line.push(b'\n');
        if !std::mem::replace(&mut self.written, true) {
            self.file.set_len(0).or_else(|error| match error.kind() {
                // The file is a pipe or a terminal.
                io::ErrorKind::InvalidInput => Ok(()),
                _ => Err(error),
            })?;
        }
        (&self.file).write_all(&line)
    }
}
