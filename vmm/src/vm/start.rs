// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Start of a VM: a kernel boots, or a snapshot continues.
//!
//! [`Start`] is created before there is memory, because a missing kernel is reported first, and
//! [`PlacedStart`] when memory exists but the VM does not.

use std::{fs::File, sync::Arc};

use super::{
    config::{RestoreMode, VmConfig},
    kernel_boot::KernelBoot,
    open_files::{OpenFiles, StartFiles},
    outcome::{VmError, failed},
    snapshot::OpenSnapshot,
};
use crate::{
    arch::guest::{self, BootLayout, GuestVcpus},
    devices::Bus,
    memory::{GuestMemory, image},
};

/// A start, before memory is allocated.
pub enum Start<'a> {
    /// A kernel boots.
    Boot(KernelBoot<'a>),
    /// The VM of a snapshot continues.
    Restore(&'a OpenSnapshot, RestoreMode),
}

/// A start in allocated memory.
pub enum PlacedStart<'a> {
    /// A kernel at these places.
    Boot(KernelBoot<'a>, BootLayout),
    /// A snapshot whose zones are those of the memory.
    Restore(&'a OpenSnapshot, RestoreMode),
}

impl<'a> Start<'a> {
    /// Reads the kernel's image, if one boots.
    pub fn new(config: &VmConfig, files: &'a OpenFiles) -> Result<Self, VmError> {
        Ok(match &files.start {
            StartFiles::Boot(files) => Self::Boot(KernelBoot::new(files, config)?),
            StartFiles::Restore(snapshot, mode) => Self::Restore(snapshot, *mode),
        })
    }

    /// Returns the file that memory is mapped from, if it is.
    pub fn mapped_image(&self) -> Option<Arc<File>> {
        match self {
            Self::Restore(snapshot, RestoreMode::Map) => Some(Arc::clone(&snapshot.memory)),
            _ => None,
        }
    }

    /// Checks that the start fits the memory.
    pub fn with_memory(self, memory: &GuestMemory) -> Result<PlacedStart<'a>, VmError> {
        Ok(match self {
            Self::Boot(kernel) => {
                let layout = kernel.layout(memory)?;
                PlacedStart::Boot(kernel, layout)
            }
            Self::Restore(snapshot, mode) => {
                check_zones(snapshot, memory)?;
                PlacedStart::Restore(snapshot, mode)
            }
        })
    }
}

impl PlacedStart<'_> {
    /// Returns the width of guest-physical addresses that the start demands.
    pub const fn ipa_bits(&self) -> Option<u8> {
        match self {
            Self::Boot(..) => None,
            Self::Restore(snapshot, _) => Some(snapshot.state.ipa_bits),
        }
    }

    /// Sets the first state of memory, devices and vCPUs. The devices of a snapshot are suspended
    /// afterwards.
    pub fn load(self, memory: &GuestMemory, bus: &Bus, vcpus: &GuestVcpus) -> Result<(), VmError> {
        match self {
            Self::Boot(kernel, layout) => kernel.load(&layout, memory, bus, vcpus),
            Self::Restore(snapshot, mode) => {
                if mode == RestoreMode::Copy {
                    load_memory(snapshot, memory)?;
                }
                let name = || snapshot.name.as_str();
                bus.restore(&snapshot.state.devices).map_err(failed(name()))?;
                // KVM reads tables of the interrupt controller from guest memory.
                guest::restore_machine(&vcpus.fds, &vcpus.controller, &snapshot.state.machine)
                    .map_err(failed(name()))
            }
        }
    }
}

fn check_zones(snapshot: &OpenSnapshot, memory: &GuestMemory) -> Result<(), VmError> {
    let state = &snapshot.state;
    let regions = memory.regions();
    let mut pairs = state.zones.iter().zip(regions);
    let same = state.zones.len() == regions.len()
        && pairs.all(|(zone, ram)| zone.start == ram.start().0 && zone.size == ram.size());
    let page = regions.first().map_or(state.page_size, |ram| ram.plan().base_page_size());
    let refused = |text| Err(VmError::Refused(format!("{}: {text}", snapshot.name)));
    if page != state.page_size {
        return refused(format!(
            "the snapshot is of a host with pages of {}, and this host has pages of {page}",
            state.page_size
        ));
    }
    if !same {
        return refused("its memory zones are not those of its configuration".to_owned());
    }
    image::check_size(memory, &snapshot.memory).map_err(failed(snapshot.name.as_str()))
}

fn load_memory(snapshot: &OpenSnapshot, memory: &GuestMemory) -> Result<(), VmError> {
    let state = &snapshot.state;
    let data = image::load(memory, &snapshot.memory).map_err(failed(snapshot.name.as_str()))?;
    if data.crc != state.memory_crc || data.bytes != state.data_bytes {
        return Err(VmError::Refused(format!(
            "{}: {} is damaged: its {} of data have the checksum {:08x}, and the snapshot had {} \
             with {:08x}",
            snapshot.name, state.memory, data.bytes, data.crc, state.data_bytes, state.memory_crc
        )));
    }
    Ok(())
}
