// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Boots of a Linux guest in the emulated host, one for each backing, and what they cost.
//!
//! The guest is either of our own making: the host's image as its kernel, this program as its
//! initramfs ([`guest_init`]), so nothing has to be fetched; or a distribution with its stock kernel
//! and a disk, which is logged in to and switched off on its console. What its boots cost: `boots`.

use std::{collections::BTreeMap, path::PathBuf};

use super::{
    dialogue::Turn,
    emulator::Hardware,
    guest_init,
    job::{Job, RESULTS_PATH},
    matrix::{self, PlannedJob},
    options::Matrix,
};
use granule_types::{backing::Backing, units::Bytes};

/// Where the guest's kernel lies in the initramfs.
pub const IMAGE: &str = "/guest.image";
/// Where the guest's initramfs lies in the initramfs.
pub const INITRD: &str = "/guest.cpio";
/// Where the guest's disk lies in the initramfs, if it has one.
pub const DISK: &str = "/guest.disk";

/// What a guest boots from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Guest {
    /// The host's own kernel, and this program as its init.
    Own,
    /// A distribution's `vmlinuz`, `initrd.img` and `root.img` in this folder.
    Distribution(PathBuf),
}

impl Guest {
    /// The files of a distribution, and where they lie in the initramfs.
    pub fn files(&self) -> Vec<(PathBuf, &'static str)> {
        match self {
            Self::Own => Vec::new(),
            Self::Distribution(folder) => vec![
                (folder.join("vmlinuz"), IMAGE),
                (folder.join("initrd.img"), INITRD),
                (folder.join("root.img"), DISK),
            ],
        }
    }

    /// A guest's memory where none is asked for.
    const fn memory(&self) -> Bytes {
        match self {
            Self::Own => Bytes::mib(128),
            Self::Distribution(_) => Bytes::mib(256),
        }
    }

    /// What the emulated host needs beyond the guest's memory: the files, once in the initramfs and
    /// once unpacked, to a file system that takes half of the memory at most.
    fn host_memory(&self) -> Bytes {
        let size = |(path, _): &(PathBuf, _)| std::fs::metadata(path).map_or(0, |file| file.len());
        let files: u64 = self.files().iter().map(size).sum();
        Bytes((2 * files).next_multiple_of(1 << 30))
    }

    /// What `granule run` is told of it.
    fn arguments(&self) -> &'static [&'static str] {
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
                DISK,
                "--cmdline",
                "console=ttyS0 root=/dev/vda rw nokaslr norandmaps panic=-1",
            ],
        }
    }

    /// What is typed on its console. Our own guest does what it does by itself.
    fn dialogue(&self) -> Vec<Turn> {
        let works = guest_init::WORKS;
        match self {
            Self::Own => Vec::new(),
            // What is typed is echoed: it must not look like its answer.
            Self::Distribution(_) => vec![
                Turn::new("login: ", "root"),
                Turn::new("~# ", &format!("echo '{works},' vcpus $(nproc),")),
                Turn::new(&format!("{works}, vcpus"), "poweroff"),
            ],
        }
    }
}

/// A boot for each backing, number of vCPUs and seed.
pub fn jobs(matrix: &Matrix) -> Vec<PlannedJob> {
    let mut jobs = Vec::new();
    for &backing in &matrix.backings {
        for &vcpus in &matrix.vcpus {
            for seed in 0..matrix.seeds {
                jobs.push(job(matrix, backing, vcpus, seed));
            }
        }
    }
    jobs
}

fn job(matrix: &Matrix, backing: Backing, vcpus: u32, seed: u64) -> PlannedJob {
    let guest = match &matrix.distribution {
        None => Guest::Own,
        Some(folder) => Guest::Distribution(folder.clone()),
    };
    let page = matrix::page_of(backing);
    let memory = matrix.memory.unwrap_or(guest.memory());
    let memory = page.map_or(memory, |page| Bytes(memory.0.next_multiple_of(page)));
    let pools: BTreeMap<u64, u64> = page
        .map(|page| (page, memory.0.div_ceil(page)))
        .into_iter()
        .collect();
    let vcpus_text = vcpus.to_string();
    let memory_text = format!("{memory},backing={backing}");
    let files = ["--kernel", IMAGE, "--initrd", INITRD];
    // A guest that dies and resets itself must not start again and again.
    let argv = ["/init", "run", "--no-reboot"]
        .into_iter()
        .chain(files)
        .chain(guest.arguments().iter().copied())
        .chain([
            "--memory",
            &memory_text,
            "--vcpus",
            &vcpus_text,
            "--stats",
            RESULTS_PATH,
        ]);
    let extra = matrix.extra.iter().cloned();
    PlannedJob {
        name: format!("guest-{backing}-{memory}-{vcpus}v-seed{seed}"),
        hardware: Hardware {
            cpu: matrix.cpu.clone(),
            cpus: matrix.cpus.unwrap_or(vcpus.max(2)),
            memory: matrix.host_memory.unwrap_or_else(|| {
                Bytes(matrix::host_memory(memory, &pools).0 + guest.host_memory().0)
            }),
        },
        append: matrix::append(&pools),
        job: Job {
            argv: argv.map(str::to_owned).chain(extra).collect(),
            pools,
            settings: matrix::settings(backing, false),
            seed,
            foreign: true,
            dialogue: guest.dialogue(),
            deadline_seconds: matrix::DEADLINE_SECONDS,
        },
        seed,
        foreign: None,
        guest: Some(guest),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Test;

    fn matrix() -> Matrix {
        Matrix {
            test: Test::Guest,
            backings: vec![
                Backing::Anonymous,
                Backing::AnonymousThp,
                Backing::AnonymousHugetlb(Some(Bytes::gib(1))),
            ],
            vcpus: vec![2],
            seeds: 1,
            ..matrix::tests::matrix()
        }
    }

    #[test]
    fn each_backing_is_a_boot_with_memory_in_whole_pages_and_a_pool_for_it() {
        let jobs = jobs(&matrix());

        let names: Vec<_> = jobs.iter().map(|job| job.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "guest-anonymous-128M-2v-seed0",
                "guest-anonymous_thp-128M-2v-seed0",
                "guest-anonymous_hugetlb_1gb-1G-2v-seed0",
            ]
        );
        assert_eq!(jobs[2].job.pools, [(1 << 30, 1)].into());
        assert!(
            jobs[2]
                .job
                .argv
                .contains(&"1G,backing=anonymous_hugetlb_1gb".to_owned())
        );
        assert!(jobs.iter().all(|job| job.guest == Some(Guest::Own)));
    }

    #[test]
    fn what_is_typed_does_not_look_like_its_answer() {
        let turns = Guest::Distribution(PathBuf::new()).dialogue();

        for pair in turns.windows(2) {
            assert!(!pair[0].send.contains(&pair[1].expect));
        }
    }
}
