// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Configuration of a VM and options of a run.

use std::{path::PathBuf, time::Instant};

use granule_types::{backing::Backing, cpu_list::CpuList, units::Bytes};
use serde::{Deserialize, Serialize};

use super::privileges::Identity;
use crate::{devices::virtio::net::MacAddress, kvm::memslot::DirtyMode};

/// A zone of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryZone {
    /// Size, rounded up to the backing's page size.
    pub size: Bytes,
    /// Host memory that backs the zone.
    pub backing: Backing,
    /// Populates the zone before the guest starts.
    pub prefault: bool,
    /// Alignment of guest and host addresses; the backing's page size by default.
    pub alignment: Option<Bytes>,
    /// NUMA node that provides all pages.
    pub node: Option<u32>,
}

/// Model of the guest's serial port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SerialModel {
    /// A 16550, `ttyS0`.
    #[default]
    Ns16550a,
    /// A PL011, `ttyAMA0`.
    Pl011,
}

/// Configuration of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// Path of a raw image or a block device.
    pub path: PathBuf,
    /// Refuses writes of the guest.
    pub is_read_only: bool,
}

/// Configuration of a network device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetConfig {
    /// Name of the host's tap interface.
    pub tap: String,
    /// MAC address; derived from the tap's name by default.
    pub mac: Option<MacAddress>,
}

/// Configuration of a vsock device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VsockConfig {
    /// The guest's context ID.
    pub cid: u32,
}

/// Virtio devices of a VM. An entropy device is always present.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VirtioConfig {
    /// Disks, in the order of the guest's `/dev/vda`, `/dev/vdb`, ….
    pub disks: Vec<DiskConfig>,
    /// Network devices.
    pub nets: Vec<NetConfig>,
    /// Vsock device.
    pub vsock: Option<VsockConfig>,
    /// Adds a balloon.
    pub has_balloon: bool,
    /// Adds a console, `hvc0`, to which the terminal is connected instead of the serial port.
    pub has_console: bool,
}

impl VirtioConfig {
    /// Returns the number of virtio devices.
    #[must_use]
    pub fn device_count(&self) -> usize {
        let optional = [self.vsock.is_some(), self.has_balloon, self.has_console];
        let optional = optional.into_iter().filter(|is_present| *is_present).count();
        let entropy = 1;
        self.disks.len() + self.nets.len() + optional + entropy
    }
}

/// Population of stage 2 before the guest accesses its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage2Prefault {
    /// Before the guest starts. The host memory of all zones must be populated.
    BeforeStart,
    /// Beside the running guest, together with the host memory.
    Background,
}

/// Configuration of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmConfig {
    /// Kernel file: an `Image`, optionally compressed.
    pub kernel: PathBuf,
    /// Initramfs file.
    pub initrd: Option<PathBuf>,
    /// Kernel command line.
    pub command_line: String,
    /// Model of the serial port.
    #[serde(rename = "console")]
    pub serial: SerialModel,
    /// Virtio devices.
    pub devices: VirtioConfig,
    /// Number of vCPUs, at least one.
    pub vcpus: u32,
    /// Memory zones, at least one; kernel and initramfs are loaded into the first.
    pub memory: Vec<MemoryZone>,
    /// Population of stage 2; on faults by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage2_prefault: Option<Stage2Prefault>,
    /// Width of guest-physical addresses; the smallest that fits by default.
    pub ipa_bits: Option<u8>,
    /// Chunk size of eager page splitting.
    pub eager_split: Option<Bytes>,
    /// Numbers of other capabilities of the VM.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vm_capabilities: Vec<u32>,
    /// Dirty logging mode.
    pub dirty_log: DirtyMode,
}

/// The VM of a run.
#[derive(Debug, Clone)]
pub enum VmSource {
    /// A new VM, whose kernel boots.
    Boot(Box<VmConfig>),
    /// The VM of a snapshot.
    Restore(RestoreConfig),
}

/// Way in which the memory of a restored VM takes its contents from the file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum RestoreMode {
    /// The file is copied before the guest runs.
    #[default]
    Copy,
    /// The file is mapped: a page is read at its first access, and copied at its first write.
    Map,
    /// A page is copied at its first access, and the others beside the guest (userfaultfd).
    OnDemand {
        /// File with the parts of memory that are copied first. If it is missing or empty, the parts
        /// that this run accesses are written to it at its end.
        order: Option<PathBuf>,
    },
}

/// Devices of a restored VM that its snapshot does not decide.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReplacedDevices {
    /// Disks, one for each of the snapshot; without any, those of the snapshot stay.
    pub disks: Vec<DiskConfig>,
    /// Network cards, likewise.
    pub nets: Vec<NetConfig>,
    /// Vsock device, as another guest may have the CID of the snapshot.
    pub vsock: Option<VsockConfig>,
}

/// A snapshot to restore.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestoreConfig {
    /// Directory of the snapshot.
    pub directory: PathBuf,
    /// Way in which memory takes its contents from the file.
    pub mode: RestoreMode,
    /// Leaves vCPUs and devices suspended until a request resumes the VM.
    pub is_paused: bool,
    /// Devices in place of those of the snapshot.
    pub devices: ReplacedDevices,
}

/// Snapshots of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotConfig {
    /// Directory.
    pub directory: PathBuf,
    /// Saves only what changed since the last snapshot, after the first one.
    pub is_incremental: bool,
}

/// Detail in which stalls by stage-2 faults are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StallDetail {
    /// By type and level.
    Levels,
    /// Also by the size that the kernel maps, by a probe that is added to it.
    Sizes,
}

/// Options of a run that are not part of the VM.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// Start time of the program.
    pub start_time: Instant,
    /// Reboots a guest that resets itself.
    pub reboots_on_reset: bool,
    /// Text in the console output that marks the start of the guest's init.
    pub init_text: Option<String>,
    /// Measures the stalls of vCPUs by stage-2 faults, for the statistics.
    pub fault_stalls: Option<StallDetail>,
    /// File for statistics.
    pub stats: Option<PathBuf>,
    /// Path of the control socket.
    pub api_socket: Option<PathBuf>,
    /// Snapshots, which the control socket takes.
    pub snapshots: Option<SnapshotConfig>,
    /// User and group that the process changes to after it has opened all files.
    pub identity: Option<Identity>,
    /// CPUs of the host for vCPUs, which share them round-robin; all CPUs by default.
    pub vcpu_cpus: Option<CpuList>,
    /// Confines the process by Landlock and seccomp.
    pub is_sandboxed: bool,
}
