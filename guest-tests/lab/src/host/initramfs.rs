// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The initramfs: a deterministic cpio archive in `newc` format.
//!
//! Owner 0, time 0, inode numbers from 1 in the order of the entries (format:
//! `Documentation/driver-api/early-userspace/buffer-format.rst` of the kernel). The archive is not
//! compressed: decompression in the emulator takes longer than reading.
//!
//! The `cpio` crate writes header fields in lower-case hexadecimal. With it, the bytes, and so the
//! instructions that a kernel takes to unpack them, would differ from those of recorded results.

use std::{
    fs::File,
    io::{self, Write},
    os::unix::fs::FileExt as _,
    path::Path,
};

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const DATA: u32 = 0o100_644;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// Granularity of holes in the file.
const HOLE: usize = 1 << 16;

/// Writes an archive to a file, with holes for zeros: a disk image consists mostly of zeros.
pub fn write_sparse(archive: &[u8], path: &Path) -> io::Result<()> {
    let file = File::create(path)?;
    file.set_len(archive.len() as u64)?;
    for (offset, part) in (0..).step_by(HOLE).zip(archive.chunks(HOLE)) {
        if part.iter().any(|byte| *byte != 0) {
            file.write_all_at(part, offset)?;
        }
    }
    Ok(())
}

/// An archive under construction.
#[derive(Debug)]
pub struct Initramfs<W> {
    to: W,
    inode: u32,
    written: usize,
}

impl<W: Write> Initramfs<W> {
    /// Starts an archive with the directories and the console that PID 1 needs before it mounts.
    pub fn new(to: W) -> io::Result<Self> {
        let mut archive = Self { to, inode: 0, written: 0 };
        for name in ["dev", "proc", "sys", "tmp"] {
            archive.entry(name, DIRECTORY, (0, 0), &[])?;
        }
        archive.entry("dev/console", CHARACTER_DEVICE, (5, 1), &[])?;
        Ok(archive)
    }

    /// Adds an executable file.
    pub fn program(&mut self, name: &str, content: &[u8]) -> io::Result<()> {
        self.entry(name, PROGRAM, (0, 0), content)
    }

    /// Adds a file.
    pub fn file(&mut self, name: &str, content: &[u8]) -> io::Result<()> {
        self.entry(name, DATA, (0, 0), content)
    }

    /// Ends the archive and returns its writer.
    pub fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.raw("TRAILER!!!", 0, 0, (0, 0), &[])?;
        self.to.flush()?;
        Ok(self.to)
    }

    fn entry(&mut self, name: &str, mode: u32, rdev: (u32, u32), content: &[u8]) -> io::Result<()> {
        self.inode += 1;
        let name = name.trim_start_matches('/');
        self.raw(name, self.inode, mode, rdev, content)
    }

    fn raw(
        &mut self,
        name: &str,
        inode: u32,
        mode: u32,
        (major, minor): (u32, u32),
        content: &[u8],
    ) -> io::Result<()> {
        let too_large = |_| io::Error::other("a file of 4G or more does not fit an initramfs");
        let size = u32::try_from(content.len()).map_err(too_large)?;
        let name_size = u32::try_from(name.len() + 1).map_err(too_large)?;
        let mut head = String::from("070701");
        // inode, mode, uid, gid, links, mtime, size, device ×2, rdev ×2, name size, check
        for field in [inode, mode, 0, 0, 1, 0, size, 0, 0, major, minor, name_size, 0] {
            head.push_str(&format!("{field:08X}"));
        }
        self.write(head.as_bytes())?;
        self.write(name.as_bytes())?;
        self.write(&[0])?;
        self.pad()?;
        self.write(content)?;
        self.pad()
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len();
        self.to.write_all(bytes)
    }

    /// Pads to a multiple of four bytes.
    fn pad(&mut self) -> io::Result<()> {
        let missing = self.written.next_multiple_of(4) - self.written;
        self.write(&[0; 3][..missing])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive() -> Vec<u8> {
        let mut archive = Initramfs::new(Vec::new()).unwrap();
        archive.program("/init", b"\x7fELF!").unwrap();
        archive.file("job.json", b"{}").unwrap();
        archive.finish().unwrap()
    }

    #[test]
    fn zeros_are_holes_in_the_file() {
        use std::os::unix::fs::MetadataExt as _;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("archive");
        let mut archive = vec![0; 5 * HOLE + 3];
        archive[HOLE] = 1;
        archive[5 * HOLE + 2] = 2;

        write_sparse(&archive, &path).unwrap();

        assert_eq!(std::fs::read(&path).unwrap(), archive);
        assert!(std::fs::metadata(&path).unwrap().blocks() * 512 < 4 * HOLE as u64);
    }

    #[test]
    fn equal_content_results_in_equal_bytes() {
        assert_eq!(archive(), archive());
    }

    #[test]
    fn entries_are_aligned_to_four_bytes_and_followed_by_the_trailer() {
        let bytes = archive();
        let heads: Vec<usize> =
            (0..bytes.len()).filter(|at| bytes[*at..].starts_with(b"070701")).collect();

        assert_eq!(heads.len(), 8);
        assert!(heads.iter().all(|at| at % 4 == 0));
        assert_eq!(bytes.len() % 4, 0);
        assert!(bytes.windows(10).any(|w| w == b"TRAILER!!!"));
    }

    #[test]
    fn cpio_lists_the_entries() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("archive");
        std::fs::write(&path, archive()).unwrap();
        let Ok(output) =
            std::process::Command::new("cpio").args(["-it", "--quiet", "-F"]).arg(&path).output()
        else {
            return granule_types::testing::skip("cpio is not installed");
        };

        let names = String::from_utf8(output.stdout).unwrap();

        assert_eq!(
            names.lines().collect::<Vec<_>>(),
            ["dev", "proc", "sys", "tmp", "dev/console", "init", "job.json"]
        );
    }
}
