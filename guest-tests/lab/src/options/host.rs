// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of the emulated host.

use std::{path::PathBuf, thread::available_parallelism};

use clap::value_parser;
use granule_types::units::Bytes;
use serde::{Deserialize, Serialize};

use crate::host::{costs::CostTable, hold::Hold};

/// Program of the emulator on the search path.
pub const DEFAULT_QEMU: &str = "qemu-system-aarch64";

/// The emulated host.
#[derive(Debug, Clone, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = "Host")]
pub struct HostOptions {
    /// CPU model of the emulated host
    #[arg(long, value_name = "MODEL", default_value = "neoverse-n1")]
    pub(crate) cpu: String,
    /// CPUs of the emulated host [default: one for each vCPU; at least 2 for tests and guests]
    #[arg(long, value_name = "N", value_parser = super::cpu_count_parser())]
    pub(crate) smp: Option<u32>,
    /// Length of a CPU's turn in nanoseconds of virtual time; it should be shorter than the
    /// critical sections of contended locks
    #[arg(long, value_name = "NANOSECONDS", default_value_t = 100,
          value_parser = value_parser!(u64).range(20..=1_000_000))]
    pub(crate) quantum: u64,
    /// Costs of instructions in elapsed time: neoverse-n1, kunpeng920, altra-vm or a TOML file
    /// [default: one nanosecond each]
    #[arg(long, value_name = "TABLE")]
    pub(crate) costs: Option<CostTable>,
    /// Hold of a CPU, which `granule lab check` selects: elapsed times would be wrong.
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) hold: Option<Hold>,
    /// Memory of the emulated host [default: the requirement of the job]
    #[arg(long, value_name = "SIZE")]
    pub(crate) host_memory: Option<Bytes>,
    /// More of the host kernel's command line; a parameter that it does not know is an error from Linux
    /// 5.14 on
    #[arg(long, value_name = "TEXT")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) append: Option<String>,
    /// Number of parallel emulators [default: one for each CPU of this machine]; with --executor
    /// slurm, of parallel jobs of each size of memory [default: no limit]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    #[serde(skip)]
    pub(crate) jobs: Option<u32>,
    /// Seconds of real time after which an emulator is terminated
    #[arg(long, value_name = "SECONDS", default_value_t = 900,
          value_parser = value_parser!(u64).range(1..))]
    pub(crate) deadline: u64,
    /// QEMU's program for arm64
    #[arg(long, value_name = "PROGRAM", default_value = DEFAULT_QEMU)]
    pub(crate) qemu: PathBuf,
    /// The static arm64 `granule` [default: beside this program]
    #[arg(long, value_name = "FILE")]
    pub(super) init: Option<PathBuf>,
    /// The counting plugin [default: beside this program]
    #[arg(long, value_name = "FILE")]
    pub(super) plugin: Option<PathBuf>,
}

impl HostOptions {
    /// Returns the number of emulators that run in parallel.
    pub(crate) fn emulator_count(&self) -> usize {
        let jobs = self.jobs.and_then(|jobs| usize::try_from(jobs).ok());
        jobs.unwrap_or_else(|| available_parallelism().map_or(1, usize::from))
    }
}
