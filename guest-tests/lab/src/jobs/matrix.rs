// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Jobs of the page-table tests and the selftests: one boot each, so that no job finds the state of
//! another.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use granule_types::{backing::Backing, units::Bytes};

use crate::{
    host::{
        emulator::Hardware,
        job::{FOREIGN_PATH, Job, RESULTS_PATH},
    },
    jobs::planned_job::{
        DEADLINE_SECONDS, DEFAULT_HUGE, PlannedJob, append, combinations, host_memory, page_of,
        pools, settings,
    },
    options::{Matrix, Test},
};

/// Returns the default size of the region: one page if pages are large, else an amount that takes
/// seconds of emulation.
fn default_memory(backing: Backing) -> Bytes {
    match page_of(backing) {
        Some(page) if page > Bytes::mib(64).0 => Bytes(page),
        _ => Bytes::mib(64),
    }
}

/// Returns the jobs of a matrix. `kernel_test` is the path of the kernel's page-table test.
pub fn jobs(matrix: &Matrix, kernel_test: Option<&PathBuf>) -> Vec<PlannedJob> {
    combinations(matrix, |backing, vcpus, seed| job(matrix, kernel_test, backing, vcpus, seed))
}

fn job(
    matrix: &Matrix,
    kernel_test: Option<&PathBuf>,
    backing: Backing,
    vcpus: u32,
    seed: u64,
) -> PlannedJob {
    let memory = matrix.memory.unwrap_or_else(|| default_memory(backing));
    let pools = pools(backing, memory);
    let foreign = matrix.test != Test::Bench;
    let mut argv: Vec<String> = if foreign {
        vec![FOREIGN_PATH.to_owned()]
    } else {
        vec!["/init".to_owned(), "bench".to_owned()]
    };
    let mut option = |name: &str, value: String| argv.extend([name.to_owned(), value]);
    option("-m", matrix.mode.clone());
    option("-s", backing.to_string());
    option("-b", memory.to_string());
    option("-v", vcpus.to_string());
    if let Some(offset) = matrix.offset {
        option("-p", offset.0.to_string());
    }
    if !foreign {
        option("-i", matrix.iterations.to_string());
        option("--seed", seed.to_string());
        option("--json", RESULTS_PATH.to_owned());
        argv.extend(matrix.extra.iter().cloned());
    }
    PlannedJob {
        name: format!("{backing}-{memory}-{vcpus}v-seed{seed}"),
        hardware: Hardware {
            cpu: matrix.cpu.clone(),
            cpus: matrix.cpus.unwrap_or(vcpus.max(2)),
            memory: matrix.host_memory.unwrap_or_else(|| host_memory(memory, &pools)),
        },
        append: append(&pools),
        job: Job {
            argv,
            pools,
            settings: settings(backing, foreign),
            seed,
            foreign,
            expect: Vec::new(),
            deadline_seconds: DEADLINE_SECONDS,
        },
        foreign: kernel_test.filter(|_| foreign).cloned(),
        guest: None,
    }
}

/// Returns the job of a selftest, which has defaults of its own.
pub fn selftest(matrix: &Matrix, program: &Path, arguments: &[String]) -> PlannedJob {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    let vcpus = matrix.vcpus.first().copied().unwrap_or(4);
    let pools = BTreeMap::from([(DEFAULT_HUGE, 64)]);
    let mut argv = vec![FOREIGN_PATH.to_owned()];
    argv.extend_from_slice(arguments);
    PlannedJob {
        name: name.into_owned(),
        hardware: Hardware {
            cpu: matrix.cpu.clone(),
            cpus: matrix.cpus.unwrap_or(vcpus),
            memory: matrix.host_memory.unwrap_or(Bytes::gib(4)),
        },
        append: append(&pools),
        job: Job {
            argv,
            pools,
            settings: BTreeMap::new(),
            seed: 0,
            foreign: true,
            expect: Vec::new(),
            deadline_seconds: DEADLINE_SECONDS,
        },
        foreign: Some(program.to_owned()),
        guest: None,
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn matrix() -> Matrix {
        Matrix {
            test: Test::Bench,
            backings: vec![
                Backing::Anonymous,
                Backing::AnonymousHugetlb(Some(Bytes::mib(2))),
                Backing::AnonymousHugetlb(Some(Bytes::gib(1))),
            ],
            vcpus: vec![4],
            memory: None,
            mode: "2".to_owned(),
            offset: None,
            iterations: 1,
            seeds: 2,
            selftests: Vec::new(),
            extra: Vec::new(),
            distribution: None,
            cpu: "neoverse-n1".to_owned(),
            cpus: None,
            host_memory: None,
        }
    }

    #[test]
    fn each_combination_is_one_boot() {
        let names: Vec<String> = jobs(&matrix(), None).into_iter().map(|j| j.name).collect();

        assert_eq!(
            names,
            [
                "anonymous-64M-4v-seed0",
                "anonymous-64M-4v-seed1",
                "anonymous_hugetlb_2mb-64M-4v-seed0",
                "anonymous_hugetlb_2mb-64M-4v-seed1",
                "anonymous_hugetlb_1gb-1G-4v-seed0",
                "anonymous_hugetlb_1gb-1G-4v-seed1",
            ]
        );
    }

    #[test]
    fn pools_are_as_large_as_the_region() {
        let jobs = jobs(&matrix(), None);

        assert!(jobs[0].job.pools.is_empty());
        assert_eq!(jobs[2].job.pools, [(2 << 20, 32)].into());
        assert_eq!(jobs[4].job.pools, [(1 << 30, 1)].into());
        assert!(jobs[4].append.contains("hugepagesz=1G hugepages=1"));
        assert_eq!(jobs[4].hardware.memory, Bytes::gib(3));
    }

    #[test]
    fn the_seed_of_a_foreign_test_is_applied_by_pid_1_only() {
        let foreign = Matrix { test: Test::KernelPageTableTest, ..matrix() };

        let jobs = jobs(&foreign, Some(&PathBuf::from("/x/kvm_page_table_test")));

        assert_eq!(jobs[1].job.argv[0], FOREIGN_PATH);
        assert!(!jobs[1].job.argv.contains(&"--seed".to_owned()));
        assert_eq!(jobs[1].job.seed, 1);
        assert!(jobs[1].foreign.is_some());
    }
}
