// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a run of the lab is asked to do, as the command line gives it.

use std::{path::PathBuf, time::Duration};

use granule_types::{backing::Backing, units::Bytes};

/// Where the tree under test comes from, what is run on it, and where results go.
#[derive(Debug, Clone)]
pub struct Options {
    /// Which kernels.
    pub kernels: Kernels,
    /// Which jobs on each.
    pub matrix: Matrix,
    /// Where things are.
    pub places: Places,
    /// Print what would be done as shell and do nothing.
    pub dry_run: bool,
    /// How many emulators at a time.
    pub parallel: usize,
    /// The real time after which an emulator is ended.
    pub deadline: Duration,
    /// From how many percent on a slower phase is a regression.
    pub min_effect_percent: f64,
    /// Whether a regression is a failure; a single short run a side is no ground to judge on.
    pub judge: bool,
}

/// Which kernels are built or taken.
#[derive(Debug, Clone)]
pub struct Kernels {
    /// The Linux version to start from: `5.10`.
    pub base: String,
    /// A tree, a tarball or a Debian package to take instead of Debian's own package.
    pub source: Option<PathBuf>,
    /// The Debian suite that has the package; found by version where not given.
    pub suite: Option<String>,
    /// The series to apply, in order.
    pub series: Vec<String>,
    /// Only the first so many patches of the last series.
    pub patches: Option<usize>,
    /// A kernel for every patch.
    pub each_patch: bool,
    /// Kernel images to run as they are, the first one being the base.
    pub images: Vec<PathBuf>,
    /// More configuration fragments.
    pub fragments: Vec<PathBuf>,
    /// Build with every checker on and take any complaint for a failure.
    pub debug: bool,
    /// Only kernels of these names.
    pub only: Vec<String>,
}

/// What runs in the emulated host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Test {
    /// `granule bench`.
    Ours,
    /// The kernel tree's `kvm_page_table_test`.
    Upstream,
    /// The kernel tree's KVM selftests, for their verdict.
    Selftests,
    /// `granule run` with a Linux guest: the same kernel, and this program as its init.
    Guest,
}

/// The jobs that each kernel runs.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// What runs.
    pub test: Test,
    /// Backings of the region under test.
    pub backings: Vec<Backing>,
    /// Numbers of vCPUs.
    pub vcpus: Vec<u32>,
    /// The region's size; by backing where not given.
    pub memory: Option<Bytes>,
    /// The guest mode.
    pub mode: String,
    /// Offset of the region in guest memory.
    pub offset: Option<Bytes>,
    /// How many repeats within one boot.
    pub iterations: u32,
    /// How many boots with another interleaving each.
    pub seeds: u64,
    /// Selftests to run, with their arguments; all of the lab's list where there are none.
    pub selftests: Vec<String>,
    /// More arguments for `granule bench`.
    pub extra: Vec<String>,
    /// A folder with a distribution's `vmlinuz`, `initrd.img` and `root.img`, as `scripts/guest`
    /// makes them, for guests to boot from.
    pub distribution: Option<PathBuf>,
    /// QEMU's name of the CPU model.
    pub cpu: String,
    /// How many emulated CPUs; as many as vCPUs where not given.
    pub cpus: Option<u32>,
    /// The emulated host's memory; what the job needs where not given.
    pub host_memory: Option<Bytes>,
}

/// Where things are.
#[derive(Debug, Clone)]
pub struct Places {
    /// The repository: `stage2/linux` lies in it.
    pub root: PathBuf,
    /// The static arm64 `granule`.
    pub init: PathBuf,
    /// The counting plugin.
    pub plugin: PathBuf,
    /// Sources, objects and kernels between runs.
    pub cache: PathBuf,
    /// The run directory.
    pub out: PathBuf,
}
