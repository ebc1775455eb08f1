// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Builds and measures one kernel, for commands that treat kernels one after the other.

use granule_types::record::Record;

use crate::{
    LabError,
    jobs::{JobQueue, matrix::PlannedJob, run_directory::FailedJob},
    kernel::{Kernel, build::KernelBuilder, lock_cache, recipe::Recipe, sources::Source},
    options::{BuildOptions, Paths},
    shell::Shell,
};

/// Results of a kernel.
#[derive(Debug)]
pub struct Measurement {
    /// Records of the jobs that ended well, in the order of the jobs.
    pub records: Vec<Record>,
    pub failures: Vec<FailedJob>,
}

/// Builds the kernel of a recipe, unless it is cached.
pub fn build(
    shell: Shell,
    paths: &Paths,
    source: &Source,
    options: &BuildOptions,
    recipe: &Recipe,
) -> Result<Kernel, LabError> {
    let _lock = lock_cache(shell, &paths.cache)?;
    let builder = KernelBuilder::new(shell, paths, source, options)?;
    Ok(builder.build(&builder.plan(recipe)?)?.0)
}

/// Runs the jobs on a kernel; its files are in the run directory. Returns `None` in a dry run.
pub fn measure(
    queue: &JobQueue<'_>,
    kernel: &Kernel,
    jobs: &[PlannedJob],
) -> Result<Option<Measurement>, LabError> {
    let kernels = std::slice::from_ref(kernel);
    queue.run_directory.add_kernels(queue.shell, kernels)?;
    let results = queue.run(kernels, jobs).pop().unwrap_or_default();
    if queue.shell.is_dry_run() {
        return Ok(None);
    }
    let (records, failures) =
        queue.run_directory.write_kernel_records(kernel, jobs, results, queue.progress)?;
    Ok(Some(Measurement { records, failures }))
}
