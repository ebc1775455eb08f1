// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! From the matrix to jobs: one boot for each backing, number of vCPUs and seed, so that no job
//! finds what another one left behind.

use std::{collections::BTreeMap, path::PathBuf};

use super::{
    emulator::Hardware,
    guest::Guest,
    job::{FOREIGN_PATH, Job, RESULTS_PATH},
    options::{Matrix, Test},
};
use granule_types::{backing::Backing, units::Bytes};

/// 1 GiB pages can be had at boot only.
const GIGANTIC: u64 = 1 << 30;
/// Debian's and the lab's default huge page.
const DEFAULT_HUGE: u64 = 2 << 20;
/// Virtual seconds after which a test is killed; one that sleeps gets there at once.
pub(super) const DEADLINE_SECONDS: u64 = 3600;

/// One boot and what it does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedJob {
    /// The name of its folder.
    pub name: String,
    /// The emulated hardware.
    pub hardware: Hardware,
    /// More words on the kernel's command line.
    pub append: String,
    /// What PID 1 does.
    pub job: Job,
    /// What staggers it.
    pub seed: u64,
    /// A program of the kernel tree that the initramfs must hold.
    pub foreign: Option<PathBuf>,
    /// The guest that the initramfs must hold.
    pub guest: Option<Guest>,
}

/// The region's size where none is asked for: one page where pages are large, else what a few
/// seconds of emulation get through.
fn default_memory(backing: Backing) -> Bytes {
    match page_of(backing) {
        Some(page) if page > Bytes::mib(64).0 => Bytes(page),
        _ => Bytes::mib(64),
    }
}

/// The hugetlb page behind a backing.
pub(super) fn page_of(backing: Backing) -> Option<u64> {
    match backing {
        Backing::AnonymousHugetlb(Some(size)) => Some(size.0),
        Backing::AnonymousHugetlb(None) | Backing::SharedHugetlb => Some(DEFAULT_HUGE),
        Backing::Anonymous | Backing::AnonymousThp | Backing::Shmem => None,
    }
}

/// All jobs of a matrix, in the order in which results are kept. `upstream` is the kernel tree's
/// test, where that is what runs.
pub fn jobs(matrix: &Matrix, upstream: Option<&PathBuf>) -> Vec<PlannedJob> {
    let mut jobs = Vec::new();
    for &backing in &matrix.backings {
        for &vcpus in &matrix.vcpus {
            for seed in 0..matrix.seeds {
                jobs.push(job(matrix, upstream, backing, vcpus, seed));
            }
        }
    }
    jobs
}

fn job(
    matrix: &Matrix,
    upstream: Option<&PathBuf>,
    backing: Backing,
    vcpus: u32,
    seed: u64,
) -> PlannedJob {
    let memory = matrix.memory.unwrap_or_else(|| default_memory(backing));
    let pools: BTreeMap<u64, u64> = page_of(backing)
        .map(|page| (page, memory.0.div_ceil(page)))
        .into_iter()
        .collect();
    let foreign = matrix.test != Test::Ours;
    let (backing_text, memory_text, vcpus_text) =
        (backing.to_string(), memory.to_string(), vcpus.to_string());
    let mut argv: Vec<String> = match foreign {
        true => vec![FOREIGN_PATH.to_owned()],
        false => vec!["/init".to_owned(), "bench".to_owned()],
    };
    let mut option = |name: &str, value: &str| argv.extend([name.to_owned(), value.to_owned()]);
    option("-m", &matrix.mode);
    option("-s", &backing_text);
    option("-b", &memory_text);
    option("-v", &vcpus_text);
    if let Some(offset) = matrix.offset {
        option("-p", &offset.0.to_string());
    }
    if !foreign {
        option("-i", &matrix.iterations.to_string());
        option("--seed", &seed.to_string());
        option("--json", RESULTS_PATH);
        argv.extend(matrix.extra.iter().cloned());
    }
    PlannedJob {
        name: format!("{backing}-{memory}-{vcpus}v-seed{seed}"),
        hardware: Hardware {
            cpu: matrix.cpu.clone(),
            cpus: matrix.cpus.unwrap_or(vcpus.max(2)),
            memory: matrix
                .host_memory
                .unwrap_or_else(|| host_memory(memory, &pools)),
        },
        append: append(&pools),
        job: Job {
            argv,
            pools,
            settings: settings(backing, foreign),
            seed,
            foreign,
            dialogue: Vec::new(),
            deadline_seconds: DEADLINE_SECONDS,
        },
        seed,
        foreign: upstream.filter(|_| foreign).cloned(),
        guest: None,
    }
}

/// One job for each of the kernel's selftests: they have defaults of their own.
pub fn selftest(matrix: &Matrix, program: PathBuf, arguments: &[String]) -> PlannedJob {
    let name = program
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let vcpus = matrix.vcpus.first().copied().unwrap_or(4);
    let pools = BTreeMap::from([(DEFAULT_HUGE, 64)]);
    let mut argv = vec![FOREIGN_PATH.to_owned()];
    argv.extend_from_slice(arguments);
    PlannedJob {
        name,
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
            dialogue: Vec::new(),
            deadline_seconds: DEADLINE_SECONDS,
        },
        seed: 0,
        foreign: Some(program),
        guest: None,
    }
}

/// Our test insists on huge pages, and a first read that gets the huge zero page ends in small ones
/// once it is written to. The kernel's test does not look, and runs on the host as it comes.
pub(super) fn settings(backing: Backing, foreign: bool) -> BTreeMap<String, String> {
    match (backing, foreign) {
        (Backing::AnonymousThp, false) => {
            let file = "/sys/kernel/mm/transparent_hugepage/use_zero_page";
            [(file.to_owned(), "0".to_owned())].into()
        }
        _ => BTreeMap::new(),
    }
}

/// Room for the region, the pools, and a gigabyte for everything else. Gigantic pages take another
/// one: they must be aligned, the kernel sits at the bottom and its tables at the top.
pub(super) fn host_memory(region: Bytes, pools: &BTreeMap<u64, u64>) -> Bytes {
    let pooled: u64 = pools.iter().map(|(page, count)| page * count).sum();
    let gigantic = pools.keys().any(|page| *page >= GIGANTIC);
    let whole_gigabytes = region.0.max(pooled).next_multiple_of(GIGANTIC);
    Bytes(whole_gigabytes + if gigantic { 2 } else { 1 } * GIGANTIC)
}

/// Pages of a gigabyte and more are reserved by the kernel's command line.
pub(super) fn append(pools: &BTreeMap<u64, u64>) -> String {
    pools
        .iter()
        .filter(|(page, _)| **page >= GIGANTIC)
        .map(|(page, count)| {
            format!(
                "default_hugepagesz=2M hugepagesz={} hugepages={count}",
                Bytes(*page)
            )
        })
        .collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn matrix() -> Matrix {
        Matrix {
            test: Test::Ours,
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
    fn every_combination_is_one_boot() {
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
    fn a_foreign_test_gets_its_seed_from_pid_1_alone() {
        let foreign = Matrix {
            test: Test::Upstream,
            ..matrix()
        };

        let jobs = jobs(&foreign, Some(&PathBuf::from("/x/kvm_page_table_test")));

        assert_eq!(jobs[1].job.argv[0], FOREIGN_PATH);
        assert!(!jobs[1].job.argv.contains(&"--seed".to_owned()));
        assert_eq!(jobs[1].job.seed, 1);
        assert!(jobs[1].foreign.is_some());
    }
}
