// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Configurations that this host offers, and the reasons for those that it does not.

use std::fmt;

use clap::ValueEnum;
use granule_pgtable_test::pgtable_vm::{CountedEvents, KvmConfig, KvmMachine};
use granule_types::{backing::Backing, error_text, units::Bytes};
use granule_vmm::memory::{BackingPlan, HostPages};

use crate::values::DirtyLogOption;

/// Mode of dirty logging with its chunk size of eager page splitting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LoggingMode {
    pub dirty_log: DirtyLogOption,
    pub eager_split: Option<Bytes>,
}

impl fmt::Display for LoggingMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.dirty_log.to_possible_value();
        f.write_str(name.as_ref().map_or("", |name| name.get_name()))?;
        self.eager_split.map_or(Ok(()), |chunk| write!(f, " + split {chunk}"))
    }
}

/// Configuration to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    pub backing: Backing,
    pub prefault: bool,
    pub logging: LoggingMode,
}

impl Candidate {
    /// Returns the arguments of `granule bench` for this configuration, in addition to `common`.
    pub fn bench_arguments(&self, common: &[String]) -> Vec<String> {
        let Self { backing, prefault, logging: LoggingMode { dirty_log, eager_split } } = *self;
        let mut arguments = vec!["-s".to_owned(), backing.to_string()];
        arguments.extend_from_slice(common);
        if prefault {
            arguments.push("--prefault".to_owned());
        }
        let plain = LoggingMode { dirty_log, eager_split: None };
        if dirty_log != DirtyLogOption::default() {
            arguments.extend(["--dirty-log".to_owned(), plain.to_string()]);
        }
        if let Some(chunk) = eager_split {
            arguments.extend(["--eager-split".to_owned(), chunk.to_string()]);
        }
        arguments
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefault = if self.prefault { "prefault on" } else { "prefault off" };
        write!(f, "{}, {prefault}, {}", self.backing, self.logging)
    }
}

/// Configuration that is not measured, and the reason with its remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    pub what: String,
    pub reason: String,
}

impl LeftOut {
    pub fn new(what: impl fmt::Display, reason: impl Into<String>) -> Self {
        Self { what: what.to_string(), reason: reason.into() }
    }
}

/// Backing that the host offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OfferedBacking {
    pub backing: Backing,
    /// Indicates pages larger than the base page, which dirty logging splits.
    pub has_blocks: bool,
}

/// Modes of dirty logging to measure. `manual` is left out, because `initially-set` (since Linux
/// 5.7) is the same with a cheaper start: KVM write-protects no memory until the log is cleared. The
/// measured start contains a first clear of the whole log, which a migration does piece by piece.
const MODES: [DirtyLogOption; 3] =
    [DirtyLogOption::Plain, DirtyLogOption::InitiallySet, DirtyLogOption::Ring];

/// Returns the backings that a VM of `size` can have on this host, and those that it cannot.
pub fn offered_backings(pages: &HostPages, size: Bytes) -> (Vec<OfferedBacking>, Vec<LeftOut>) {
    let hugetlb = pages.hugetlb.iter().map(|&page| Backing::AnonymousHugetlb(Some(page)));
    let all = [Backing::Anonymous, Backing::Shmem, Backing::AnonymousThp];
    let mut offered = Vec::new();
    let mut left_out = Vec::new();
    for backing in all.into_iter().chain(hugetlb) {
        let plan = BackingPlan::new(backing, pages).and_then(|plan| {
            if plan.is_hugetlb() {
                pages.check_hugetlb_pool(plan.page_size(), size)?;
            }
            Ok(plan)
        });
        match plan {
            Ok(plan) => offered.push(OfferedBacking {
                backing,
                has_blocks: plan.page_size() > plan.base_page_size(),
            }),
            Err(error) => left_out.push(LeftOut::new(backing, error_text(&error))),
        }
    }
    if pages.hugetlb.is_empty() {
        left_out.push(LeftOut::new("hugetlb", "the host's kernel lacks CONFIG_HUGETLBFS"));
    }
    let shmem = "the page-table test has shared memory of base pages only";
    left_out.push(LeftOut::new("shmem with transparent huge pages", shmem));
    (offered, left_out)
}

/// Returns the modes of dirty logging that `probe` accepts, and those that it refuses. `chunk` is
/// the chunk size of eager page splitting, or the reason for its absence.
pub fn offered_modes(
    chunk: Result<Bytes, &str>,
    probe: impl Fn(LoggingMode) -> Result<(), String>,
) -> (Vec<LoggingMode>, Vec<LeftOut>) {
    let mut left_out = Vec::new();
    let mut chunks = vec![None];
    match chunk {
        Ok(chunk) => chunks.push(Some(chunk)),
        Err(reason) => left_out.push(LeftOut::new("eager split", reason)),
    }
    let mut modes = Vec::new();
    for dirty_log in MODES {
        for &eager_split in &chunks {
            let mode = LoggingMode { dirty_log, eager_split };
            match probe(mode) {
                Ok(()) => modes.push(mode),
                Err(reason) => left_out.push(LeftOut::new(mode, reason)),
            }
        }
    }
    (modes, left_out)
}

/// Returns whether this host's KVM can create a VM with a mode of dirty logging.
///
/// # Errors
/// The error of KVM.
pub fn probe_mode(mode: LoggingMode) -> Result<(), String> {
    let config = KvmConfig {
        dirty_mode: mode.dirty_log.into(),
        eager_split: mode.eager_split,
        events: CountedEvents::None,
        ..KvmConfig::new(Backing::Anonymous, Bytes::kib(4), 1)
    };
    KvmMachine::new(config).map(drop).map_err(|error| error_text(&error))
}

/// Returns the chunk size of eager page splitting: the smallest block of stage 2.
///
/// # Errors
/// The reason why this host has none.
pub fn eager_split_chunk(block_sizes: &[Bytes]) -> Result<Bytes, &'static str> {
    if cfg!(target_arch = "x86_64") {
        return Err("on x86_64 it is an option of the kvm module (eager_page_split), not of a VM");
    }
    // The first size is the page.
    block_sizes.get(1).copied().ok_or(
        "this host's KVM does not support it (KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE, Linux 6.5)",
    )
}

/// Returns every combination. Those of one mode are adjacent, so that a sweep that its time limit
/// ends has measured every backing.
pub fn candidates(backings: &[OfferedBacking], modes: &[LoggingMode]) -> Vec<Candidate> {
    let mut candidates = Vec::new();
    for &logging in modes {
        for prefault in [false, true] {
            let splits =
                |offered: &&OfferedBacking| offered.has_blocks || logging.eager_split.is_none();
            candidates.extend(
                backings.iter().filter(splits).map(|&OfferedBacking { backing, .. }| Candidate {
                    backing,
                    prefault,
                    logging,
                }),
            );
        }
    }
    candidates
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    const PLAIN: LoggingMode = LoggingMode { dirty_log: DirtyLogOption::Plain, eager_split: None };

    fn host(free: u64) -> (tempfile::TempDir, HostPages) {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("kernel/mm/hugepages/hugepages-2048kB");
        fs::create_dir_all(&folder).unwrap();
        for name in ["nr_hugepages", "free_hugepages"] {
            fs::write(folder.join(name), free.to_string()).unwrap();
        }
        for name in ["resv_hugepages", "surplus_hugepages", "nr_overcommit_hugepages"] {
            fs::write(folder.join(name), "0").unwrap();
        }
        let pages = HostPages::from_files(Bytes::kib(4), root.path(), "").unwrap();
        (root, pages)
    }

    #[test]
    fn a_pool_must_hold_the_whole_vm() {
        let (_root, pages) = host(32);

        let (small, _) = offered_backings(&pages, Bytes::mib(64));
        let (large, left_out) = offered_backings(&pages, Bytes::gib(1));

        let hugetlb = Backing::AnonymousHugetlb(Some(Bytes::mib(2)));
        assert!(small.contains(&OfferedBacking { backing: hugetlb, has_blocks: true }));
        assert!(large.iter().all(|offered| !offered.has_blocks));
        let reason = left_out.iter().find(|one| one.what == "anonymous_hugetlb_2mb").unwrap();
        assert!(reason.reason.contains("echo 512 > "), "{reason:?}");
    }

    #[test]
    fn disabled_thp_and_missing_hugetlb_are_left_out_with_reasons() {
        let pages = HostPages::from_files(Bytes::kib(4), Path::new("/nonexistent"), "").unwrap();

        let (offered, left_out) = offered_backings(&pages, Bytes::mib(64));

        let offered: Vec<_> = offered.iter().map(|one| one.backing).collect();
        assert_eq!(offered, [Backing::Anonymous, Backing::Shmem]);
        let names: Vec<_> = left_out.iter().map(|one| one.what.as_str()).collect();
        assert_eq!(names, ["anonymous_thp", "hugetlb", "shmem with transparent huge pages"]);
    }

    #[test]
    fn refused_modes_are_left_out_with_the_reason_of_kvm() {
        let refuse_rings = |mode: LoggingMode| match mode.dirty_log {
            DirtyLogOption::Ring => Err("no dirty rings".to_owned()),
            _ => Ok(()),
        };

        let (modes, left_out) = offered_modes(Err("needs Linux 6.5"), refuse_rings);
        let (split, _) = offered_modes(Ok(Bytes::mib(2)), |_| Ok(()));

        let names: Vec<_> = modes.iter().map(LoggingMode::to_string).collect();
        assert_eq!(names, ["plain", "initially-set"]);
        assert_eq!(left_out[0], LeftOut::new("eager split", "needs Linux 6.5"));
        assert_eq!(left_out[1], LeftOut::new("ring", "no dirty rings"));
        assert_eq!(split.len(), 6);
        assert_eq!(split[1].to_string(), "plain + split 2M");
    }

    #[test]
    fn only_backings_with_blocks_are_combined_with_eager_splitting() {
        let backings = [(Backing::Anonymous, false), (Backing::AnonymousThp, true)]
            .map(|(backing, has_blocks)| OfferedBacking { backing, has_blocks });
        let split = LoggingMode { eager_split: Some(Bytes::mib(2)), ..PLAIN };

        let all = candidates(&backings, &[PLAIN, split]);

        assert_eq!(all.len(), 4 + 2);
        assert!(all[4..].iter().all(|one| one.backing == Backing::AnonymousThp));
    }

    #[test]
    fn a_candidate_is_a_command_line_of_bench() {
        let candidate = Candidate {
            backing: Backing::AnonymousHugetlb(Some(Bytes::mib(2))),
            prefault: true,
            logging: LoggingMode {
                dirty_log: DirtyLogOption::Ring,
                eager_split: Some(Bytes::mib(2)),
            },
        };

        let arguments = candidate.bench_arguments(&["-v".to_owned(), "2".to_owned()]);

        let expected = "-s anonymous_hugetlb_2mb -v 2 --prefault --dirty-log ring --eager-split 2M";
        assert_eq!(arguments.join(" "), expected);
        assert!(crate::bench::Args::from_arguments(&arguments).is_ok());
    }
}
