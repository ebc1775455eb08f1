// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Entries of the cache that jobs use: their kernels, the tests of a tree, the files of a guest. A removal
//! from the cache keeps them.

use std::{collections::BTreeSet, path::Path};

use super::matrix::PlannedJob;
use crate::{
    command::CommandError, file_lock::FileLock, in_use, kernel::image::Kernel, shell::Shell,
};

/// Marks the entries of the cache with these kernels, and with the files of these jobs, as in use until
/// the marks are dropped. Other files have no mark; a dry run marks none.
pub fn mark_in_use(
    shell: Shell,
    kernels: &[Kernel],
    jobs: &[PlannedJob],
    cache: &Path,
) -> Result<Vec<FileLock>, CommandError> {
    if shell.is_dry_run() {
        return Ok(Vec::new());
    }
    let images = kernels.iter().map(|kernel| &*kernel.image);
    let files = jobs.iter().flat_map(|job| job.work.files()).map(|(_, file)| file);
    let entry = |path: &Path| {
        let mut names = path.strip_prefix(cache).ok()?.components();
        Some(cache.join(names.next()?).join(names.next()?))
    };
    let entries: BTreeSet<_> = images.chain(files).filter_map(entry).collect();
    let failed = |entry: &Path, error| CommandError::file("mark as used", entry, error);
    entries.iter().map(|entry| in_use::mark(entry).map_err(|error| failed(entry, error))).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{
        jobs::matrix::{self, tests::options},
        values::PageSize,
    };

    #[test]
    fn the_tests_of_jobs_are_in_use_and_files_outside_of_the_cache_are_not_marked() {
        let cache = tempfile::tempdir().unwrap();
        let suite = cache.path().join("selftests/1");
        fs::create_dir_all(&suite).unwrap();
        let jobs = |test| {
            let line = options("lab --test kvm_page_table_test");
            matrix::jobs(&line, PageSize::Kib4, &[(test, Vec::new())])
        };

        let mark = |shell, test| mark_in_use(shell, &[], &jobs(test), cache.path()).unwrap();
        let [shell, dry_run] = [false, true].map(Shell::new);

        let marks = mark(shell, suite.join("aarch64/test"));

        assert!(in_use::lock_for_removal(&suite).unwrap().is_none());
        drop(marks);
        assert!(in_use::lock_for_removal(&suite).unwrap().is_some());
        assert!(mark(shell, "/x/test".into()).is_empty());
        assert!(mark(dry_run, suite.join("aarch64/test")).is_empty());
    }
}
