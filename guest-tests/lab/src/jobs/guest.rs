// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The Linux guest that a job boots with `granule run`.
//!
//! The guest is either the host's kernel with [`guest_init`] as PID 1, which requires no download,
//! or a distribution with its own kernel and disk, controlled by a script on its console.

use std::{
    fs,
    path::{Path, PathBuf},
};

use granule_types::units::Bytes;

use crate::{
    host::{expect::Exchange, guest_init},
    kernel::image::{PAGING_FUNCTION, function_address},
    options::Rodata,
};

/// Kernel command line of a guest with `granule` as PID 1.
const COMMAND_LINE: &str = "console=ttyAMA0 quiet nokaslr norandmaps panic=-1";

/// Guest and the parameters of its boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinuxGuest {
    /// Boot files and their paths in the initramfs; empty if the guest boots the host's kernel.
    pub files: Vec<(PathBuf, &'static str)>,
    pub default_memory: Bytes,
    /// Address of `paging_init()` in a kernel of its own, if that has a `System.map`.
    pub paging_function: Option<u64>,
    /// Arguments of `granule run` that depend on the guest.
    pub arguments: Vec<String>,
    /// Script for the guest's console. The guest echoes input, so no line may contain the next
    /// expected text.
    pub script: Vec<Exchange>,
}

impl LinuxGuest {
    /// Path of the guest's kernel in the host's initramfs.
    pub const IMAGE_PATH: &str = "/guest.image";
    /// Path of the guest's initramfs in the host's initramfs.
    pub const INITRD_PATH: &str = "/guest.cpio";
    const DISK_PATH: &str = "/guest.disk";

    /// Returns a guest with the host's kernel and `granule` as PID 1.
    pub fn with_host_kernel() -> Self {
        Self {
            files: Vec::new(),
            default_memory: Bytes::mib(128),
            paging_function: None,
            arguments: arguments(&[
                "--serial",
                "pl011",
                "--cmdline",
                COMMAND_LINE,
                "--init-text",
                guest_init::INIT_STARTED,
            ]),
            script: Vec::new(),
        }
    }

    /// Returns a guest with the host's kernel and `granule` as PID 1, which runs a user's program.
    pub fn with_program() -> Self {
        Self {
            arguments: arguments(&["--serial", "pl011", "--cmdline", COMMAND_LINE]),
            ..Self::with_host_kernel()
        }
    }

    /// Returns a guest with the host's kernel and this `rodata`, whose page tables are reported.
    pub fn with_kernel_tables(rodata: Rodata) -> Self {
        let command_line = format!("{COMMAND_LINE} {}", rodata.parameters());
        Self {
            arguments: arguments(&["--serial", "pl011", "--cmdline", &command_line]),
            ..Self::with_host_kernel()
        }
    }

    /// Returns a guest that boots `vmlinuz`, `initrd.img` and `root.img` of a directory.
    pub fn distribution(directory: &Path) -> Self {
        let works = guest_init::CHECKS_PASSED;
        let map = fs::read_to_string(directory.join("System.map")).unwrap_or_default();
        Self {
            files: vec![
                (directory.join("vmlinuz"), Self::IMAGE_PATH),
                (directory.join("initrd.img"), Self::INITRD_PATH),
                (directory.join("root.img"), Self::DISK_PATH),
            ],
            default_memory: Bytes::mib(256),
            paging_function: function_address(&map, PAGING_FUNCTION),
            arguments: arguments(&[
                "--disk",
                Self::DISK_PATH,
                "--cmdline",
                "console=ttyS0 root=/dev/vda rw nokaslr norandmaps panic=-1",
            ]),
            script: vec![
                Exchange::new("login: ", "root"),
                Exchange::new("~# ", &format!("echo '{works},' vcpus $(nproc),")),
                Exchange::new(&format!("{works}, vcpus"), "poweroff"),
            ],
        }
    }

    /// Returns the host memory that the guest's files require: once in the initramfs and once in
    /// the root file system, which may use half of the memory.
    pub fn memory_of_files(&self) -> Bytes {
        let size = |(path, _): &(PathBuf, _)| std::fs::metadata(path).map_or(0, |file| file.len());
        let files: u64 = self.files.iter().map(size).sum();
        Bytes((2 * files).next_multiple_of(1 << 30))
    }
}

fn arguments(words: &[&str]) -> Vec<String> {
    words.iter().copied().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_sent_line_contains_the_next_expected_text() {
        let script = LinuxGuest::distribution(Path::new("")).script;

        for pair in script.windows(2) {
            assert!(!pair[0].send.contains(&pair[1].expect));
        }
    }

    #[test]
    fn a_kernel_with_a_system_map_is_measured() {
        let directory = tempfile::tempdir().unwrap();
        let of = |directory| LinuxGuest::distribution(directory).paging_function;
        assert_eq!(of(directory.path()), None);

        fs::write(directory.path().join("System.map"), "ffff800009a1b2c4 T paging_init\n").unwrap();

        assert_eq!(of(directory.path()), Some(0xffff_8000_09a1_b2c4));
    }
}
