// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Files and devices that a VM needs, opened once before anything else.
//!
//! A VM that is rebooted is built from the same open files. So nothing is opened by name after the
//! process has dropped its [privileges](super::privileges) and is [confined](super::sandbox), and a
//! disk stays locked across reboots. A kernel file that is replaced meanwhile is not seen.

use std::{
    fs::File,
    io::{self, Seek as _},
    path::{Path, PathBuf},
};

use kvm_ioctls::Kvm;
use thiserror::Error;

use super::config::VmConfig;
use crate::{
    arch::host,
    devices::virtio::{
        block::{Disk, DiskError},
        net::{Tap, TapError},
        vsock::{VsockBackend, VsockError},
    },
    kvm::{self, KvmError},
};

/// Error returned when a file or device cannot be opened or read.
#[derive(Debug, Error)]
pub enum OpenError {
    /// A file cannot be opened or read.
    #[error("{option} {path}", path = path.display())]
    File {
        /// The option that names the file.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// `/dev/kvm` cannot be used.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// A disk cannot be opened.
    #[error("--disk")]
    Disk(#[from] DiskError),
    /// A tap interface cannot be opened.
    #[error("--net")]
    Tap(#[from] TapError),
    /// The vsock backend cannot be opened.
    #[error("--vsock")]
    Vsock(#[from] VsockError),
}

impl OpenError {
    /// Returns a conversion of the error of a file that `option` names.
    pub(super) fn file(option: &'static str, path: &Path) -> impl Fn(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { option, path: path.clone(), source }
    }
}

/// A kernel or initramfs file.
#[derive(Debug)]
pub struct BootFile {
    option: &'static str,
    path: PathBuf,
    file: File,
}

impl BootFile {
    fn open(option: &'static str, path: &Path) -> Result<Self, OpenError> {
        let open = || {
            let file = File::open(path)?;
            if !file.metadata()?.is_file() {
                // The file is read again at each reboot, and its size must be known.
                return Err(io::Error::other("not a regular file"));
            }
            Ok(file)
        };
        Ok(Self {
            option,
            path: path.to_owned(),
            file: open().map_err(OpenError::file(option, path))?,
        })
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Calls `read` with the file, positioned at its start.
    ///
    /// # Errors
    /// The error of `read`, with the option that names the file.
    pub fn read<T>(&self, read: impl FnOnce(&File) -> io::Result<T>) -> Result<T, OpenError> {
        let mut file = &self.file;
        file.rewind().and_then(|()| read(file)).map_err(OpenError::file(self.option, &self.path))
    }
}

/// The open files and devices of a VM.
#[derive(Debug)]
pub struct OpenFiles {
    /// `/dev/kvm`.
    pub kvm: Kvm,
    /// Kernel file.
    pub kernel: BootFile,
    /// Initramfs file.
    pub initrd: Option<BootFile>,
    /// Disks, in the order of the configuration.
    pub disks: Vec<Disk>,
    /// Tap interfaces of the network cards, in the order of the configuration.
    pub taps: Vec<Tap>,
    /// Vsock backend of the host kernel.
    pub vsock: Option<VsockBackend>,
}

impl OpenFiles {
    /// Opens everything that `config` names.
    ///
    /// # Errors
    /// [`OpenError`], which names the option.
    pub fn new(config: &VmConfig) -> Result<Self, OpenError> {
        let initrd = config.initrd.as_deref();
        let disks = config.devices.disks.iter();
        let nets = config.devices.nets.iter();
        let vsock = config.devices.vsock;
        Ok(Self {
            kvm: kvm::open(host::explain_missing_driver)?,
            kernel: BootFile::open("--kernel", &config.kernel)?,
            initrd: initrd.map(|path| BootFile::open("--initrd", path)).transpose()?,
            disks: disks
                .map(|disk| Disk::open(&disk.path, disk.read_only))
                .collect::<Result<_, _>>()?,
            taps: nets.map(|net| Tap::open(&net.tap)).collect::<Result<_, _>>()?,
            vsock: vsock.map(|vsock| VsockBackend::open(vsock.cid)).transpose()?,
        })
    }
}
