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
    fs::{self, File},
    path::{Path, PathBuf},
};

use self::{
    build::KernelBuilder,
    image::PAGING_FUNCTION,
    planned::PlannedKernel,
    recipe::RecipeBook,
    selftests::{Invocation, PAGE_TABLE_TEST, SelftestSuite},
    sources::{Source, open_base},
    toolchain::environment_remark,
};
use crate::{
    command::CommandError,
    error::LabError,
    file_lock::FileLock,
    host::program::guest_mode_number,
    options::{KernelOptions, Matrix, Options, Paths, SourceOptions, TestProgram, Workload},
    progress::Progress,
    shell::{self, Shell, absolute},
    values::Revisions,
};

pub use image::Kernel;

/// File of the cache that is locked while kernels are built.
pub const CACHE_LOCK: &str = "lock";

/// Locks the cache until the value is dropped; waits while another run holds the lock.
pub fn lock_cache(shell: Shell, cache: &Path) -> Result<Option<FileLock>, LabError> {
    shell.create_dir(cache)?;
    if shell.is_dry_run() {
        return Ok(None);
    }
    let failed = |error| CommandError::file("lock the cache", cache, error);
    let file = File::create(cache.join(CACHE_LOCK)).map_err(failed)?;
    let lock = FileLock::try_exclusive(file).map_err(failed)?.or_else(|file| {
        eprintln!("lab: waiting for another run that prepares kernels in {}", cache.display());
        FileLock::exclusive(file).map_err(failed)
    });
    lock.map(Some).map_err(Into::into)
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
    _lock: Option<FileLock>,
}

#[derive(Debug)]
enum Origin {
    Images(Vec<Kernel>),
    Recipes(Box<RecipeBook>),
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
        let uses_cache = kernels.images.is_empty() || builds_tests(&options.workload);
        let lock = if uses_cache { lock_cache(shell, &paths.cache)? } else { None };
        if uses_cache && let Some(remark) = environment_remark() {
            progress.print_note(&remark);
        }
        let origin = if kernels.images.is_empty() {
            progress.start_stage("source of the kernels");
            let recipes = RecipeBook::new(shell, paths, kernels)?;
            progress.print_note(&recipes.summary());
            Origin::Recipes(Box::new(recipes))
        } else {
            let images = open_images(&kernels.images)?;
            if matches!(options.workload, Workload::Boot(_)) {
                images
                    .iter()
                    .try_for_each(|image| image.required_function(PAGING_FUNCTION).map(drop))?;
            }
            if options.report.functions {
                let without = images.iter().find(|image| image.system_map.is_none());
                if let Some(image) = without {
                    return Err(LabError::Unusable(format!(
                        "--functions needs the System.map of {}: copy the one of its build beside it",
                        image.image.display()
                    )));
                }
            }
            for remark in images.iter().filter_map(Kernel::remark) {
                progress.print_note(&remark);
            }
            Origin::Images(images)
        };
        let book = match &origin {
            Origin::Recipes(book) => Some(&**book),
            Origin::Images(_) => None,
        };
        let tests = test_programs(shell, options, &paths.cache, book, progress)?;
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

    /// Returns the revisions of the kernels, with each name replaced by the hash of its commit.
    pub fn revisions(&self) -> Option<Revisions> {
        match &self.origin {
            Origin::Images(_) => None,
            Origin::Recipes(book) => book.revisions.clone(),
        }
    }

    pub fn cache(&self) -> &Path {
        &self.paths.cache
    }

    fn builder<'b>(&'b self, book: &'b RecipeBook) -> Result<KernelBuilder<'b>, LabError> {
        KernelBuilder::new(self.shell, self.paths, &book.source, &self.kernels.build)
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
        mismatches.iter().for_each(|message| progress.print_note_once(message));
        if let Some(remark) = kernel.remark() {
            progress.print_note(&remark);
        }
        Ok(kernel)
    }
}

/// Reports whether the programs of a workload are built from a kernel tree.
const fn builds_tests(workload: &Workload) -> bool {
    matches!(
        workload,
        Workload::Selftests(_)
            | Workload::PageTableTest(Matrix { test: TestProgram::KernelPageTableTest, .. })
    )
}

/// Returns the programs that a workload runs besides this one: those of a kernel tree, which are
/// built under the lock of the cache, or that of `--test-binary`. The trees of `book` are preferred.
pub fn test_programs(
    shell: Shell,
    options: &Options,
    cache: &Path,
    book: Option<&RecipeBook>,
    progress: &Progress,
) -> Result<Vec<Invocation>, LabError> {
    match builds_tests(&options.workload) {
        true => build_tests(shell, options, cache, book, progress),
        false => Ok(given_test(&options.workload)?),
    }
}

/// Returns the page-table test of `--test-binary`.
fn given_test(workload: &Workload) -> Result<Vec<Invocation>, CommandError> {
    let Workload::PageTableTest(Matrix { test_binary: Some(path), mode, .. }) = workload else {
        return Ok(Vec::new());
    };
    let path = absolute(path)?;
    let mode = guest_mode_number(&shell::read(&path)?, mode.id);
    Ok(vec![(path, vec!["-m".to_owned(), mode.to_string()])])
}

/// Builds the tests of the workload (see [`selftests`]).
fn build_tests(
    shell: Shell,
    options: &Options,
    cache: &Path,
    book: Option<&RecipeBook>,
    progress: &Progress,
) -> Result<Vec<Invocation>, LabError> {
    let own = book.and_then(|book| Some((&book.source, &book.recipes.last()?.tree)));
    let package = |version| Source::open_package(shell, cache, version, None);
    let debian = match &options.workload {
        Workload::Selftests(tests) => {
            let default = own.is_none().then_some(selftests::PAGE_TABLE_TEST_VERSION);
            tests.tests_of.or(default).map(package).transpose()?
        }
        _ => match package(selftests::PAGE_TABLE_TEST_VERSION) {
            Ok(source) => Some(source),
            Err(error) if own.is_some_and(|(source, tree)| selftests::has_test(source, tree)) => {
                progress.print_note(&format!(
                    "the page-table test is that of the last kernel's tree, because {error}"
                ));
                None
            }
            Err(error) => return Err(error),
        },
    };
    let Some((source, tree)) = debian.as_ref().map(|source| (source, &source.base)).or(own) else {
        return Ok(Vec::new());
    };
    let version = source.version(tree)?.map_or_else(String::new, |version| version.to_string());
    progress.start_stage(format!("tests of Linux {version} ({})", source.description));
    let variables = &options.common.kernels.build.variables;
    let suite = SelftestSuite::build(shell, cache, (&source.repository, tree), variables)?;
    if let Some(remark) = suite.remark() {
        progress.print_note(&remark);
    }
    match &options.workload {
        Workload::Selftests(requested) => suite.invocations(&requested.tests),
        Workload::PageTableTest(matrix) => {
            let program = suite.program(PAGE_TABLE_TEST);
            let mode = fs::read(&program)
                .map_or_else(|_| matrix.mode.id, |file| guest_mode_number(&file, matrix.mode.id));
            Ok(vec![(program, vec!["-m".to_owned(), mode.to_string()])])
        }
        Workload::Guest(_) | Workload::Program(_) | Workload::Boot(_) | Workload::Zap(_) => {
            Ok(Vec::new())
        }
    }
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
