// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Prepares the kernels of a run in the cache: opens sources, applies patches, builds images and
//! tests.
//!
//! ```text
//! source_package ─ sources ─┬─ recipe ─ build ─ image
//! series, mail, revisions ──┘
//! sources ─ selftests
//! sources, series ─ host_packages, series_check
//! ```

pub mod build;
pub mod git;
pub mod host_packages;
pub mod image;
pub mod mail;
pub mod planned;
pub mod recipe;
pub mod revisions;
pub mod selftests;
pub mod series;
pub mod series_check;
pub mod source_package;
pub mod sources;
pub mod toolchain;

use std::{
    fs::{File, TryLockError},
    path::{Path, PathBuf},
};

use self::{
    build::KernelBuilder,
    planned::PlannedKernel,
    recipe::RecipeBook,
    selftests::Invocation,
    sources::{Source, open_base},
};
use crate::{
    LabError,
    command::CommandError,
    options::{KernelOptions, Options, Paths, SourceOptions, TestProgram, Workload},
    progress::Progress,
    shell::Shell,
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
pub fn fetch(shell: Shell, cache: &Path, origin: &SourceOptions) -> Result<PathBuf, LabError> {
    let _lock = lock_cache(shell, cache)?;
    let source = open_base(shell, cache, origin)?;
    Ok(source.repository.switch_to(&source.base)?.path)
}

/// Source and recipes of the kernels of a run, and the tests from a kernel tree. The cache is locked
/// until the value is dropped.
#[derive(Debug)]
pub struct Preparation<'a> {
    shell: Shell,
    paths: &'a Paths,
    kernels: &'a KernelOptions,
    origin: Origin,
    pub tests: Vec<Invocation>,
    _lock: Option<File>,
}

#[derive(Debug)]
enum Origin {
    Images(Vec<Kernel>),
    Recipes(RecipeBook),
}

impl<'a> Preparation<'a> {
    /// Opens sources, applies patches and builds the tests.
    pub fn new(
        shell: Shell,
        options: &'a Options,
        paths: &'a Paths,
        progress: &Progress,
    ) -> Result<Self, LabError> {
        let kernels = &options.common.kernels;
        let has_kernel_test = match &options.workload {
            Workload::PageTableTest(matrix) => matrix.test == TestProgram::KernelPageTableTest,
            Workload::Selftests(_) => true,
            Workload::Guest(_) => false,
        };
        let uses_cache = kernels.images.is_empty() || has_kernel_test;
        let lock = if uses_cache { lock_cache(shell, &paths.cache)? } else { None };
        let tests = match has_kernel_test {
            true => build_tests(shell, options, &paths.cache, progress)?,
            false => Vec::new(),
        };
        let origin = if kernels.images.is_empty() {
            progress.start_stage("source of the kernels");
            let book = RecipeBook::new(shell, paths, kernels)?;
            progress.print_note(&book.summary());
            Origin::Recipes(book)
        } else {
            Origin::Images(open_images(&kernels.images)?)
        };
        Ok(Self { shell, paths, kernels, origin, tests, _lock: lock })
    }

    /// Returns the kernels, which need not be built.
    pub fn planned(&self) -> Result<Vec<PlannedKernel>, LabError> {
        let book = match &self.origin {
            Origin::Images(images) => {
                return Ok(images.iter().map(PlannedKernel::of_image).collect());
            }
            Origin::Recipes(book) => book,
        };
        let builder = self.builder(book)?;
        let planned = |recipe| Ok(PlannedKernel::of_build(&builder.plan(recipe)?));
        book.recipes.iter().map(planned).collect()
    }

    pub fn cache(&self) -> &Path {
        &self.paths.cache
    }

    fn builder<'b>(&'b self, book: &'b RecipeBook) -> Result<KernelBuilder<'b>, LabError> {
        Ok(KernelBuilder::new(self.shell, self.paths, &book.source, &self.kernels.build)?)
    }

    /// Builds all kernels.
    pub fn build_all(&self, progress: &Progress) -> Result<Vec<Kernel>, LabError> {
        let count = match &self.origin {
            Origin::Images(images) => return Ok(images.clone()),
            Origin::Recipes(book) => book.recipes.len(),
        };
        (0..count).map(|index| self.build(index, progress)).collect()
    }

    /// Builds a kernel, unless it is in the cache.
    pub fn build(&self, index: usize, progress: &Progress) -> Result<Kernel, LabError> {
        let book = match &self.origin {
            Origin::Images(images) => return Ok(images[index].clone()),
            Origin::Recipes(book) => book,
        };
        let recipe = &book.recipes[index];
        let builder = self.builder(book)?;
        let build = builder.plan(recipe)?;
        if !build.is_done() {
            progress.start_stage(format!("building the kernel '{}'", recipe.name));
        }
        let (kernel, mismatches) = builder.build(&build)?;
        // Kernels of one version have the same mismatches, so each is printed once.
        for (_, message) in mismatches.iter().filter(|_| index == 0) {
            progress.print_note(message);
        }
        Ok(kernel)
    }
}

fn build_tests(
    shell: Shell,
    options: &Options,
    cache: &Path,
    progress: &Progress,
) -> Result<Vec<Invocation>, LabError> {
    let kernels = &options.common.kernels;
    let (suite, invocations) = match &options.workload {
        Workload::Selftests(requested) => {
            let suite = selftests::suite_for_base(kernels.origin.base);
            (suite, suite.invocations(&requested.tests)?)
        }
        _ => {
            let program = PathBuf::from(selftests::PAGE_TABLE_TEST);
            (&selftests::LINUX_6_1, vec![(program, Vec::new())])
        }
    };
    progress.start_stage(format!("tests of Linux {}", suite.version));
    let source = match kernels.origin.base == Some(suite.version) {
        true => open_base(shell, cache, &kernels.origin)?,
        false => Source::open_package(shell, cache, suite.version, None)?,
    };
    let checkout = source.repository.switch_to(&source.base)?;
    let directory = suite.build(shell, cache, &checkout)?;
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
        Ok(Kernel::open(name, image)?)
    };
    images.iter().enumerate().map(kernel).collect()
}
