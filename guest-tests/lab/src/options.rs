// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of a run, as the command line sets them.

use std::{path::PathBuf, time::Duration};

use granule_types::{backing::Backing, units::Bytes};

/// Options of a run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Kernels under test.
    pub kernels: Kernels,
    /// Jobs on each kernel.
    pub matrix: Matrix,
    /// Paths.
    pub paths: Paths,
    /// Print the run as shell and execute nothing.
    pub dry_run: bool,
    /// Number of emulators at a time.
    pub parallel: usize,
    /// Real time after which an emulator is terminated.
    pub deadline: Duration,
    /// Smallest slowdown of a phase, in percent, that is a regression.
    pub min_effect_percent: f64,
    /// A regression fails the run; one short run a side is too little to judge.
    pub judge: bool,
}

/// Kernels under test.
#[derive(Debug, Clone)]
pub struct Kernels {
    /// Linux version of the base: `5.10`.
    pub base: String,
    /// Tree, tarball or Debian package that replaces Debian's own source package.
    pub source: Option<PathBuf>,
    /// Debian suite of the source package; by version if absent.
    pub suite: Option<String>,
    /// Series to apply, in order.
    pub series: Vec<String>,
    /// Number of patches of the last series; all if absent.
    pub patches: Option<usize>,
    /// Build a kernel for every patch.
    pub each_patch: bool,
    /// Kernel images to run instead, the base first.
    pub images: Vec<PathBuf>,
    /// Additional configuration fragments.
    pub fragments: Vec<PathBuf>,
    /// Build with all debug checkers; any splat is a failure.
    pub debug: bool,
    /// Names of the kernels to run; all if empty.
    pub only: Vec<String>,
}

impl Kernels {
    /// Returns the base alone, from Debian's source.
    pub fn of_base(base: &str) -> Self {
        Self {
            base: base.to_owned(),
            source: None,
            suite: None,
            series: Vec::new(),
            patches: None,
            each_patch: false,
            images: Vec::new(),
            fragments: Vec::new(),
            debug: false,
            only: Vec::new(),
        }
    }
}

/// Program under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Test {
    /// `granule bench`.
    Bench,
    /// The kernel's `kvm_page_table_test`.
    KernelPageTableTest,
    /// The kernel's KVM selftests, for their result only.
    Selftests,
    /// `granule run` with a Linux guest.
    Guest,
}

/// Jobs on each kernel.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// Program under test.
    pub test: Test,
    /// Backings of the region under test.
    pub backings: Vec<Backing>,
    /// Numbers of vCPUs.
    pub vcpus: Vec<u32>,
    /// Size of the region; by backing if absent.
    pub memory: Option<Bytes>,
    /// Guest mode.
    pub mode: String,
    /// Offset of the region in guest memory.
    pub offset: Option<Bytes>,
    /// Iterations in one boot.
    pub iterations: u32,
    /// Number of boots, each with another schedule.
    pub seeds: u64,
    /// Selftests to run, with their arguments; the whole list if empty.
    pub selftests: Vec<String>,
    /// Additional arguments of `granule bench` or `granule run`.
    pub extra: Vec<String>,
    /// Directory with the `vmlinuz`, `initrd.img` and `root.img` of a distribution, as
    /// `scripts/guest` writes them.
    pub distribution: Option<PathBuf>,
    /// CPU model, as QEMU names it.
    pub cpu: String,
    /// Number of emulated CPUs; one for each vCPU if absent.
    pub cpus: Option<u32>,
    /// Memory of the emulated host; by job if absent.
    pub host_memory: Option<Bytes>,
}

/// Paths of a run.
#[derive(Debug, Clone)]
pub struct Paths {
    /// The repository, which contains `stage2/linux`.
    pub root: PathBuf,
    /// The static arm64 `granule`.
    pub init: PathBuf,
    /// The counting plugin.
    pub plugin: PathBuf,
    /// Sources, objects and kernels that outlast a run.
    pub cache: PathBuf,
    /// The run directory.
    pub out: PathBuf,
}
