// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a machine is asked to be.

use std::{path::PathBuf, time::Instant};

use granule_types::{backing::Backing, units::Bytes};
use serde::Serialize;

use super::{attach::Devices, privileges::Identity};
use crate::kvm::dirty::DirtyMode;

/// One piece of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Zone {
    /// Its size; rounded up to the backing's page.
    pub size: Bytes,
    /// What stands behind it.
    pub backing: Backing,
    /// Whether the host populates it before the guest starts.
    pub prefault: bool,
    /// The power of two that guest and host addresses agree in; the backing's page if not given.
    pub align: Option<Bytes>,
    /// The only NUMA node it comes from.
    pub node: Option<u32>,
}

/// The guest's console.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Console {
    /// A 16550, `ttyS0`.
    #[default]
    Ns16550a,
    /// A PL011, `ttyAMA0`.
    Pl011,
}

/// A machine and what it starts.
#[derive(Debug, Clone, Serialize)]
pub struct VmConfig {
    /// The kernel: an `Image`, packed or not.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initrd: Option<PathBuf>,
    /// The kernel's command line.
    pub command_line: String,
    /// The console.
    pub console: Console,
    /// Disks, network cards and the like.
    pub devices: Devices,
    /// How many vCPUs, at least one.
    pub vcpus: u32,
    /// Memory, at least one piece; kernel and initramfs lie in the first.
    pub memory: Vec<Zone>,
    /// Width of guest-physical addresses; the smallest that fits if not given.
    pub ipa_bits: Option<u8>,
    /// In chunks of how much the host splits blocks ahead, where dirty pages are logged.
    pub eager_split: Option<Bytes>,
    /// How dirty pages are logged, where that is switched on.
    #[serde(rename = "dirty_log")]
    pub dirty: DirtyMode,
}

/// How it is run.
#[derive(Debug, Clone)]
pub struct Session {
    /// When this program was started.
    pub started: Instant,
    /// Whether a machine that resets itself is started again.
    pub reboot: bool,
    /// The text on the guest's console that tells that its init runs.
    pub init_text: Option<String>,
    /// Where statistics go.
    pub stats: Option<PathBuf>,
    /// Where the control socket is.
    pub api_socket: Option<PathBuf>,
    /// Whom the process becomes once everything is open.
    pub identity: Option<Identity>,
    /// Whether the process is confined.
    pub sandbox: bool,
}
