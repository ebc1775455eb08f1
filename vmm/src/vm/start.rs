// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Start of a VM: a kernel boots, or a snapshot continues.
//!
//! [`Start`] is created before there is memory, because a missing kernel is reported first, and
//! [`PlacedStart`] when memory exists but the VM does not.

use std::{fs::File, io, ops::Range, process, sync::Arc, thread};

use granule_types::{
    error_text,
    units::{Bytes, GuestAddress},
};
use kvm_ioctls::VmFd;

use super::{
    config::VmConfig,
    kernel_boot::KernelBoot,
    open_files::{MemorySource, OpenFiles, StartFiles},
    outcome::{VmError, failed},
    seccomp::{ThreadRole, run_in_thread},
    snapshot::{OpenSnapshot, OrderFile},
    terminal,
};
use crate::{
    arch::{
        guest::{self, BootLayout, GuestVcpus},
        host,
    },
    devices::Bus,
    kvm::pre_fault::{Chunk, Stage2Populator},
    memory::{
        GuestMemory, MemoryError, base_page_size,
        changes::ChangesData,
        image,
        layers::LayeredImage,
        on_demand::{OnDemand, pages_of},
        user_faults::UserFaults,
    },
};

/// A start, before memory is allocated.
pub enum Start<'a> {
    /// A kernel boots.
    Boot(KernelBoot<'a>),
    /// The VM of a snapshot continues.
    Restore(&'a OpenSnapshot, &'a MemorySource),
}

/// A start in allocated memory.
pub enum PlacedStart<'a> {
    /// A kernel at these places.
    Boot(KernelBoot<'a>, BootLayout),
    /// A snapshot whose zones are those of the memory.
    Restore(&'a OpenSnapshot, &'a MemorySource),
}

impl<'a> Start<'a> {
    /// Reads the kernel's image, if one boots, or checks that a snapshot is of such a host.
    pub fn new(config: &VmConfig, files: &'a OpenFiles) -> Result<Self, VmError> {
        Ok(match &files.start {
            StartFiles::Boot(files) => Self::Boot(KernelBoot::new(files, config)?),
            StartFiles::Restore(snapshot, source) => {
                check_host(snapshot)?;
                Self::Restore(snapshot, source)
            }
        })
    }

    /// Returns the file that memory is mapped from, if it is.
    pub fn mapped_image(&self) -> Option<Arc<File>> {
        match self {
            Self::Restore(snapshot, MemorySource::Map) => Some(Arc::clone(&snapshot.memory)),
            _ => None,
        }
    }

    /// Returns whether memory and stage 2 may be populated before the guest accesses them. Otherwise a
    /// page that exists would not be filled, or each page of a mapped file would be read and copied.
    pub const fn allows_prefault(&self) -> bool {
        !matches!(self, Self::Restore(_, MemorySource::Map | MemorySource::OnDemand(..)))
    }

    /// Checks that the start fits the memory.
    pub fn with_memory(self, memory: &GuestMemory) -> Result<PlacedStart<'a>, VmError> {
        Ok(match self {
            Self::Boot(kernel) => {
                let layout = kernel.layout(memory)?;
                PlacedStart::Boot(kernel, layout)
            }
            Self::Restore(snapshot, source) => {
                check_memory(snapshot, memory)?;
                PlacedStart::Restore(snapshot, source)
            }
        })
    }
}

impl<'a> PlacedStart<'a> {
    /// Returns the width of guest-physical addresses that the start demands.
    pub const fn ipa_bits(&self) -> Option<u8> {
        match self.snapshot() {
            None => None,
            Some(snapshot) => Some(snapshot.state.ipa_bits),
        }
    }

    /// Returns the snapshot, whose vCPUs need their counter when all else is done.
    pub const fn snapshot(&self) -> Option<&'a OpenSnapshot> {
        match self {
            Self::Boot(..) => None,
            Self::Restore(snapshot, _) => Some(snapshot),
        }
    }

    /// Sets the first state of memory, devices and vCPUs. The devices of a snapshot are suspended
    /// afterwards. Returns the threads that fill the memory beside the guest, if there are any.
    pub fn load(
        self,
        vm: &VmFd,
        memory: &GuestMemory,
        bus: &Bus,
        vcpus: &GuestVcpus,
    ) -> Result<Option<OnDemand>, VmError> {
        let (snapshot, source) = match self {
            Self::Boot(kernel, layout) => {
                return kernel.load(&layout, memory, bus, vcpus).map(|()| None);
            }
            Self::Restore(snapshot, source) => (snapshot, source),
        };
        let name = || snapshot.name.as_str();
        let machine = &snapshot.state.machine;
        // A host with another CPU or GIC is refused before memory is read.
        guest::restore_vcpus(&vcpus.fds, &vcpus.controller, machine).map_err(failed(name()))?;
        let image = layered_image(snapshot, memory)?;
        let on_demand = match source {
            MemorySource::Map => {
                image.apply_changes(memory).map_err(failed(name()))?;
                None
            }
            MemorySource::Copy => {
                load_memory(snapshot, memory)?;
                image.apply_changes(memory).map_err(failed(name()))?;
                None
            }
            MemorySource::OnDemand(faults, file) => {
                let on_demand = fill_on_demand(image, faults, file.as_ref(), memory);
                Some(on_demand.map_err(failed(name()))?)
            }
        };
        bus.restore(&snapshot.state.devices).map_err(failed(name()))?;
        // KVM reads tables of the interrupt controller from guest memory.
        guest::restore_interrupts(&vcpus.fds, &vcpus.controller, machine)
            .map_err(failed(name()))?;
        if let MemorySource::OnDemand(_, Some(file)) = source {
            // It only saves faults.
            if let Err(error) = populate_stage2(vm, vcpus, memory, file.order().unwrap_or_default())
            {
                log::warn!("stage 2 is populated by faults only: {}", error_text(&error));
            }
        }
        Ok(on_demand)
    }
}

/// Returns the memory file with its changes, which are verified.
fn layered_image(snapshot: &OpenSnapshot, memory: &GuestMemory) -> Result<LayeredImage, VmError> {
    let mut image = LayeredImage::from(Arc::clone(&snapshot.memory));
    for (changes, file) in snapshot.state.changes.iter().zip(&snapshot.changes) {
        let data = ChangesData { bytes: changes.bytes, crc: changes.crc };
        image
            .add(Arc::clone(file), data, memory.size())
            .map_err(failed(format!("{}: {}", snapshot.name, changes.name)))?;
    }
    Ok(image)
}

fn fill_on_demand(
    image: LayeredImage,
    faults: &UserFaults,
    file: Option<&OrderFile>,
    memory: &GuestMemory,
) -> Result<OnDemand, MemoryError> {
    let faults = faults
        .try_clone()
        .map_err(|source| MemoryError::Image { operation: "read on demand", source })?;
    let order = file.and_then(OrderFile::order);
    // Without faults for all accesses, the order would not have them.
    let records = file.is_some() && order.is_none();
    OnDemand::start(faults, memory, image, order.unwrap_or_default(), !records, end_process)
}

/// Ends the process, whose vCPUs cannot be stopped while they wait for a page.
fn end_process(error: io::Error) {
    terminal::restore();
    eprintln!("granule: a page of the snapshot cannot be read: {error}");
    process::exit(1)
}

/// Continues the work of suspended devices, whose threads have the filter of a vCPU's thread with
/// `confine`, as when the guest starts them.
pub fn resume_devices(bus: &Bus, confine: bool) -> Result<(), VmError> {
    let resume = || {
        bus.resume();
        Ok(())
    };
    run_in_thread(confine, ThreadRole::Vcpu, resume).map_err(failed("the devices cannot continue"))
}

/// Populates stage 2 of the parts that the guest accesses first, if the host's KVM can.
fn populate_stage2(
    vm: &VmFd,
    vcpus: &GuestVcpus,
    memory: &GuestMemory,
    order: &[Range<u64>],
) -> Result<(), VmError> {
    let Some(mut populator) = Stage2Populator::new(vm) else {
        return Ok(());
    };
    vcpus.fds.iter().take(1).try_for_each(|vcpu| populator.add_vcpu(vcpu))?;
    // A larger page may be incomplete: only what was filled is populated.
    for (_, ram, part) in order.iter().flat_map(|part| pages_of(memory, part)) {
        let chunk = Chunk {
            start: GuestAddress(ram.start().0 + part.start),
            size: Bytes(part.end - part.start),
        };
        populator.populate_chunk(chunk, &|| false)?;
    }
    Ok(())
}

/// Checks what memory depends on, before it is allocated.
fn check_host(snapshot: &OpenSnapshot) -> Result<(), VmError> {
    let state = &snapshot.state;
    let page = base_page_size();
    let refused = |text| Err(VmError::Refused(format!("{}: {text}", snapshot.name)));
    if page != state.page_size {
        return refused(format!(
            "the snapshot is of a host with pages of {}, and this host has pages of {page}",
            state.page_size
        ));
    }
    let frequency = host::counter_frequency();
    if frequency != state.counter_frequency {
        return refused(format!(
            "its guest measures time by a counter of {} Hz, and that of this host has {frequency} Hz",
            state.counter_frequency
        ));
    }
    Ok(())
}

fn check_memory(snapshot: &OpenSnapshot, memory: &GuestMemory) -> Result<(), VmError> {
    let (zones, regions) = (&snapshot.state.zones, memory.regions());
    let mut pairs = zones.iter().zip(regions);
    let are_same = zones.len() == regions.len()
        && pairs.all(|(zone, ram)| zone.start == ram.start().0 && zone.size == ram.size());
    if !are_same {
        return Err(VmError::Refused(format!(
            "{}: its memory zones are not those of its configuration",
            snapshot.name
        )));
    }
    image::check_size(memory, &snapshot.memory).map_err(failed(snapshot.name.as_str()))
}

fn load_memory(snapshot: &OpenSnapshot, memory: &GuestMemory) -> Result<(), VmError> {
    let state = &snapshot.state;
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let data =
        image::load(memory, &snapshot.memory, threads).map_err(failed(snapshot.name.as_str()))?;
    if data.crc != state.memory_crc || data.bytes != state.data_bytes {
        return Err(VmError::Refused(format!(
            "{}: {} is damaged: its {} of data have the checksum {:08x}, and the snapshot had {} \
             with {:08x}",
            snapshot.name, state.memory, data.bytes, data.crc, state.data_bytes, state.memory_crc
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::snapshot::{SnapshotDirectory, VmState, testing::small_state};

    #[test]
    fn a_snapshot_of_a_host_with_other_pages_is_refused_before_there_is_memory() {
        let folder = tempfile::tempdir().unwrap();
        let directory = SnapshotDirectory::open(folder.path()).unwrap();
        let (name, file) = directory.create_memory().unwrap();
        let state = VmState { page_size: Bytes(1 << 30), ..small_state(name) };
        directory.commit(&file, &state).unwrap();
        let snapshot = OpenSnapshot::open(folder.path()).unwrap();

        let error = check_host(&snapshot).unwrap_err().to_string();

        assert!(error.contains("a host with pages of 1G, and this host has pages of"), "{error}");
    }

    #[test]
    fn memory_that_is_restored_on_demand_or_mapped_is_not_populated() {
        let folder = tempfile::tempdir().unwrap();
        let directory = SnapshotDirectory::open(folder.path()).unwrap();
        let (name, file) = directory.create_memory().unwrap();
        directory.commit(&file, &small_state(name)).unwrap();
        let snapshot = OpenSnapshot::open(folder.path()).unwrap();

        let mut sources = vec![(MemorySource::Copy, true), (MemorySource::Map, false)];
        match UserFaults::open() {
            Ok(faults) => sources.push((MemorySource::OnDemand(faults, None), false)),
            Err(error) => granule_types::testing::skip(format_args!("userfaultfd: {error}")),
        }

        for (source, expected) in sources {
            let start = Start::Restore(&snapshot, &source);
            assert_eq!(start.allows_prefault(), expected, "{source:?}");
        }
    }
}
