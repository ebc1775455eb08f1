// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Everything before the first boot: the kernels and the tests of the kernel tree.

use std::{
    fs::{File, TryLockError},
    io,
    path::{Path, PathBuf},
};

use thiserror::Error;

use crate::{
    command::CommandError,
    kernel::{
        build::{BuildError, Builder},
        image::Kernel,
        selftest_build,
        selftests::{self, Invocation, UnknownSelftest},
        series::SeriesError,
        sources::{self, SourceError},
        stacks::{StackRequest, stacks},
        worktree,
    },
    options::{Kernels, Options, Test},
    progress::Progress,
    shell::{Shell, absolute},
};

/// Error returned when a source, a series or a kernel is not available.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message describes its variant")]
pub enum KernelError {
    #[error(transparent)]
    UnknownSelftest(#[from] UnknownSelftest),
    #[error("cannot lock the cache {path}")]
    Lock {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("unknown kernel '{requested}' in --only; expected one of: {known}")]
    UnknownKernel { requested: String, known: String },
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Series(#[from] SeriesError),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error(transparent)]
    Command(#[from] CommandError),
}

/// Locks the cache until the file is dropped; waits for another run.
pub fn lock(shell: Shell, cache: &Path) -> Result<Option<File>, KernelError> {
    shell.create_dir(cache)?;
    if shell.is_dry() {
        return Ok(None);
    }
    let failed = |source| KernelError::Lock { path: cache.to_owned(), source };
    let file = File::create(cache.join("lock")).map_err(failed)?;
    if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
        eprintln!("lab: waiting for another run that prepares kernels in {}", cache.display());
    }
    file.lock().map_err(failed)?;
    Ok(Some(file))
}

/// Fetches and unpacks the source and returns its tree, without patches.
pub fn fetch(shell: Shell, cache: &Path, kernels: &Kernels) -> Result<PathBuf, KernelError> {
    let _lock = lock(shell, cache)?;
    plain_tree(shell, cache, kernels)
}

/// As [`fetch`], with the cache locked by the caller.
pub fn plain_tree(shell: Shell, cache: &Path, kernels: &Kernels) -> Result<PathBuf, KernelError> {
    let tree = sources::tree(shell, cache, kernels)?;
    worktree::restore(shell, &tree)?;
    Ok(tree.path)
}

/// Returns the kernels and the tests of a run.
pub fn prepare(
    shell: Shell,
    options: &Options,
    progress: &Progress,
) -> Result<(Vec<Kernel>, Vec<Invocation>), KernelError> {
    let images = &options.kernels.images;
    let test = options.matrix.test;
    let has_kernel_test = matches!(test, Test::KernelPageTableTest | Test::Selftests);
    if !images.is_empty() && !has_kernel_test {
        return Ok((open_images(images)?, Vec::new()));
    }
    let _lock = lock(shell, &options.paths.cache)?;
    let tests = if has_kernel_test { kernel_tests(shell, options, progress)? } else { Vec::new() };
    let kernels =
        if images.is_empty() { built(shell, options, progress)? } else { open_images(images)? };
    Ok((kernels, tests))
}

fn kernel_tests(
    shell: Shell,
    options: &Options,
    progress: &Progress,
) -> Result<Vec<Invocation>, KernelError> {
    let (kernels, cache) = (&options.kernels, &options.paths.cache);
    let (suite, invocations) = match options.matrix.test {
        Test::KernelPageTableTest => {
            let program = PathBuf::from(selftests::PAGE_TABLE_TEST);
            (&selftests::LINUX_6_1, vec![(program, Vec::new())])
        }
        _ => {
            let suite = selftests::suite(&kernels.base);
            (suite, suite.invocations(&options.matrix.selftests)?)
        }
    };
    progress.stage(format!("tests of Linux {}", suite.version));
    let source = if kernels.base == suite.version {
        kernels.clone()
    } else {
        Kernels { base: suite.version.to_owned(), source: None, suite: None, ..kernels.clone() }
    };
    let tree = sources::tree(shell, cache, &source)?;
    let directory = selftest_build::build(shell, cache, &tree, suite)?;
    Ok(invocations
        .into_iter()
        .map(|(program, arguments)| (directory.join(program), arguments))
        .collect())
}

/// Opens the images of `--image`.
fn open_images(images: &[PathBuf]) -> Result<Vec<Kernel>, KernelError> {
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

fn built(shell: Shell, options: &Options, progress: &Progress) -> Result<Vec<Kernel>, KernelError> {
    let Options { kernels, paths, .. } = options;
    let linux = paths.root.join("stage2/linux");
    let request = StackRequest {
        base: &kernels.base,
        series: &kernels.series,
        patches: kernels.patches,
        each: kernels.each_patch,
    };
    let mut stacks = stacks(&linux, request)?;
    if !kernels.only.is_empty() {
        let known: Vec<String> = stacks.iter().map(|stack| stack.name.clone()).collect();
        stacks.retain(|stack| kernels.only.contains(&stack.name));
        if stacks.is_empty() {
            return Err(KernelError::UnknownKernel {
                requested: kernels.only.join("', '"),
                known: known.join(", "),
            });
        }
    }
    progress.stage(format!("source of Linux {}", kernels.base));
    let tree = sources::tree(shell, &paths.cache, kernels)?;
    let mut fragments = vec![linux.join("config/lab.config")];
    if kernels.debug {
        fragments.push(linux.join("config/debug.config"));
    }
    for fragment in &kernels.fragments {
        fragments.push(absolute(fragment)?);
    }
    let builder = Builder::new(shell, &paths.cache, &tree, fragments)?;
    let mut found: Vec<Kernel> = Vec::new();
    for stack in &stacks {
        if !builder.is_built(stack) {
            progress.stage(format!("building the kernel '{}'", stack.name));
        }
        let (kernel, mismatches) = builder.kernel(stack)?;
        // All kernels of a run have the same configuration.
        for mismatch in mismatches.iter().filter(|_| found.is_empty()) {
            progress.note(&format!(
                "{} is {} instead of {}",
                mismatch.symbol, mismatch.actual, mismatch.requested
            ));
        }
        found.push(kernel);
    }
    Ok(found)
}
