// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Prepares the kernels of a run in the cache: downloads a Linux version, applies series, and
//! builds images and tests.
//!
//! ```text
//! source_package ─ sources ─┬─ worktree ─ build ─ image
//! series ───────────────────┘
//! sources ─ selftests
//! sources, series ─ host_packages, series_check
//! ```

pub mod build;
pub mod host_packages;
pub mod image;
pub mod selftests;
pub mod series;
pub mod series_check;
pub mod source_package;
pub mod sources;
pub mod worktree;

use std::{
    fs::{File, TryLockError},
    path::{Path, PathBuf},
};

use self::{
    build::KernelBuilder,
    selftests::Invocation,
    series::{DEFAULT_SERIES, stacks},
};
use crate::{
    LabError,
    command::CommandError,
    options::{KernelOptions, Options, Paths, TestProgram},
    progress::Progress,
    shell::{Shell, absolute},
};

pub use image::Kernel;

/// Locks the cache until the file is dropped; waits while another run holds the lock.
pub fn lock_cache(shell: Shell, cache: &Path) -> Result<Option<File>, LabError> {
    shell.create_dir(cache)?;
    if shell.is_dry_run() {
        return Ok(None);
    }
    let failed = |error| CommandError::file("lock the cache", cache, error);
    let file = File::create(cache.join("lock")).map_err(failed)?;
    if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
        eprintln!("lab: waiting for another run that prepares kernels in {}", cache.display());
    }
    file.lock().map_err(failed)?;
    Ok(Some(file))
}

/// Fetches and unpacks the source of the base. Returns its unpatched tree.
pub fn fetch(shell: Shell, cache: &Path, kernels: &KernelOptions) -> Result<PathBuf, LabError> {
    let _lock = lock_cache(shell, cache)?;
    base_tree(shell, cache, kernels)
}

/// Fetches the source as [`fetch`] does, for a caller that holds the lock of the cache.
pub fn base_tree(shell: Shell, cache: &Path, kernels: &KernelOptions) -> Result<PathBuf, LabError> {
    let tree = sources::cached_tree(shell, cache, kernels)?;
    worktree::revert(shell, &tree)?;
    Ok(tree.path)
}

pub fn prepare(
    shell: Shell,
    options: &Options,
    paths: &Paths,
    progress: &Progress,
) -> Result<(Vec<Kernel>, Vec<Invocation>), LabError> {
    let images = &options.kernels.images;
    let test = options.matrix.test();
    let has_kernel_test = matches!(test, TestProgram::KernelPageTableTest | TestProgram::Selftests);
    if !images.is_empty() && !has_kernel_test {
        return Ok((open_images(images)?, Vec::new()));
    }
    let _lock = lock_cache(shell, &paths.cache)?;
    let tests = match has_kernel_test {
        true => build_tests(shell, options, &paths.cache, progress)?,
        false => Vec::new(),
    };
    let kernels = match images.as_slice() {
        [] => build_kernels(shell, &options.kernels, paths, progress)?,
        images => open_images(images)?,
    };
    Ok((kernels, tests))
}

fn build_tests(
    shell: Shell,
    Options { kernels, matrix, .. }: &Options,
    cache: &Path,
    progress: &Progress,
) -> Result<Vec<Invocation>, LabError> {
    let (suite, invocations) = match matrix.test() {
        TestProgram::KernelPageTableTest => {
            let program = PathBuf::from(selftests::PAGE_TABLE_TEST);
            (&selftests::LINUX_6_1, vec![(program, Vec::new())])
        }
        _ => {
            let suite = selftests::suite_for_base(&kernels.base);
            (suite, suite.invocations(&matrix.selftest)?)
        }
    };
    progress.start_stage(format!("tests of Linux {}", suite.version));
    let mut source = kernels.clone();
    if kernels.base != suite.version {
        source = KernelOptions { source: None, suite: None, ..source };
        suite.version.clone_into(&mut source.base);
    }
    let tree = sources::cached_tree(shell, cache, &source)?;
    let directory = suite.build(shell, cache, &tree)?;
    Ok(invocations
        .into_iter()
        .map(|(program, arguments)| (directory.join(program), arguments))
        .collect())
}

fn open_images(images: &[PathBuf]) -> Result<Vec<Kernel>, LabError> {
    let kernel = |(index, image): (usize, &PathBuf)| {
        let name = match (index, images.len()) {
            (0, 2..) => "before".to_owned(),
            (1, 2) => "after".to_owned(),
            _ => format!("image-{index}"),
        };
        Ok(Kernel::open(name, image, None)?)
    };
    images.iter().enumerate().map(kernel).collect()
}

fn build_kernels(
    shell: Shell,
    kernels: &KernelOptions,
    paths: &Paths,
    progress: &Progress,
) -> Result<Vec<Kernel>, LabError> {
    let linux = &paths.linux;
    let mut request = kernels.clone();
    if request.series.is_empty() {
        request.series = series::series_names(linux, &kernels.base);
        request.series.retain(|name| name == DEFAULT_SERIES);
    }
    let mut stacks = stacks(linux, &request)?;
    if !kernels.only_kernels.is_empty() {
        let known: Vec<String> = stacks.iter().map(|stack| stack.name.clone()).collect();
        stacks.retain(|stack| kernels.only_kernels.contains(&stack.name));
        if stacks.is_empty() {
            return Err(LabError::Unusable(format!(
                "unknown kernel '{}' in --only; expected one of: {}",
                kernels.only_kernels.join("', '"),
                known.join(", ")
            )));
        }
    }
    progress.start_stage(format!("source of Linux {}", kernels.base));
    let tree = sources::cached_tree(shell, &paths.cache, kernels)?;
    let mut fragments = vec![linux.join("config/lab.config")];
    if kernels.debug_kernel {
        fragments.push(linux.join("config/debug.config"));
    }
    for fragment in &kernels.fragments {
        fragments.push(absolute(fragment)?);
    }
    let builder = KernelBuilder::new(shell, &paths.cache, &tree, fragments)?;
    let mut found: Vec<Kernel> = Vec::new();
    for stack in &stacks {
        if !builder.is_built(stack) {
            progress.start_stage(format!("building the kernel '{}'", stack.name));
        }
        let (kernel, mismatches) = builder.build_kernel(stack)?;
        // All kernels of a run have the same configuration, so the first one's mismatches suffice.
        for (_, message) in mismatches.iter().filter(|_| found.is_empty()) {
            progress.print_note(message);
        }
        found.push(kernel);
    }
    Ok(found)
}
