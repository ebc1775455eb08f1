// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Everything before the first boot: what must be there, kernels, the kernel tree's tests.

use std::{
    fs::{File, TryLockError},
    path::{Path, PathBuf},
};

use super::{
    LabError, Options, Test,
    build::Builder,
    kernel::Kernel,
    options::Kernels,
    progress::Progress,
    series::{self, Wanted},
    sources,
    step::{Shell, StepError},
    upstream::{self, Invocation},
};

/// Checks for our own programs before anything takes long.
pub fn check(options: &Options) -> Result<(), LabError> {
    let places = &options.places;
    for (what, path, option) in [
        ("the static arm64 `granule`", &places.init, "--init"),
        ("the counting plugin", &places.plugin, "--plugin"),
    ] {
        if !path.is_file() && !options.dry_run {
            return Err(LabError::NotBuilt {
                what,
                path: path.clone(),
                option,
            });
        }
    }
    Ok(())
}

/// Makes the cache this run's own until the file is dropped; waits for another run.
pub fn lock(shell: Shell, cache: &Path) -> Result<Option<File>, LabError> {
    shell.make_dir(cache)?;
    if shell.is_dry() {
        return Ok(None);
    }
    let failed = |source| LabError::Lock {
        path: cache.to_owned(),
        source,
    };
    let file = File::create(cache.join("lock")).map_err(failed)?;
    if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
        eprintln!(
            "lab: waiting for another run that prepares kernels in {}",
            cache.display()
        );
    }
    file.lock().map_err(failed)?;
    Ok(Some(file))
}

/// Kernels and tests, ready to run.
pub fn prepare(
    shell: Shell,
    options: &Options,
    progress: &Progress,
) -> Result<(Vec<Kernel>, Vec<Invocation>), LabError> {
    let own = matches!(options.matrix.test, Test::Ours | Test::Guest);
    if !options.kernels.images.is_empty() && own {
        return Ok((given(&options.kernels)?, Vec::new()));
    }
    let _lock = lock(shell, &options.places.cache)?;
    let tests = match options.matrix.test {
        Test::Ours | Test::Guest => Vec::new(),
        Test::Upstream | Test::Selftests => tests(shell, options, progress)?,
    };
    let kernels = if options.kernels.images.is_empty() {
        built(shell, options, progress)?
    } else {
        given(&options.kernels)?
    };
    Ok((kernels, tests))
}

fn tests(
    shell: Shell,
    options: &Options,
    progress: &Progress,
) -> Result<Vec<Invocation>, LabError> {
    let (kernels, cache) = (&options.kernels, &options.places.cache);
    let (suite, wanted) = match options.matrix.test {
        Test::Upstream => {
            let program = PathBuf::from(upstream::PAGE_TABLE_TEST);
            (&upstream::LINUX_6_1, vec![(program, Vec::new())])
        }
        _ => {
            let suite = upstream::suite(&kernels.base);
            let wanted = upstream::invocations(suite, &options.matrix.selftests)?;
            (suite, wanted)
        }
    };
    progress.stage(format!("tests of Linux {}", suite.version));
    let from = if kernels.base == suite.version {
        kernels.clone()
    } else {
        Kernels {
            base: suite.version.to_owned(),
            source: None,
            suite: None,
            ..kernels.clone()
        }
    };
    let tree = sources::tree(shell, cache, &from)?;
    let folder = upstream::build(shell, cache, &tree, suite)?;
    let wanted = wanted.into_iter();
    Ok(wanted
        .map(|(program, arguments)| (folder.join(program), arguments))
        .collect())
}

fn given(kernels: &Kernels) -> Result<Vec<Kernel>, LabError> {
    let several = kernels.images.len() > 1;
    let mut found = Vec::new();
    for (index, image) in kernels.images.iter().enumerate() {
        let name = match index {
            0 if several => "before".to_owned(),
            1 if kernels.images.len() == 2 => "after".to_owned(),
            _ => format!("image-{index}"),
        };
        found.push(Kernel::of(name, image, None)?);
    }
    Ok(found)
}

fn built(shell: Shell, options: &Options, progress: &Progress) -> Result<Vec<Kernel>, LabError> {
    let Options {
        kernels, places, ..
    } = options;
    let linux = places.root.join("stage2/linux");
    let wanted = Wanted {
        base: &kernels.base,
        series: &kernels.series,
        patches: kernels.patches,
        each: kernels.each_patch,
    };
    let mut stacks = series::stacks(&linux, wanted)?;
    if !kernels.only.is_empty() {
        let known: Vec<String> = stacks.iter().map(|stack| stack.name.clone()).collect();
        stacks.retain(|stack| kernels.only.contains(&stack.name));
        if stacks.is_empty() {
            return Err(LabError::NoKernel {
                wanted: kernels.only.join(" or "),
                known: known.join(", "),
            });
        }
    }
    progress.stage(format!("source of Linux {}", kernels.base));
    let tree = sources::tree(shell, &places.cache, kernels)?;
    let mut fragments = vec![linux.join("config/lab.config")];
    if kernels.debug {
        fragments.push(linux.join("config/debug.config"));
    }
    for fragment in &kernels.fragments {
        let whole = std::path::absolute(fragment);
        fragments.push(whole.map_err(|e| StepError::file("find", fragment.clone(), e))?);
    }
    let builder = Builder::new(shell, &places.cache, &tree, fragments)?;
    let mut found: Vec<Kernel> = Vec::new();
    for stack in &stacks {
        if !builder.is_built(stack) {
            progress.stage(format!("building the kernel '{}'", stack.name));
        }
        let (kernel, refused) = builder.kernel(stack)?;
        if found.is_empty() {
            for refused in refused {
                progress.note(&format!(
                    "{} asked for {}, is {}",
                    refused.symbol, refused.wanted, refused.got
                ));
            }
        }
        found.push(kernel);
    }
    Ok(found)
}
