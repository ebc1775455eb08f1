// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Order file: the parts of a snapshot's memory that a guest accesses after its restore. The first
//! restore records them, and later ones copy them before the guest runs.
//!
//! The first line names the format, the checksum of memory's contents, so that the file of another
//! snapshot is recognised, and the checksum of the other lines. Each other line is a part: its offset in
//! the memory file and its length, in bytes.
//!
//! The first line is written when the others are on the disk: a file without it is empty or has zeros in
//! its place, and is recorded again. A temporary file and its renaming would need more rights of the
//! confined process (`vm::sandbox`): to create and remove files in the folder. The process that records
//! holds a lock (`flock`), because the parts of two could mix; others start without an order meanwhile.

use std::{
    error::Error,
    fs::{File, OpenOptions, TryLockError},
    io::{self, Read as _},
    ops::Range,
    os::unix::fs::FileExt as _,
    path::Path,
};

use super::{
    super::outcome::{VmError, failed},
    directory::{open_regular, open_without_links},
    state::checksum,
};
use crate::memory::on_demand::Order;

const FORMAT: &str = "granule.order/3";
/// Smallest page, of which offsets and lengths are multiples.
const PAGE: u64 = 4096;
/// Maximum size: the parts of some terabytes.
const MAX_SIZE: u64 = 1 << 30;

/// An order file.
#[derive(Debug)]
pub struct OrderFile {
    contents: Contents,
    name: String,
    memory_crc: u32,
}

#[derive(Debug)]
enum Contents {
    Recorded(Order),
    /// A file to write, locked and open since the process was confined.
    Missing(File),
    /// Another process records it.
    Locked,
}

impl OrderFile {
    /// Reads the order file of a snapshot, or opens it to record it, and creates it if needed.
    ///
    /// # Errors
    /// It cannot be opened, or is that of another snapshot.
    pub fn open(path: &Path, memory_crc: u32) -> Result<Self, VmError> {
        let name = format!("order={}", path.display());
        let recorded = || recorded(path, memory_crc).map_err(failed(name.as_str()));
        let contents = match recorded()? {
            Some(order) => Contents::Recorded(order),
            None => {
                let mut options = OpenOptions::new();
                options.write(true).create(true).truncate(false);
                let file = open_without_links(&mut options, path);
                let file = file.map_err(failed(name.as_str()))?;
                match file.try_lock() {
                    // Another process may have recorded it before the lock.
                    Ok(()) => recorded()?.map_or(Contents::Missing(file), Contents::Recorded),
                    Err(TryLockError::WouldBlock) => Contents::Locked,
                    Err(TryLockError::Error(error)) => return Err(failed(name.as_str())(error)),
                }
            }
        };
        Ok(Self { contents, name, memory_crc })
    }

    /// Returns the recorded order, which is empty while another process records it; `None` if this run
    /// records it.
    pub fn order(&self) -> Option<&[Range<u64>]> {
        match &self.contents {
            Contents::Recorded(order) => Some(order),
            Contents::Missing(_) => None,
            Contents::Locked => Some(&[]),
        }
    }

    /// Writes the order of this run's accesses, unless the file has one.
    ///
    /// # Errors
    /// The file cannot be written, and has no order.
    pub fn write(&self, order: &[Range<u64>]) -> Result<(), VmError> {
        let Contents::Missing(file) = &self.contents else {
            return Ok(());
        };
        write(file, self.memory_crc, order).map_err(failed(self.name.as_str()))
    }
}

/// Returns the order in a file, if there is one.
fn recorded(path: &Path, memory_crc: u32) -> Result<Option<Order>, Box<dyn Error + Send + Sync>> {
    let text = read(path)?;
    match is_unfinished(&text, header(memory_crc, "").len()) {
        true => Ok(None),
        false => Ok(Some(parse(&text, memory_crc)?)),
    }
}

/// Returns the text of a file, or an empty one if there is no file.
fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    match open_regular(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        file => drop(file?.take(MAX_SIZE).read_to_string(&mut text)?),
    }
    Ok(text)
}

/// Returns whether a file has no order yet. The zeros in place of its first line are counted, because the
/// file may be another one that starts with zeros, such as the image of a disk.
fn is_unfinished(text: &str, header_length: usize) -> bool {
    let parts = text.trim_start_matches('\0');
    let zeros = text.len() - parts.len();
    match parts.as_bytes() {
        [] => zeros <= header_length,
        [first, ..] => zeros == header_length && first.is_ascii_digit(),
    }
}

/// Writes the parts, and then the first line, in place of what the file has.
fn write(file: &File, memory_crc: u32, order: &[Range<u64>]) -> io::Result<()> {
    let mut parts = String::new();
    for part in order {
        parts += &format!("{} {}\n", part.start, part.end - part.start);
    }
    let header = header(memory_crc, &parts);
    file.set_len(0)?;
    file.write_all_at(parts.as_bytes(), header.len() as u64)?;
    file.sync_data()?;
    file.write_all_at(header.as_bytes(), 0)
}

/// Returns the first line of the order file of a snapshot, whose length does not depend on the other lines.
pub fn header(memory_crc: u32, parts: &str) -> String {
    format!("{FORMAT} {memory_crc:08x} {:08x}\n", checksum(parts))
}

/// Parses an order file of the snapshot whose memory has this checksum.
///
/// # Errors
/// It is that of another snapshot, is damaged, or has a line that is not a part behind the one before it.
pub fn parse(text: &str, memory_crc: u32) -> Result<Order, String> {
    let of_snapshot = format!("{FORMAT} {memory_crc:08x} ");
    let Some((first, lines)) = text.split_once('\n').filter(|_| text.starts_with(&of_snapshot))
    else {
        return Err("it is not the order file of this snapshot: remove it to record it".to_owned());
    };
    if !text.starts_with(&header(memory_crc, lines)) {
        let bytes = lines.len();
        return Err(format!(
            "the checksum of its {bytes} bytes behind '{first}' is another: remove it to record it"
        ));
    }
    let mut end = 0;
    let part = |line: &str| {
        let refused = |what| format!("'{line}' is {what}: remove the file to record it");
        let part = parse_part(line).ok_or_else(|| refused("not an offset and a length"))?;
        if part.start < end {
            return Err(refused("not behind the part before it"));
        }
        end = part.end;
        Ok(part)
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
    use std::{fs, os::unix::fs::symlink};

    use rustix::fs::{CWD, FileType, Mode, mknodat};

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
    fn a_recording_that_was_interrupted_is_repeated() {
        let folder = tempfile::tempdir().unwrap();
        let parts = "0 4096\n8192 8192\n";
        let (first, text) = (header(7, parts), header(7, parts) + parts);

        // The contents after each step and within one; the first line is the last step.
        for length in [0, 1, first.len(), text.len() - 4, text.len()] {
            // A program that another test starts shares the lock of a file until it executes.
            let path = folder.path().join(length.to_string());
            let zeros = length.min(first.len());
            fs::write(&path, "\0".repeat(zeros) + &text[zeros..length]).unwrap();

            let interrupted = OrderFile::open(&path, 7).unwrap();
            assert_eq!(interrupted.order(), None, "{length}");
            interrupted.write(&[0..PAGE, 2 * PAGE..4 * PAGE]).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text, "{length}");
        }
    }

    #[test]
    fn one_process_at_a_time_records() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("order");

        let first = OrderFile::open(&path, 7).unwrap();
        let second = OrderFile::open(&path, 7).unwrap();
        second.write(&[PAGE..2 * PAGE, 3 * PAGE..4 * PAGE]).unwrap();
        first.write(&[0..PAGE, 8 * PAGE..9 * PAGE]).unwrap();

        assert!(second.order().unwrap().is_empty());
        assert_eq!(
            OrderFile::open(&path, 7).unwrap().order().unwrap(),
            [0..PAGE, 8 * PAGE..9 * PAGE]
        );
    }

    #[test]
    fn a_recorded_order_is_not_opened_for_writing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("order");
        OrderFile::open(&path, 7).unwrap().write(&[0..PAGE, 2 * PAGE..4 * PAGE]).unwrap();
        let before = fs::metadata(&path).unwrap();

        let order = OrderFile::open(&path, 7).unwrap();
        order.write(&[]).unwrap();

        assert!(matches!(order.contents, Contents::Recorded(_)));
        assert_eq!(fs::metadata(&path).unwrap().len(), before.len());
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
        let write = |parts: &str| fs::write(&path, header(7, parts) + parts).unwrap();
        for line in ["5 4096", "4096", "0 5", "0 -1", "18446744073709547520 8192"] {
            write(&format!("{line}\n"));
            assert!(refusal(7).contains(&format!("'{line}' is not an offset and a length")));
        }
        write("0 8192\n4096 8192\n");
        assert!(refusal(7).contains("'4096 8192' is not behind the part before it"));
    }

    #[test]
    fn a_damaged_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("order");
        let parts = "0 4096\n8192 8192\n";
        let text = header(7, parts) + parts;

        for (damaged, refusal) in [
            (text.replace("4096", "8192"), "the checksum of its"),
            (text[..text.len() - 10].to_owned(), "the checksum of its"),
            (header(7, "").trim_end().to_owned(), "it is not the order file"),
        ] {
            fs::write(&path, damaged).unwrap();

            let error = OrderFile::open(&path, 7).unwrap_err();

            assert!(error.source().unwrap().to_string().starts_with(refusal), "{error}");
        }
    }

    #[test]
    fn links_and_pipes_are_refused_before_a_file_is_created() {
        let folder = tempfile::tempdir().unwrap();
        let [link, target, pipe] = ["link", "target", "pipe"].map(|name| folder.path().join(name));
        symlink(&target, &link).unwrap();
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let refusal = |path| {
            let error = OrderFile::open(path, 7).unwrap_err();
            error.source().unwrap().to_string()
        };

        assert!(refusal(&link).contains("symbolic link"));
        assert!(refusal(&pipe).contains("not a regular file"));
        assert!(!target.exists());
    }

    #[test]
    fn another_file_that_starts_with_zeros_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");

        let zeros = "\0".repeat(header(7, "").len());
        for contents in ["\0".repeat(8192), "\0\0".to_owned() + "5 4096\n", zeros + "x"] {
            fs::write(&path, &contents).unwrap();

            let error = OrderFile::open(&path, 7).unwrap_err();

            assert!(error.source().unwrap().to_string().contains("not the order file"), "{error}");
        }
    }
}
