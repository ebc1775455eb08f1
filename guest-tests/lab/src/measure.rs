// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Builds and measures one kernel, for commands that treat kernels one after the other.

use std::path::Path;

use granule_types::record::Record;
use serde::{Deserialize, Serialize};

use crate::{
    error::LabError,
    jobs::{JobQueue, matrix::PlannedJob, run_directory::FailedJob, used_entries::mark_in_use},
    kernel::{Kernel, build::KernelBuilder, lock_cache, recipe::Recipe, sources::Source},
    options::{
        BuildOptions, CommonOptions, ExecutionOptions, HostOptions, KernelOptions, Locations,
        OutputOptions, Paths, SourceOptions,
    },
    progress::Progress,
    shell::Shell,
};

/// Options of these commands.
#[derive(Debug, Clone, clap::Args, Serialize, Deserialize)]
pub struct SerialOptions {
    #[command(flatten)]
    pub build: BuildOptions,
    #[command(flatten)]
    pub locations: Locations,
    #[command(flatten)]
    pub host: HostOptions,
    #[command(flatten)]
    pub output: OutputOptions,
}

impl SerialOptions {
    /// Returns the options of a run with kernels of the repository `git`.
    pub fn common(&self, git: Option<&Path>) -> CommonOptions {
        let origin = SourceOptions { locations: self.locations.clone(), ..Default::default() };
        CommonOptions {
            kernels: KernelOptions {
                git: git.map(Path::to_owned),
                build: self.build.clone(),
                origin,
                ..KernelOptions::default()
            },
            host: self.host.clone(),
            output: self.output.clone(),
            execution: ExecutionOptions::default(),
        }
    }
}

/// Results of a kernel.
#[derive(Debug)]
pub struct Measurement {
    /// Records of the jobs that ended well, in the order of the jobs.
    pub records: Vec<Record>,
    pub failures: Vec<FailedJob>,
}

/// Builds the kernel of a recipe, unless it is cached, and prints each remark once. The inner error is
/// that of a source that does not build, or whose kernel the lab cannot use.
pub fn build(
    shell: Shell,
    paths: &Paths,
    source: &Source,
    options: &BuildOptions,
    recipe: &Recipe,
    progress: &Progress,
) -> Result<Result<Kernel, LabError>, LabError> {
    let _lock = lock_cache(shell, &paths.cache)?;
    let builder = KernelBuilder::new(shell, paths, source, options)?;
    Ok(builder.build(&builder.plan(recipe)?).map(|(kernel, mismatches)| {
        mismatches.iter().for_each(|message| progress.print_note_once(message));
        kernel
    }))
}

/// Runs the jobs on a kernel of this cache, which keeps it meanwhile; its files are in the run
/// directory. Returns `None` in a dry run.
pub fn measure(
    queue: &JobQueue<'_>,
    kernel: &Kernel,
    cache: &Path,
    jobs: &[PlannedJob],
) -> Result<Option<Measurement>, LabError> {
    let kernels = std::slice::from_ref(kernel);
    let _in_use = mark_in_use(queue.shell, kernels, jobs, cache)?;
    queue.run_directory.add_kernels(queue.shell, kernels)?;
    let results = queue.run(kernels, jobs).pop().unwrap_or_default();
    if queue.shell.is_dry_run() {
        return Ok(None);
    }
    let (records, failures) =
        queue.run_directory.write_kernel_records(kernel, jobs, results, queue.progress)?;
    Ok(Some(Measurement { records, failures }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        jobs::matrix::tests::options,
        kernel::revisions::{UserTree, tests::repository},
    };

    #[test]
    fn a_kernel_without_a_required_symbol_is_one_that_does_not_build() {
        let user = repository(&["1"]);
        let commit = UserTree(user.path()).commit("HEAD").unwrap();
        let cache = tempfile::tempdir().unwrap();
        let options = options(&format!("lab --cache {}", cache.path().display()));
        let paths = Paths::new(&options.common).unwrap();
        let (shell, tree) = (Shell::new(true), commit.tree.clone());
        let source = Source::open_git(shell, cache.path(), user.path(), tree).unwrap();
        let recipe = Recipe::of_commit("x".to_owned(), commit);
        let build_options = &options.common.kernels.build;
        let builder = KernelBuilder::new(shell, &paths, &source, build_options).unwrap();
        let image = builder.plan(&recipe).unwrap().image();
        std::fs::create_dir_all(image.parent().unwrap()).unwrap();
        std::fs::write(&image, "image").unwrap();
        std::fs::write(image.with_file_name("config"), "# CONFIG_KVM is not set\n").unwrap();
        let progress = Progress::new(true);

        let built = build(shell, &paths, &source, build_options, &recipe, &progress).unwrap();

        let error = built.unwrap_err().to_string();
        assert!(error.contains("lacks CONFIG_"), "{error}");
    }
}
