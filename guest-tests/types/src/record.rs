// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results: JSON Lines, one object for each phase of each iteration (`granule.result/1`).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::backing::Backing;
use crate::{
    phase::Phase,
    units::{Bytes, Nanoseconds},
};

/// Counts by name. What the host does not count is absent, never zero.
pub type EventCounts = BTreeMap<String, u64>;

/// The schema these types write.
pub const SCHEMA: &str = "granule.result/1";

/// The emulator that results of the simulated machine name in [`Host::emulator`].
pub const SIMULATOR: &str = "granule simulation in virtual time";

/// One phase of one iteration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// [`SCHEMA`].
    pub schema: String,
    /// Where it ran.
    #[serde(default)]
    pub host: Host,
    /// `kvm`, `model` or `simulation`; `kvm_page_table_test` where the kernel's own test ran.
    #[serde(default)]
    pub engine: String,
    /// What was asked for.
    pub config: RunConfig,
    /// What really backed the region, read back from the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub obtained: Option<Obtained>,
    /// Which phase.
    pub phase: Phase,
    /// Which round of it, from 1, where there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round: Option<u32>,
    /// From the release of the first vCPU to the end of the last, or the host's own call; in a
    /// round the collection of the dirty log, which holds the guest up.
    pub ns: Nanoseconds,
    /// Each vCPU's own time; empty where only the host worked.
    #[serde(default)]
    pub vcpu_ns: Vec<Nanoseconds>,
    /// Instructions counted by the emulator's plugin, by name; emulation only.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub counters: BTreeMap<String, u64>,
    /// The host kernel's events, by name, absent where it offers none; in rounds also what the
    /// vCPUs wrote (`guest_writes`) and how many pages the log named (`pages_logged`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub events: BTreeMap<String, u64>,
    /// What rises and falls (pages mapped by size), as it stood when the phase was over, absent
    /// where the host does not tell; of a round also how long it was (`round_ns`) and the time that
    /// a thousand writes of all vCPUs together took (`ns_per_1000_writes`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gauges: BTreeMap<String, u64>,
}

/// Where a result comes from. Two results compare only where these are known on both sides; an
/// empty text is unknown.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    /// The machine's architecture as the kernel names it (`uname -m`).
    pub arch: String,
    /// `uname -r`.
    pub kernel: String,
    /// The series applied to it, in order; empty for the plain kernel, `None` where not known.
    pub series: Option<Vec<Series>>,
    /// SHA-256 of the kernel image, in hexadecimal.
    pub image_sha256: Option<String>,
    /// The CPU's name.
    pub cpu: Option<String>,
    /// CPU features that change the fault path, by name (`fwb`, `dic`, `idc`, `bbm`, `tlbirange`).
    #[serde(default)]
    pub features: BTreeMap<String, u64>,
    /// The host's base page.
    pub page_size: Option<Bytes>,
    /// The emulator with its version and the options that change results; `None` on hardware.
    pub emulator: Option<String>,
}

/// A Linux series applied to a host kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Series {
    /// Its folder's name under `stage2/linux/BASE/`.
    pub name: String,
    /// How many of its patches are applied.
    pub patches: u32,
}

/// What a run was asked to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunConfig {
    /// The guest mode, as the kernel's test prints it.
    pub mode: String,
    /// What was asked for behind the region.
    pub backing: Backing,
    /// The region's size.
    pub memory: Bytes,
    /// How many vCPUs.
    pub vcpus: u32,
    /// What staggers the vCPUs' starts.
    pub seed: u64,
    /// Which repeat, from 0.
    pub iteration: u32,
    /// Whether the host's memory was populated beforehand.
    #[serde(default)]
    pub prefault: bool,
    /// Further options that change figures, by name, where they were not left at their defaults.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
}

/// What really backs a region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Obtained {
    /// Bytes mapped in the host by page size, in bytes.
    pub resident: BTreeMap<u64, u64>,
}
