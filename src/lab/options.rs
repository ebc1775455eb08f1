// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Converts the arguments of `granule lab` into the options of a run.

use std::{
    env, io,
    path::{Path, PathBuf, absolute},
    thread::available_parallelism,
    time::Duration,
};

use granule_lab::{Kernels, Matrix, Options, Paths, Test, next_name, series_names};
use granule_types::{backing::Backing, units::Bytes};

use super::{Args, TestName};

type Error = Box<dyn std::error::Error>;

/// Series that is applied by default.
pub const DEFAULT_SERIES: &str = "stage2-fault-path";

/// Returns the options of a run.
pub fn options(args: Args) -> Result<Options, Error> {
    let cpus = available_parallelism().map_or(1, usize::from);
    let paths = paths(&args)?;
    let backings = backings(&args);
    let series = if !args.series.is_empty() || !args.image.is_empty() {
        args.series
    } else {
        let known = series_names(&paths.root.join("stage2/linux"), &args.base);
        known.into_iter().filter(|s| s == DEFAULT_SERIES).collect()
    };
    let test = match args.test {
        _ if args.selftests || !args.selftest.is_empty() => Test::Selftests,
        _ if args.guest => Test::Guest,
        TestName::Bench => Test::Bench,
        TestName::KvmPageTableTest => Test::KernelPageTableTest,
    };
    let smoke_size = (args.smoke && !args.guest).then_some(Bytes::mib(16));
    Ok(Options {
        kernels: Kernels {
            base: args.base,
            source: args.source,
            suite: args.suite,
            series,
            patches: args.patches,
            each_patch: args.each_patch,
            images: args.image,
            fragments: args.config,
            debug: args.debug_kernel,
            only: args.only,
        },
        matrix: Matrix {
            test,
            backings,
            vcpus: args.vcpus,
            memory: args.size.or(smoke_size),
            mode: args.mode,
            offset: args.offset,
            iterations: args.iterations,
            seeds: if args.smoke { 1 } else { args.seeds },
            selftests: args.selftest,
            extra: args.bench_arg,
            distribution: args.distribution,
            cpu: args.cpu,
            cpus: args.smp,
            host_memory: args.memory,
        },
        paths,
        dry_run: args.dry_run,
        parallel: args.jobs.map_or(cpus, |jobs| usize::try_from(jobs.get()).unwrap_or(cpus)),
        deadline: Duration::from_secs(args.deadline),
        min_effect_percent: args.min_effect,
        judge: !args.smoke,
    })
}

fn backings(args: &Args) -> Vec<Backing> {
    let hugetlb = |size| Backing::AnonymousHugetlb(Some(size));
    if !args.backing.is_empty() {
        return args.backing.clone();
    }
    if args.smoke {
        return vec![Backing::Anonymous, hugetlb(Bytes::mib(2))];
    }
    let mut backings = vec![
        Backing::Anonymous,
        Backing::AnonymousThp,
        hugetlb(Bytes::mib(2)),
        hugetlb(Bytes::gib(1)),
    ];
    if args.guest {
        backings.extend([Backing::Shmem, Backing::SharedHugetlb]);
    }
    backings
}

/// Returns the repository: `--root`, or the one that contains the current directory or this program.
pub fn repository(root: Option<&Path>) -> Result<PathBuf, Error> {
    if let Some(root) = root {
        return Ok(absolute(root)?);
    }
    env::current_dir()?
        .ancestors()
        .chain(env::current_exe()?.ancestors())
        .find(|directory| directory.join("stage2/linux/config/lab.config").is_file())
        .map(Path::to_owned)
        .ok_or_else(|| "no repository found: set it with --root".into())
}

/// Returns the cache: `--cache`, or a directory below the user's cache.
pub fn cache(cache: Option<&Path>) -> Result<PathBuf, Error> {
    let home =
        |variable: &str| env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = cache
        .map(Path::to_owned)
        .or_else(|| Some(home("XDG_CACHE_HOME")?.join("granule")))
        .or_else(|| Some(home("HOME")?.join(".cache/granule")))
        .ok_or("no cache directory found: set it with --cache")?;
    Ok(absolute(cache)?)
}

/// Returns the paths; the programs of this workspace are beside this one by default.
fn paths(args: &Args) -> Result<Paths, Error> {
    let program = env::current_exe()?;
    let built = program.parent().unwrap_or(Path::new(""));
    let target = built.parent().unwrap_or(Path::new(""));
    let or = |path: &Option<PathBuf>, default: PathBuf| -> io::Result<PathBuf> {
        absolute(path.clone().unwrap_or(default))
    };
    Ok(Paths {
        root: repository(args.root.as_deref())?,
        init: or(&args.init, target.join("aarch64-unknown-linux-musl/release/granule"))?,
        plugin: or(&args.plugin, built.join("libgranule_qemu_plugin.so"))?,
        cache: cache(args.cache.as_deref())?,
        out: args.out.clone().unwrap_or_else(|| next_name(&args.base)),
    })
}
