// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Boot of a kernel: its files, and what the guest finds in memory.

use std::ops::Range;

use granule_types::units::{Bytes, GuestAddress};
use linux_loader::cmdline::Cmdline;
use vm_memory::Bytes as _;

use super::{
    config::VmConfig,
    open_files::{BootFile, BootFiles},
    outcome::{VmError, failed},
};
use crate::{
    arch::{
        VmDescription,
        guest::{self, BootLayout, GuestVcpus, Image},
    },
    devices::Bus,
    memory::{GuestMemory, MappedReader},
};

/// A kernel image and its command line, before there is memory for them.
pub struct KernelBoot<'a> {
    files: &'a BootFiles,
    image: Image,
    command_line: Cmdline,
    initrd_size: Option<Bytes>,
}

impl<'a> KernelBoot<'a> {
    /// Reads the image and checks the command line.
    pub fn new(files: &'a BootFiles, config: &VmConfig) -> Result<Self, VmError> {
        let name = files.kernel.name.as_str();
        let image = files.kernel.read(|file| Ok(Image::from_file(file)))?.map_err(failed(name))?;
        let command_line = guest::parse_command_line(&config.command_line)?;
        let initrd_size = files.initrd.as_ref().map(initrd_size).transpose()?;
        Ok(Self { files, image, command_line, initrd_size })
    }

    /// Returns the places of kernel, initramfs and device tree in the first zone.
    pub fn layout(&self, memory: &GuestMemory) -> Result<BootLayout, VmError> {
        let first = memory.regions().first().map_or(Bytes(0), |ram| ram.size());
        Ok(BootLayout::new(&self.image, self.initrd_size, first)?)
    }

    /// Loads kernel, initramfs and device tree, and sets the registers of the boot vCPU.
    pub fn load(
        self,
        layout: &BootLayout,
        memory: &GuestMemory,
        bus: &Bus,
        vcpus: &GuestVcpus,
    ) -> Result<(), VmError> {
        if let (Some(initrd), Some(range)) = (&self.files.initrd, layout.initrd.clone()) {
            load_initrd(initrd, memory, range)?;
        }
        let ranges = memory.regions().iter().map(|ram| (ram.start(), ram.size()));
        let description = VmDescription {
            memory: ranges.collect(),
            devices: bus.device_infos().cloned().collect(),
            command_line: self.command_line,
        };
        let image = &self.image;
        self.files
            .kernel
            .read(|file| {
                Ok(guest::write_boot_data(memory.map(), (image, file), &description, vcpus, layout))
            })?
            .map_err(failed(self.files.kernel.name.as_str()))
    }
}

fn load_initrd(
    initrd: &BootFile,
    memory: &GuestMemory,
    range: Range<GuestAddress>,
) -> Result<(), VmError> {
    let length = usize::try_from(range.end.0 - range.start.0).unwrap_or(usize::MAX);
    let map = memory.map();
    initrd
        .read(|file| {
            Ok(map.read_exact_volatile_from(range.start, &mut MappedReader::new(file), length))
        })?
        .map_err(failed("the initramfs cannot be copied into guest memory"))
}

fn initrd_size(initrd: &BootFile) -> Result<Bytes, VmError> {
    initrd.read(|file| Ok(Bytes(file.metadata()?.len())))
}
