// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a machine is made from, opened once and before anything else.
//!
//! A machine that resets itself is built again from the same open files. So nothing has to be opened
//! by name any more once the process has given up its rights ([`super::privileges`]) and is kept from
//! the file system ([`super::sandbox`]), and a disk stays locked from the first life to the last. A
//! kernel that is replaced under its name meanwhile is not seen.

use std::{
    fs::File,
    io::{self, Seek as _},
    path::{Path, PathBuf},
};

use kvm_ioctls::Kvm;

use super::{attach::AttachError, build::BuildError, config::VmConfig};
use crate::{
    devices::virtio::{block::Disk, net::Tap, vsock::VsockBackend},
    kvm,
};

/// A file to boot from.
#[derive(Debug)]
pub struct Bootable {
    option: &'static str,
    path: PathBuf,
    file: File,
}

impl Bootable {
    fn open(option: &'static str, path: &Path) -> Result<Self, BuildError> {
        let path = path.to_owned();
        let opened = File::open(&path).and_then(|file| match file.metadata()?.is_file() {
            true => Ok(file),
            // It is read once for each life of the guest, and its size is needed first.
            false => Err(io::Error::other("it is no regular file")),
        });
        match opened {
            Ok(file) => Ok(Self { option, path, file }),
            Err(source) => Err(BuildError::File {
                option,
                path,
                source,
            }),
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Does something with the file, from its beginning.
    ///
    /// # Errors
    /// What went wrong, with the option that names the file.
    pub fn read<T>(&self, read: impl FnOnce(&File) -> io::Result<T>) -> Result<T, BuildError> {
        let mut file = &self.file;
        let done = file.rewind().and_then(|()| read(file));
        done.map_err(|source| BuildError::File {
            option: self.option,
            path: self.path.clone(),
            source,
        })
    }
}

/// Everything that is opened.
#[derive(Debug)]
pub struct Opened {
    /// KVM.
    pub kvm: Kvm,
    /// The kernel.
    pub kernel: Bootable,
    /// The initramfs.
    pub initrd: Option<Bootable>,
    /// Disks, in the order asked for.
    pub disks: Vec<Disk>,
    /// The taps of the network cards, in their order.
    pub taps: Vec<Tap>,
    /// The host's half of the guest's sockets.
    pub vsock: Option<VsockBackend>,
}

impl Opened {
    /// Opens what `config` names.
    ///
    /// # Errors
    /// One of them cannot be had; the error says which and why.
    pub fn new(config: &VmConfig) -> Result<Self, BuildError> {
        let initrd = config.initrd.as_deref();
        let disks = config.devices.disks.iter();
        let nets = config.devices.nets.iter();
        let vsock = config.devices.vsock;
        Ok(Self {
            kvm: kvm::open()?,
            kernel: Bootable::open("--kernel", &config.kernel)?,
            initrd: initrd
                .map(|path| Bootable::open("--initrd", path))
                .transpose()?,
            disks: disks
                .map(|disk| Disk::open(&disk.path, disk.read_only))
                .collect::<Result<_, _>>()
                .map_err(AttachError::from)?,
            taps: nets
                .map(|net| Tap::open(&net.tap))
                .collect::<Result<_, _>>()
                .map_err(AttachError::from)?,
            vsock: vsock
                .map(|vsock| VsockBackend::open(vsock.cid))
                .transpose()
                .map_err(AttachError::from)?,
        })
    }
}
