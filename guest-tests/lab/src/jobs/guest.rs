// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The Linux guest that a job boots with `granule run`.
//!
//! It is either the kernel of the host with [`guest_init`], which requires no downloads, or a
//! distribution with its own kernel and a disk, driven by a script on its console.

use std::path::PathBuf;

use granule_types::units::Bytes;

use crate::host::{expect::Exchange, guest_init};

/// Boot files of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Guest {
    /// The kernel of the host, with `granule` as PID 1.
    Own,
    /// `vmlinuz`, `initrd.img` and `root.img` of a distribution in this directory.
    Distribution(PathBuf),
}

impl Guest {
    /// Path of the guest's kernel in the initramfs.
    pub const IMAGE: &str = "/guest.image";
    /// Path of the guest's initramfs in the initramfs.
    pub const INITRD: &str = "/guest.cpio";
    /// Path of the guest's disk in the initramfs.
    const DISK: &str = "/guest.disk";

    /// Returns the files of a distribution and their paths in the initramfs.
    pub fn files(&self) -> Vec<(PathBuf, &'static str)> {
        match self {
            Self::Own => Vec::new(),
            Self::Distribution(directory) => vec![
                (directory.join("vmlinuz"), Self::IMAGE),
                (directory.join("initrd.img"), Self::INITRD),
                (directory.join("root.img"), Self::DISK),
            ],
        }
    }

    /// Returns the default memory of the guest.
    pub const fn default_memory(&self) -> Bytes {
        match self {
            Self::Own => Bytes::mib(128),
            Self::Distribution(_) => Bytes::mib(256),
        }
    }

    /// Returns the host memory for the guest's files: the initramfs, and the file system it is
    /// unpacked to, which takes at most half of the memory.
    pub fn memory_of_files(&self) -> Bytes {
        let size = |(path, _): &(PathBuf, _)| std::fs::metadata(path).map_or(0, |file| file.len());
        let files: u64 = self.files().iter().map(size).sum();
        Bytes((2 * files).next_multiple_of(1 << 30))
    }

    /// Returns the arguments of `granule run` that depend on the guest.
    pub fn arguments(&self) -> &'static [&'static str] {
        match self {
            Self::Own => &[
                "--serial",
                "pl011",
                "--cmdline",
                "console=ttyAMA0 quiet nokaslr norandmaps panic=-1",
                "--init-text",
                guest_init::INIT,
            ],
            Self::Distribution(_) => &[
                "--disk",
                Self::DISK,
                "--cmdline",
                "console=ttyS0 root=/dev/vda rw nokaslr norandmaps panic=-1",
            ],
        }
    }

    /// Returns the script for the guest's console. Sent lines are echoed, so none may contain the
    /// text that is expected next.
    pub fn script(&self) -> Vec<Exchange> {
        let works = guest_init::CHECKS_PASSED;
        match self {
            Self::Own => Vec::new(),
            Self::Distribution(_) => vec![
                Exchange::new("login: ", "root"),
                Exchange::new("~# ", &format!("echo '{works},' vcpus $(nproc),")),
                Exchange::new(&format!("{works}, vcpus"), "poweroff"),
            ],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_sent_line_contains_the_next_expected_text() {
        let script = Guest::Distribution(PathBuf::new()).script();

        for pair in script.windows(2) {
            assert!(!pair[0].send.contains(&pair[1].expect));
        }
    }
}
