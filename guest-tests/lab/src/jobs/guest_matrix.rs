// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Jobs that boot a Linux guest with `granule run`, one for each combination of the matrix.
//!
//! The guest boots either the kernel of the host with [`guest_init`], which requires no downloads,
//! or a distribution with its own kernel and a disk, driven by a script on its console.

use std::path::PathBuf;

use granule_types::{backing::Backing, units::Bytes};

use crate::{
    host::{
        emulator::Hardware,
        expect::Exchange,
        guest_init,
        job::{Job, RESULTS_PATH},
    },
    jobs::planned_job::{
        DEADLINE_SECONDS, Guest, PlannedJob, append, combinations, host_memory, page_of, pools,
        settings,
    },
    options::Matrix,
};

/// Returns the default memory of a guest.
const fn default_memory(guest: &Guest) -> Bytes {
    match guest {
        Guest::Own => Bytes::mib(128),
        Guest::Distribution(_) => Bytes::mib(256),
    }
}

/// Returns the host memory for the guest's files: the initramfs, and the file system it is unpacked
/// to, which takes at most half of the memory.
fn memory_of_files(guest: &Guest) -> Bytes {
    let size = |(path, _): &(PathBuf, _)| std::fs::metadata(path).map_or(0, |file| file.len());
    let files: u64 = guest.files().iter().map(size).sum();
    Bytes((2 * files).next_multiple_of(1 << 30))
}

/// Returns the arguments of `granule run` that depend on the guest.
fn arguments(guest: &Guest) -> &'static [&'static str] {
    match guest {
        Guest::Own => &[
            "--serial",
            "pl011",
            "--cmdline",
            "console=ttyAMA0 quiet nokaslr norandmaps panic=-1",
            "--init-text",
            guest_init::INIT,
        ],
        Guest::Distribution(_) => &[
            "--disk",
            Guest::DISK,
            "--cmdline",
            "console=ttyS0 root=/dev/vda rw nokaslr norandmaps panic=-1",
        ],
    }
}

/// Returns the script on the guest's console. Sent lines are echoed, so none may contain the text
/// that is expected next.
fn script(guest: &Guest) -> Vec<Exchange> {
    let works = guest_init::WORKS;
    match guest {
        Guest::Own => Vec::new(),
        Guest::Distribution(_) => vec![
            Exchange::new("login: ", "root"),
            Exchange::new("~# ", &format!("echo '{works},' vcpus $(nproc),")),
            Exchange::new(&format!("{works}, vcpus"), "poweroff"),
        ],
    }
}

/// Returns the jobs of a matrix.
pub fn jobs(matrix: &Matrix) -> Vec<PlannedJob> {
    combinations(matrix, |backing, vcpus, seed| job(matrix, backing, vcpus, seed))
}

fn job(matrix: &Matrix, backing: Backing, vcpus: u32, seed: u64) -> PlannedJob {
    let guest = match &matrix.distribution {
        None => Guest::Own,
        Some(directory) => Guest::Distribution(directory.clone()),
    };
    let memory = matrix.memory.unwrap_or(default_memory(&guest));
    let memory = page_of(backing).map_or(memory, |page| Bytes(memory.0.next_multiple_of(page)));
    let pools = pools(backing, memory);
    // --no-reboot: a guest that panics and resets must not boot again.
    let argv = ["/init", "run", "--no-reboot"]
        .into_iter()
        .chain(["--kernel", Guest::IMAGE, "--initrd", Guest::INITRD])
        .chain(arguments(&guest).iter().copied())
        .map(str::to_owned)
        .chain(["--memory".to_owned(), format!("{memory},backing={backing}")])
        .chain(["--vcpus".to_owned(), vcpus.to_string()])
        .chain(["--stats".to_owned(), RESULTS_PATH.to_owned()])
        .chain(matrix.extra.iter().cloned());
    PlannedJob {
        name: format!("guest-{backing}-{memory}-{vcpus}v-seed{seed}"),
        hardware: Hardware {
            cpu: matrix.cpu.clone(),
            cpus: matrix.cpus.unwrap_or(vcpus.max(2)),
            memory: matrix.host_memory.unwrap_or_else(|| {
                Bytes(host_memory(memory, &pools).0 + memory_of_files(&guest).0)
            }),
        },
        append: append(&pools),
        job: Job {
            argv: argv.collect(),
            pools,
            settings: settings(backing, false),
            seed,
            foreign: true,
            expect: script(&guest),
            deadline_seconds: DEADLINE_SECONDS,
        },
        foreign: None,
        guest: Some(guest),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{jobs::matrix, options::Test};

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
    fn each_backing_is_one_boot_with_a_pool_for_the_rounded_memory() {
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
        assert!(jobs[2].job.argv.contains(&"1G,backing=anonymous_hugetlb_1gb".to_owned()));
        assert!(jobs.iter().all(|job| job.guest == Some(Guest::Own)));
    }

    #[test]
    fn no_sent_line_contains_the_next_expected_text() {
        let script = script(&Guest::Distribution(PathBuf::new()));

        for pair in script.windows(2) {
            assert!(!pair[0].send.contains(&pair[1].expect));
        }
    }
}
