// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The initramfs: a deterministic cpio archive in `newc` format.
//!
//! Entries have owner 0, time 0 and consecutive inode numbers from 1 (for the format, see the
//! kernel's `Documentation/driver-api/early-userspace/buffer-format.rst`). The archive is not
//! compressed: decompression in the emulator takes longer than reading.
//!
//! The crate `cpio` is not used: it writes header fields in lower-case hexadecimal. Other bytes
//! change the number of instructions with which the kernel unpacks them, and thus recorded results.

use std::{
    borrow::Cow,
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use crate::{
    command::{CommandError, quote},
    shell::{self, Shell},
};

const DIRECTORY_MODE: u32 = 0o040_755;
const PROGRAM_MODE: u32 = 0o100_755;
const FILE_MODE: u32 = 0o100_644;
const CHARACTER_DEVICE_MODE: u32 = 0o020_600;

/// Directories that exist before PID 1 mounts file systems.
const DIRECTORIES: [&str; 4] = ["dev", "proc", "sys", "tmp"];

/// Granularity of holes in a sparse file, in bytes.
const HOLE_SIZE: usize = 1 << 16;

#[derive(Debug)]
pub struct ArchiveEntry<'a> {
    path: Cow<'static, str>,
    mode: u32,
    content: EntryContent<'a>,
}

#[derive(Debug)]
enum EntryContent<'a> {
    File(PathBuf),
    Text(&'a str),
    Archive(Vec<ArchiveEntry<'a>>),
    Directory,
}

impl<'a> ArchiveEntry<'a> {
    pub fn program(path: impl Into<Cow<'static, str>>, file: &Path) -> Self {
        let path = path.into();
        Self { path, mode: PROGRAM_MODE, content: EntryContent::File(file.to_owned()) }
    }

    pub fn file(path: impl Into<Cow<'static, str>>, file: &Path) -> Self {
        let path = path.into();
        Self { path, mode: FILE_MODE, content: EntryContent::File(file.to_owned()) }
    }

    pub fn text(path: &'static str, text: &'a str) -> Self {
        let path = path.into();
        Self { path, mode: FILE_MODE, content: EntryContent::Text(text) }
    }

    pub fn archive(path: &'static str, entries: Vec<Self>) -> Self {
        let path = path.into();
        Self { path, mode: FILE_MODE, content: EntryContent::Archive(entries) }
    }

    /// Returns a directory, which must precede its files.
    pub fn directory(path: impl Into<Cow<'static, str>>) -> Self {
        Self { path: path.into(), mode: DIRECTORY_MODE, content: EntryContent::Directory }
    }

    /// Returns the path without the leading slash.
    fn name(&self) -> &str {
        self.path.trim_start_matches('/')
    }
}

/// Returns an archive with the directories, the console device and these entries.
pub fn pack(entries: &[ArchiveEntry<'_>]) -> Result<Vec<u8>, CommandError> {
    let mut archive = Vec::new();
    let mut inodes = 1..;
    let mut add = |name: &str, mode, rdev, content: &[u8]| {
        append_entry(&mut archive, name, inodes.next().unwrap_or(0), mode, rdev, content)
            .map_err(|e| CommandError::file("pack", name, e))
    };
    for name in DIRECTORIES {
        add(name, DIRECTORY_MODE, (0, 0), &[])?;
    }
    add("dev/console", CHARACTER_DEVICE_MODE, (5, 1), &[])?;
    for entry in entries {
        let content = match &entry.content {
            EntryContent::File(file) => shell::read(file)?,
            EntryContent::Text(text) => text.as_bytes().to_vec(),
            EntryContent::Archive(entries) => pack(entries)?,
            EntryContent::Directory => Vec::new(),
        };
        add(entry.name(), entry.mode, (0, 0), &content)?;
    }
    append_entry(&mut archive, "TRAILER!!!", 0, 0, (0, 0), &[])
        .map_err(|e| CommandError::file("pack", "TRAILER!!!", e))?;
    Ok(archive)
}

fn append_entry(
    archive: &mut Vec<u8>,
    name: &str,
    inode: u32,
    mode: u32,
    (major, minor): (u32, u32),
    content: &[u8],
) -> io::Result<()> {
    let too_large = |_| io::Error::other("a file of 4G or more does not fit an initramfs");
    let size = u32::try_from(content.len()).map_err(too_large)?;
    let name_size = u32::try_from(name.len() + 1).map_err(too_large)?;
    archive.extend(b"070701");
    // ino, mode, uid, gid, nlink, mtime, filesize, dev ×2, rdev ×2, namesize, check
    for field in [inode, mode, 0, 0, 1, 0, size, 0, 0, major, minor, name_size, 0] {
        archive.extend(format!("{field:08X}").bytes());
    }
    archive.extend(name.bytes());
    archive.push(0);
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend(content);
    archive.resize(archive.len().next_multiple_of(4), 0);
    Ok(())
}

/// Writes an archive to a sparse file, because a disk image consists mostly of zeros.
pub fn write_sparse(archive: &[u8], path: &Path) -> io::Result<()> {
    let file = File::create(path)?;
    file.set_len(archive.len() as u64)?;
    for (offset, part) in (0..).step_by(HOLE_SIZE).zip(archive.chunks(HOLE_SIZE)) {
        if part.iter().any(|byte| *byte != 0) {
            file.write_all_at(part, offset)?;
        }
    }
    Ok(())
}

/// Prints the shell commands that build an equivalent archive from the directory `root`.
pub fn print_commands(
    shell: Shell,
    entries: &[ArchiveEntry<'_>],
    root: &Path,
    archive: &Path,
) -> Result<(), CommandError> {
    for name in DIRECTORIES {
        shell.create_dir(&root.join(name))?;
    }
    for entry in entries {
        let path = root.join(entry.name());
        match &entry.content {
            EntryContent::File(file) => shell.copy(file, &path)?,
            EntryContent::Text(text) => shell.write(&path, text)?,
            EntryContent::Directory => shell.create_dir(&path)?,
            EntryContent::Archive(entries) => {
                print_commands(shell, entries, &root.with_extension(entry.name()), &path)?;
            }
        }
    }
    shell.print(format_args!(
        "(cd {} && find . | LC_ALL=C sort | cpio -o -H newc --reproducible -R 0:0) >{}",
        quote(root),
        quote(archive)
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample_archive() -> Vec<u8> {
        pack(&[
            ArchiveEntry::archive("/init", Vec::new()),
            ArchiveEntry::directory("/data"),
            ArchiveEntry::text("job.json", "{}"),
        ])
        .unwrap()
    }

    #[test]
    fn zeros_are_holes_in_the_file() {
        use std::os::unix::fs::MetadataExt as _;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("archive");
        let mut archive = vec![0; 5 * HOLE_SIZE + 3];
        archive[HOLE_SIZE] = 1;
        archive[5 * HOLE_SIZE + 2] = 2;

        write_sparse(&archive, &path).unwrap();

        assert_eq!(std::fs::read(&path).unwrap(), archive);
        assert!(std::fs::metadata(&path).unwrap().blocks() * 512 < 4 * HOLE_SIZE as u64);
    }

    #[test]
    fn cpio_lists_the_entries() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("archive");
        std::fs::write(&path, sample_archive()).unwrap();
        let Ok(output) =
            std::process::Command::new("cpio").args(["-it", "--quiet", "-F"]).arg(&path).output()
        else {
            return granule_types::testing::skip("cpio is not installed");
        };

        let names = String::from_utf8(output.stdout).unwrap();

        assert_eq!(
            names.lines().collect::<Vec<_>>(),
            ["dev", "proc", "sys", "tmp", "dev/console", "init", "data", "job.json"]
        );
    }
}
