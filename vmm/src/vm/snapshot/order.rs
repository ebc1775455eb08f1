// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Order file: the parts of a snapshot's memory that a guest accesses after its restore, in their
//! order. The first restore records them, and later ones copy them before the guest runs.
//!
//! The first line names the format and the checksum of the memory, so that the file of another
//! snapshot is recognised. Each other line is an offset in the memory file.

use std::{
    collections::BTreeSet,
    fs::{File, OpenOptions},
    io::{self, Read as _, Write as _},
    path::Path,
};

use super::super::outcome::{VmError, failed};
use crate::memory::on_demand::Order;

const FORMAT: &str = "granule.order/1";
/// Smallest page, of which offsets are multiples.
const PAGE: u64 = 4096;
/// Maximum size: the parts of some terabytes.
const MAX_SIZE: u64 = 1 << 30;

/// An order file, which is open since the process was confined.
#[derive(Debug)]
pub struct OrderFile {
    file: File,
    name: String,
    memory_crc: u32,
    order: Option<Order>,
}

impl OrderFile {
    /// Opens the order file of a snapshot, or creates it.
    ///
    /// # Errors
    /// It cannot be opened, or is that of another snapshot.
    pub fn open(path: &Path, memory_crc: u32) -> Result<Self, VmError> {
        let name = format!("order={}", path.display());
        let read = || -> io::Result<(File, String)> {
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create(true).truncate(false).open(path)?;
            let mut text = String::new();
            (&file).take(MAX_SIZE).read_to_string(&mut text)?;
            Ok((file, text))
        };
        let (file, text) = read().map_err(failed(name.as_str()))?;
        let order = match text.is_empty() {
            true => None,
            false => Some(parse(&text, memory_crc).map_err(failed(name.as_str()))?),
        };
        Ok(Self { file, name, memory_crc, order })
    }

    /// Returns the recorded order; `None` if this run records it.
    pub fn order(&self) -> Option<&[u64]> {
        self.order.as_deref()
    }

    /// Writes the order of this run's accesses.
    pub fn write(&self, order: &[u64]) -> Result<(), VmError> {
        let mut text = header(self.memory_crc);
        let mut seen = BTreeSet::new();
        for offset in order.iter().filter(|offset| seen.insert(**offset)) {
            text += &format!("{offset}\n");
        }
        (&self.file).write_all(text.as_bytes()).map_err(failed(self.name.as_str()))
    }
}

fn header(memory_crc: u32) -> String {
    format!("{FORMAT} {memory_crc:08x}\n")
}

fn parse(text: &str, memory_crc: u32) -> Result<Order, String> {
    let Some(lines) = text.strip_prefix(header(memory_crc).as_str()) else {
        return Err("it is not the order file of this snapshot: remove it to record it".to_owned());
    };
    let offset = |line: &str| {
        let offset = line.parse().ok().filter(|offset: &u64| offset.is_multiple_of(PAGE));
        offset.ok_or_else(|| format!("'{line}' is not an offset: remove the file to record it"))
    };
    lines.lines().map(offset).collect()
}

#[cfg(test)]
mod tests {
    use std::{error::Error, fs};

    use super::*;

    #[test]
    fn an_order_is_recorded_once_and_read_afterwards() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("order");

        let first = OrderFile::open(&path, 7).unwrap();
        assert_eq!(first.order(), None);
        first.write(&[3 * PAGE, 0, 3 * PAGE]).unwrap();

        assert_eq!(OrderFile::open(&path, 7).unwrap().order().unwrap(), [3 * PAGE, 0]);
    }

    #[test]
    fn the_file_of_another_snapshot_and_other_lines_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("order");
        OrderFile::open(&path, 7).unwrap().write(&[0]).unwrap();
        let refusal = |crc| {
            let error = OrderFile::open(&path, crc).unwrap_err();
            error.source().unwrap().to_string()
        };

        assert!(refusal(8).contains("not the order file of this snapshot"));
        fs::write(&path, header(7) + "5\n").unwrap();
        assert!(refusal(7).contains("'5' is not an offset"));
    }
}
