// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The result format `granule.result/1`: JSON Lines, one object for each phase of each iteration.
//!
//! The format is stable: a new field is optional, and no field changes its meaning. A value that
//! was not measured is absent, never zero.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    backing::Backing,
    phase::Phase,
    units::{Bytes, Nanoseconds},
};

/// Counts by name; a count that the host does not provide is absent, never zero.
pub type EventCounts = BTreeMap<String, u64>;

/// Identifier of the format, in every record.
pub const SCHEMA: &str = "granule.result/1";

/// Engine of a user's program in the emulated host. Its `vcpus` are the host's CPUs; `backing` and
/// `memory` have no meaning.
pub const HOST_PROGRAM: &str = "program in the host";
/// Engine of a user's program in a guest.
pub const GUEST_PROGRAM: &str = "program in a guest";
/// Option that names the program of [`HOST_PROGRAM`] and [`GUEST_PROGRAM`].
pub const PROGRAM_OPTION: &str = "program";

/// Program with the page-table test and the VMM, in [`Record::programs`]. In the lab it is also PID 1
/// of the emulated host.
pub const GRANULE: &str = "granule";
/// The emulator's plugin, in [`Record::programs`].
pub const PLUGIN: &str = "plugin";
/// Test of the kernel's tree, in [`Record::programs`].
pub const KERNEL_TEST: &str = "test";
/// Program of [`HOST_PROGRAM`] and [`GUEST_PROGRAM`], in [`Record::programs`].
pub const USER_PROGRAM: &str = "program";

/// The result of one phase of one iteration.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Record {
    /// [`SCHEMA`].
    pub schema: String,
    /// Provenance of the result.
    #[serde(default)]
    pub host: HostInfo,
    /// `kvm`, `model` (the software machine), `kvm_page_table_test`, [`HOST_PROGRAM`] or
    /// [`GUEST_PROGRAM`].
    #[serde(default)]
    pub engine: String,
    /// SHA-256 of the programs that made the result, in hexadecimal, by name: [`GRANULE`],
    /// [`PLUGIN`], [`KERNEL_TEST`], [`USER_PROGRAM`]. An unknown program is absent. Results of
    /// different programs are comparable, with a note.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub programs: BTreeMap<String, String>,
    /// The requested configuration.
    pub config: RunConfig,
    /// Resident bytes of the region by page size, read from the host.
    #[serde(rename = "obtained", default, skip_serializing_if = "Option::is_none")]
    pub resident_pages: Option<ResidentPages>,
    /// The phase.
    pub phase: Phase,
    /// Number of the migration round or of the program's step, from 1; `None` in other phases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round: Option<u32>,
    /// Time from the common start of the vCPUs until the last one finishes. A host phase
    /// has the duration of the host's call, a migration round that of the bitmap's collection.
    pub ns: Nanoseconds,
    /// Elapsed time as if the emulated CPUs ran in parallel; `ns` is the sum of their work.
    /// Absent on hardware and if the emulator did not measure it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elapsed_ns: Option<Nanoseconds>,
    /// Time of each vCPU; empty in host phases and migration rounds.
    #[serde(default)]
    pub vcpu_ns: Vec<Nanoseconds>,
    /// Counts of the emulator's plugin (instructions, kernel functions), by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub counters: BTreeMap<String, u64>,
    /// Event counts of the host kernel, by name. Migration rounds add the number of guest writes
    /// (`guest_writes`) and of pages in the dirty bitmap (`pages_logged`). The migration's stop
    /// adds the number of clean pages that the dirty bitmaps reported (`clean_pages_logged`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub events: EventCounts,
    /// Gauges at the end of the phase (such as pages mapped by size), by name. Migration rounds add
    /// their duration (`round_ns`) and the duration per thousand guest writes
    /// (`ns_per_1000_writes`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gauges: BTreeMap<String, u64>,
}

/// Provenance of a result. Two results are comparable only if these fields are known in both; an
/// empty string means unknown.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct HostInfo {
    /// Architecture as the kernel names it (`uname -m`).
    pub arch: String,
    /// Kernel release (`uname -r`).
    pub kernel: String,
    /// The applied Linux series, in order; empty for the plain kernel, `None` if unknown.
    pub series: Option<Vec<Series>>,
    /// Hash of the commit from which the kernel was built.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// Compiler and linker of the kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compiler: Option<String>,
    /// SHA-256 of the kernel image, in hexadecimal.
    pub image_sha256: Option<String>,
    /// Name of the CPU.
    pub cpu: Option<String>,
    /// CPU features that change the fault path, by name (`fwb`, `dic`, `idc`, `bbm`, `tlbirange`).
    #[serde(default)]
    pub features: BTreeMap<String, u64>,
    /// Base page size of the host.
    pub page_size: Option<Bytes>,
    /// Emulator with its version and the options that affect results; `None` on hardware.
    pub emulator: Option<String>,
}

/// A Linux series applied to a host kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Series {
    /// Name of its folder under `stage2/linux/BASE/`.
    pub name: String,
    /// Number of applied patches.
    pub patches: u32,
}

/// The requested configuration of a run.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RunConfig {
    /// The guest mode, as the kernel's test prints it.
    pub mode: String,
    /// Backing of the region under test.
    pub backing: Backing,
    /// Size of the region.
    pub memory: Bytes,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Seed of the schedule: determines the delay before each vCPU's start.
    pub seed: u64,
    /// Number of the iteration, from 0.
    pub iteration: u32,
    /// Indicates that the host populated the memory before the test.
    #[serde(default)]
    pub prefault: bool,
    /// Other options that affect results and differ from their defaults, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
}

/// The pages that back a region, by size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidentPages {
    /// Bytes mapped in the host, by page size in bytes.
    #[serde(rename = "resident")]
    pub resident_bytes: BTreeMap<u64, u64>,
}
