// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Takes a [snapshot](super::snapshot) of a VM.

use std::{collections::BTreeMap, fs::File};

use granule_types::units::Bytes;

use super::{
    builder::Vm,
    config::VmConfig,
    outcome::{VmError, failed},
    snapshot::{SnapshotDirectory, VmState, ZoneState},
    start::resume_devices,
    vcpu::RunState,
};
use crate::{
    arch::{MachineState, guest},
    devices::DeviceState,
    memory::image,
};

/// Sizes of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedSizes {
    /// Guest memory.
    pub memory: Bytes,
    /// Pages of it that are not zero, which the directory contains.
    pub data: Bytes,
}

/// Saves a VM to a directory, and continues it if it ran.
///
/// # Errors
/// A device cannot be saved, or a file cannot be written. The VM continues as before, and the
/// directory contains its earlier snapshot, if there was one.
pub fn save(
    vm: &Vm,
    config: &VmConfig,
    directory: &SnapshotDirectory,
) -> Result<SavedSizes, VmError> {
    let requested = vm.vcpus.requested_state();
    vm.vcpus.pause();
    let saved = match vm.vcpus.has_ended() {
        true => Err(VmError::Refused("the guest has ended and cannot be saved".to_owned())),
        false => save_paused(vm, config, directory),
    };
    let resumed = resume_devices(&vm.bus, vm.confines_threads);
    if requested == RunState::Running {
        vm.vcpus.request(RunState::Running);
    }
    resumed.and(saved)
}

fn save_paused(
    vm: &Vm,
    config: &VmConfig,
    directory: &SnapshotDirectory,
) -> Result<SavedSizes, VmError> {
    let devices = vm.bus.suspend().map_err(|reason| {
        VmError::Refused(format!("the VM cannot be saved with this device: {reason}"))
    })?;
    let vcpus = vm.vcpus.lock();
    let vcpus: Vec<_> = vcpus.iter().map(|vcpu| &**vcpu).collect();
    let machine = guest::save_machine(&vcpus, &vm.controller)?;
    let (name, file) = directory.create_memory()?;
    write_files(vm, config, directory, (name.clone(), &file), devices, machine)
        .inspect_err(|_| directory.discard_memory(&name))
}

fn write_files(
    vm: &Vm,
    config: &VmConfig,
    directory: &SnapshotDirectory,
    (name, file): (String, &File),
    devices: BTreeMap<String, DeviceState>,
    machine: MachineState,
) -> Result<SavedSizes, VmError> {
    let data = image::save(&vm.memory, &directory.page_map, file)
        .map_err(failed(format!("{} {name}", directory.description())))?;
    let regions = vm.memory.regions();
    let zones = regions.iter().map(|ram| ZoneState { start: ram.start().0, size: ram.size() });
    let state = VmState {
        page_size: regions.first().map_or(Bytes(0), |ram| ram.plan().base_page_size()),
        ipa_bits: vm.ipa_bits,
        config: config.clone(),
        zones: zones.collect(),
        memory: name,
        data_bytes: data.bytes,
        memory_crc: data.crc,
        devices,
        machine,
    };
    directory.commit(file, &state)?;
    let memory = Bytes(regions.iter().map(|ram| ram.size().0).sum());
    Ok(SavedSizes { memory, data: data.bytes })
}
