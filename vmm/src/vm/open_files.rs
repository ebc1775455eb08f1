// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Files and devices of a VM, opened once before the VM is built.
//!
//! A reboot builds the VM from the same open files, because the process has dropped its
//! [privileges](super::privileges) and is [confined](super::sandbox). A disk stays locked across
//! reboots, and replacing a kernel file meanwhile has no effect.

use std::{
    fs::File,
    io::{self, Seek as _},
    path::Path,
};

use kvm_ioctls::Kvm;

use super::{
    config::{RestoreMode, VmConfig},
    outcome::{VmError, failed},
    privileges::Identity,
    snapshot::{OpenSnapshot, OrderFile},
};
use crate::{
    arch::host,
    devices::virtio::{BackendError, block::Disk, net::Tap, vsock::VsockBackend},
    kvm,
    memory::user_faults::UserFaults,
};

/// A kernel or initramfs file.
#[derive(Debug)]
pub struct BootFile {
    /// Option and path, for error messages.
    pub(super) name: String,
    file: File,
}

impl BootFile {
    fn open(option: &'static str, path: &Path) -> Result<Self, VmError> {
        let open = || {
            let file = File::open(path)?;
            if !file.metadata()?.is_file() {
                // The file is read again at each reboot, and its size must be known.
                return Err(io::Error::other("not a regular file"));
            }
            Ok(file)
        };
        let name = format!("{option} {}", path.display());
        let file = open().map_err(failed(name.as_str()))?;
        Ok(Self { name, file })
    }

    /// Calls `read` with the file, positioned at its start.
    pub fn read<T>(&self, read: impl FnOnce(&File) -> io::Result<T>) -> Result<T, VmError> {
        let mut file = &self.file;
        file.rewind().and_then(|()| read(file)).map_err(failed(self.name.as_str()))
    }
}

/// Files of a kernel that boots.
#[derive(Debug)]
pub struct BootFiles {
    pub kernel: BootFile,
    pub initrd: Option<BootFile>,
}

/// Files that the VM starts with.
#[derive(Debug)]
pub enum StartFiles {
    /// Kernel and initramfs.
    Boot(BootFiles),
    /// A snapshot.
    Restore(Box<OpenSnapshot>, MemorySource),
}

/// Source of the memory of a restored VM.
#[derive(Debug)]
pub enum MemorySource {
    /// The file is copied.
    Copy,
    /// The file is mapped.
    Map,
    /// The file is copied on demand, perhaps in a known order.
    OnDemand(UserFaults, Option<OrderFile>),
}

impl StartFiles {
    /// Opens the files of a kernel.
    pub fn boot(config: &VmConfig) -> Result<Self, VmError> {
        let initrd = config.initrd.as_deref();
        Ok(Self::Boot(BootFiles {
            kernel: BootFile::open("--kernel", &config.kernel)?,
            initrd: initrd.map(|path| BootFile::open("--initrd", path)).transpose()?,
        }))
    }

    /// Opens what the memory of a snapshot is restored with.
    pub fn restore(snapshot: OpenSnapshot, mode: &RestoreMode) -> Result<Self, VmError> {
        let memory = match mode {
            RestoreMode::Copy => MemorySource::Copy,
            RestoreMode::Map => MemorySource::Map,
            RestoreMode::OnDemand { order } => {
                let faults = UserFaults::open().map_err(failed(
                    "memory=userfaultfd needs root, or vm.unprivileged_userfaultfd=1, and a host \
                     kernel with CONFIG_USERFAULTFD",
                ))?;
                let crc = snapshot.state.contents_crc();
                let order = order.as_deref().map(|path| OrderFile::open(path, crc));
                MemorySource::OnDemand(faults, order.transpose()?)
            }
        };
        Ok(Self::Restore(Box::new(snapshot), memory))
    }
}

/// Open files and devices of a VM, in the order of the configuration.
#[derive(Debug)]
pub struct OpenFiles {
    pub kvm: Kvm,
    pub start: StartFiles,
    pub disks: Vec<Disk>,
    pub taps: Vec<Tap>,
    pub vsock: Option<VsockBackend>,
}

/// Users who open devices, instead of that of this process.
#[derive(Debug, Clone, Copy, Default)]
pub struct Openers {
    pub disks: Option<Identity>,
    pub taps: Option<Identity>,
}

impl OpenFiles {
    /// Opens all files and devices that `config` names, except those of the start.
    pub fn new(config: &VmConfig, start: StartFiles, openers: Openers) -> Result<Self, VmError> {
        let disks = config.devices.disks.iter();
        let nets = config.devices.nets.iter();
        let vsock = config.devices.vsock;
        Ok(Self {
            kvm: kvm::open(host::explain_missing_driver)?,
            start,
            disks: open_devices("--disk", openers.disks, || {
                disks.map(|disk| Disk::open(&disk.path, disk.is_read_only)).collect()
            })?,
            taps: open_devices("--net", openers.taps, || {
                nets.map(|net| Tap::open(&net.tap)).collect()
            })?,
            vsock: vsock
                .map(|vsock| VsockBackend::open(vsock.cid))
                .transpose()
                .map_err(failed("--vsock"))?,
        })
    }
}

/// Opens the devices of an option as `opener`, or as this process.
fn open_devices<T>(
    option: &str,
    opener: Option<Identity>,
    open: impl FnOnce() -> Result<Vec<T>, BackendError>,
) -> Result<Vec<T>, VmError> {
    match opener {
        None => open().map_err(failed(option)),
        Some(identity) => identity.act(open)?.map_err(failed(format!(
            "{option} of the snapshot, which --user opens, unlike {option} of the command line"
        ))),
    }
}
