// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Order file: the parts of a snapshot's memory that a guest accesses after its restore. The first
//! restore records them, and later ones copy them before the guest runs.
//!
//! The first line names the format and the checksum of memory's contents, so that the file of another
//! snapshot is recognised. Each other line is a part: its offset in the memory file and its length, in
//! bytes.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _, Write as _},
    ops::Range,
    path::Path,
};

use super::super::outcome::{VmError, failed};
use crate::memory::on_demand::Order;

const FORMAT: &str = "granule.order/2";
/// Smallest page, of which offsets and lengths are multiples.
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
    pub fn order(&self) -> Option<&[Range<u64>]> {
        self.order.as_deref()
    }

    /// Writes the order of this run's accesses.
    pub fn write(&self, order: &[Range<u64>]) -> Result<(), VmError> {
        let mut text = header(self.memory_crc);
        for part in order {
            text += &format!("{} {}\n", part.start, part.end - part.start);
        }
        (&self.file).write_all(text.as_bytes()).map_err(failed(self.name.as_str()))
    }
}

/// Returns the first line of the order file of a snapshot.
pub fn header(memory_crc: u32) -> String {
    format!("{FORMAT} {memory_crc:08x}\n")
}

/// Parses an order file of the snapshot whose memory has this checksum.
///
/// # Errors
/// It is that of another snapshot, or has a line that is not a part.
pub fn parse(text: &str, memory_crc: u32) -> Result<Order, String> {
    let Some(lines) = text.strip_prefix(header(memory_crc).as_str()) else {
        return Err("it is not the order file of this snapshot: remove it to record it".to_owned());
    };
    let part = |line: &str| {
        parse_part(line).ok_or_else(|| {
            format!("'{line}' is not an offset and a length: remove the file to record it")
        })
    };
    lines.lines().map(part).collect()
}

fn parse_part(line: &str) -> Option<Range<u64>> {
    let (offset, length) = line.split_once(' ')?;
    let [start, length]: [u64; 2] = [offset.parse().ok()?, length.parse().ok()?];
    let is_whole = start.is_multiple_of(PAGE) && length.is_multiple_of(PAGE);
    let end = start.checked_add(length)?;
    is_whole.then_some(start..end)
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
        first.write(&[0..PAGE, 3 * PAGE..9 * PAGE]).unwrap();

        let order = OrderFile::open(&path, 7).unwrap();
        assert_eq!(order.order().unwrap(), [0..PAGE, 3 * PAGE..9 * PAGE]);
    }

    #[test]
    fn the_file_of_another_snapshot_and_other_lines_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("order");
        OrderFile::open(&path, 7).unwrap().write(&[]).unwrap();
        let refusal = |crc| {
            let error = OrderFile::open(&path, crc).unwrap_err();
            error.source().unwrap().to_string()
        };

        assert!(refusal(8).contains("not the order file of this snapshot"));
        for line in ["5 4096", "4096", "0 5", "0 -1", "18446744073709547520 8192"] {
            fs::write(&path, header(7) + line + "\n").unwrap();
            assert!(refusal(7).contains(&format!("'{line}' is not an offset and a length")));
        }
    }
}
