// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A user's program: its files, their places in the initramfs, and the check that the emulated
//! host, which has no libraries, can execute it.

use std::{
    fs,
    io::Read as _,
    path::{Path, PathBuf},
};

use granule_types::units::Bytes;
use serde::{Deserialize, Serialize};

use crate::{
    command::CommandError,
    error::LabError,
    host::initramfs::ArchiveEntry,
    shell::{absolute, sorted_entries},
};

/// Directory of the program in the initramfs, in which it runs.
pub const DIRECTORY: &str = "/workload";
/// Path of the program in the initramfs.
pub const PATH: &str = "/workload/run";

/// Name of the program in a user's directory.
const PROGRAM_NAME: &str = "run";

/// A program that the emulated host can execute, and its data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Name of the user's file or directory.
    pub name: String,
    /// Files and directories in the order of the archive, the directory of the program first.
    files: Vec<ProgramFile>,
    /// Size of all files in bytes.
    pub size: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ProgramFile {
    /// Path in the initramfs.
    path: String,
    /// The user's file; `None` for a directory.
    source: Option<PathBuf>,
    is_executable: bool,
}

impl Program {
    /// Opens a program, or a directory with a program `run` and its data. Symbolic links are
    /// followed.
    ///
    /// # Errors
    /// A file cannot be read, or the program is not a static arm64 program.
    pub fn open(path: &Path) -> Result<Self, LabError> {
        let path = absolute(path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut program = Self { name, files: Vec::new(), size: 0 };
        if path.is_dir() {
            let run = path.join(PROGRAM_NAME);
            if !run.is_file() {
                return Err(LabError::Unusable(format!(
                    "{} has no program '{PROGRAM_NAME}', which the lab runs in this directory",
                    path.display()
                )));
            }
            check_static_arm64(&run)?;
            program.add(&path, DIRECTORY)?;
        } else {
            check_static_arm64(&path)?;
            program.add_directory(DIRECTORY);
            program.add(&path, PATH)?;
        }
        Ok(program)
    }

    fn add_directory(&mut self, path: &str) {
        self.files.push(ProgramFile { path: path.to_owned(), source: None, is_executable: false });
    }

    fn add(&mut self, source: &Path, path: &str) -> Result<(), LabError> {
        use std::os::unix::fs::PermissionsExt as _;
        let metadata =
            fs::metadata(source).map_err(|error| CommandError::file("read", source, error))?;
        if metadata.is_dir() {
            self.add_directory(path);
            for name in sorted_entries(source) {
                self.add(&source.join(&name), &format!("{path}/{name}"))?;
            }
            return Ok(());
        }
        if !metadata.is_file() {
            return Err(LabError::Unusable(format!(
                "{} is neither a file nor a directory: remove it from the program's directory",
                source.display()
            )));
        }
        self.size += metadata.len();
        self.files.push(ProgramFile {
            path: path.to_owned(),
            source: Some(source.to_owned()),
            is_executable: path == PATH || metadata.permissions().mode() & 0o111 != 0,
        });
        Ok(())
    }

    /// Returns the memory of the archive and of its unpacked files, which may occupy half of the
    /// memory.
    pub fn initramfs_memory(&self) -> Bytes {
        Bytes((self.size * 4).next_multiple_of(Bytes::gib(1).0))
    }

    /// Returns the paths in the initramfs of all files, with their sources.
    pub fn sources(&self) -> impl Iterator<Item = (&str, &PathBuf)> {
        self.files.iter().filter_map(|file| Some((&*file.path, file.source.as_ref()?)))
    }

    /// Returns the entries of the initramfs.
    pub fn entries<'a>(&self) -> impl Iterator<Item = ArchiveEntry<'a>> {
        self.files.iter().map(|file| match (&file.source, file.is_executable) {
            (None, _) => ArchiveEntry::directory(file.path.clone()),
            (Some(source), true) => ArchiveEntry::program(file.path.clone(), source),
            (Some(source), false) => ArchiveEntry::file(file.path.clone(), source),
        })
    }
}

/// Checks that a file is a static arm64 program.
///
/// # Errors
/// The file cannot be read or is another program.
pub fn check_static_arm64(path: &Path) -> Result<(), LabError> {
    let mut start = Vec::new();
    let file = fs::File::open(path).and_then(|file| file.take(1 << 16).read_to_end(&mut start));
    file.map_err(|error| CommandError::file("read", path, error))?;
    let refused = |what: &str| {
        Err(LabError::Unusable(format!(
            "{} {what}: build it with aarch64-linux-gnu-gcc -static",
            path.display()
        )))
    };
    match parse_elf(&start) {
        Some(Elf { machine: EM_AARCH64, has_interpreter: false }) => Ok(()),
        Some(Elf { machine: EM_AARCH64, .. }) => refused("is dynamically linked"),
        Some(_) => refused("is a program for another architecture than arm64"),
        None => refused("is no 64-bit ELF program"),
    }
}

/// Number of arm64 in `e_machine` of an ELF header.
const EM_AARCH64: u16 = 183;

struct Elf {
    machine: u16,
    has_interpreter: bool,
}

/// Parses the header and the program headers of a little-endian 64-bit ELF program (System V ABI,
/// chapters 4 and 5).
fn parse_elf(file: &[u8]) -> Option<Elf> {
    const PT_INTERP: u32 = 3;
    let u16_at = |at: usize| Some(u16::from_le_bytes(*file.get(at..)?.first_chunk()?));
    let u32_at = |at: usize| Some(u32::from_le_bytes(*file.get(at..)?.first_chunk()?));
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let headers = usize::try_from(u64::from_le_bytes(*file.get(32..)?.first_chunk()?)).ok()?;
    let (size, count) = (usize::from(u16_at(54)?), usize::from(u16_at(56)?));
    // Relocatable objects have no program headers.
    let mut has_interpreter = false;
    for index in 0..count {
        has_interpreter |= u32_at(headers.checked_add(index * size)?)? == PT_INTERP;
    }
    (count > 0).then_some(Elf { machine: u16_at(18)?, has_interpreter })
}

/// Returns the number of a guest mode in a built `kvm_page_table_test`, from its number in Linux
/// 6.1. Linux 6.8 inserted P52V48_16K, which a test then names, as number 1.
pub fn guest_mode_number(test: &[u8], mode: u32) -> u32 {
    let inserted = b"PA-bits:52,  VA-bits:48, 16K pages";
    let has_inserted = test.windows(inserted.len()).any(|text| text == inserted);
    mode + u32::from(has_inserted && mode > 0)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Returns an ELF file of a machine with one program header.
    fn elf(machine: u16, header_type: u32) -> Vec<u8> {
        let mut file = b"\x7fELF\x02\x01\x01".to_vec();
        file.resize(120, 0);
        file[18..20].copy_from_slice(&machine.to_le_bytes());
        file[32] = 64;
        file[54] = 56;
        file[56] = 1;
        file[64..68].copy_from_slice(&header_type.to_le_bytes());
        file
    }

    /// Returns the file of a static arm64 program.
    pub fn arm64_program() -> Vec<u8> {
        elf(EM_AARCH64, 1)
    }

    fn check(content: &[u8]) -> String {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), content).unwrap();
        check_static_arm64(file.path()).map_or_else(|error| error.to_string(), |()| String::new())
    }

    #[test]
    fn only_a_static_arm64_program_is_accepted() {
        assert_eq!(check(&elf(EM_AARCH64, 1)), "");
        for (content, reason) in [
            (elf(EM_AARCH64, 3), "is dynamically linked"),
            (elf(62, 1), "another architecture"),
            (b"#!/bin/sh\n".to_vec(), "is no 64-bit ELF program"),
            (elf(EM_AARCH64, 1)[..66].to_vec(), "is no 64-bit ELF program"),
        ] {
            let error = check(&content);

            assert!(error.contains(reason) && error.contains("-static"), "{error}");
        }
    }

    #[test]
    fn the_files_of_a_directory_follow_their_directories() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("data")).unwrap();
        fs::write(directory.path().join("data/b"), "22").unwrap();
        fs::write(directory.path().join("run"), elf(EM_AARCH64, 1)).unwrap();

        let program = Program::open(directory.path()).unwrap();

        let paths: Vec<_> =
            program.files.iter().map(|file| (file.path.as_str(), file.is_executable)).collect();
        let expected = [
            ("/workload", false),
            ("/workload/data", false),
            ("/workload/data/b", false),
            ("/workload/run", true),
        ];
        assert_eq!(paths, expected);
        assert_eq!(program.size, 122);
        let missing = Program::open(&directory.path().join("data")).unwrap_err().to_string();
        assert!(missing.contains("has no program 'run'"), "{missing}");
    }

    #[test]
    fn the_number_of_a_guest_mode_depends_on_the_modes_of_the_test() {
        let old = b"PA-bits:52,  VA-bits:48, 64K pages";
        let new = b"..PA-bits:52,  VA-bits:48, 16K pages..";

        assert_eq!([0, 2].map(|mode| guest_mode_number(old, mode)), [0, 2]);
        assert_eq!([0, 2].map(|mode| guest_mode_number(new, mode)), [0, 3]);
    }
}
