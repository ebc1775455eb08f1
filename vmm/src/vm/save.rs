// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Takes a [snapshot](super::snapshot) of a VM.

use granule_types::units::Bytes;

use super::{
    builder::Vm,
    change_log::{ChangeLog, SavedMemory},
    config::VmConfig,
    dirty_logs::DirtyLogs,
    outcome::VmError,
    snapshot::{SnapshotDirectory, VmState, ZoneState},
    start::resume_devices,
    vcpu::RunState,
};
use crate::arch::guest;

/// Sizes of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedSizes {
    /// Guest memory.
    pub memory: Bytes,
    /// Pages that are not zero in the memory file.
    pub data: Bytes,
    /// Bytes that were written to the new file, of memory or changes.
    pub written: Bytes,
}

/// Logs of an incremental snapshot.
pub struct ChangeLogs<'a> {
    pub changes: &'a mut ChangeLog,
    pub dirty: &'a mut DirtyLogs,
}

/// Saves a VM to a directory, and continues it if it ran. With `logs`, the snapshot has only what
/// changed since the last one, if there is one.
///
/// # Errors
/// A device cannot be saved, or a file cannot be written. The VM continues as before, and the
/// directory contains its earlier snapshot, if there was one.
pub fn save(
    vm: &Vm,
    config: &VmConfig,
    directory: &SnapshotDirectory,
    logs: Option<ChangeLogs<'_>>,
) -> Result<SavedSizes, VmError> {
    let requested = vm.vcpus.requested_state();
    vm.vcpus.pause();
    let saved = match vm.vcpus.has_ended() {
        true => Err(VmError::Refused("the guest has ended and cannot be saved".to_owned())),
        false => save_paused(vm, config, directory, logs),
    };
    let resumed = match vm.has_suspended_devices.get() {
        true => Ok(()),
        false => resume_devices(&vm.bus, vm.confines_threads),
    };
    if requested == RunState::Running {
        vm.vcpus.request(RunState::Running);
    }
    resumed.and(saved)
}

fn save_paused(
    vm: &Vm,
    config: &VmConfig,
    directory: &SnapshotDirectory,
    mut logs: Option<ChangeLogs<'_>>,
) -> Result<SavedSizes, VmError> {
    let devices = vm.bus.suspend().map_err(|reason| {
        VmError::Refused(format!("the VM cannot be saved with this device: {reason}"))
    })?;
    let vcpus = vm.vcpus.lock();
    let vcpus: Vec<_> = vcpus.iter().map(|vcpu| &**vcpu).collect();
    let machine = guest::save_machine(&vcpus, &vm.controller)?;
    let memory = match &mut logs {
        Some(ChangeLogs { changes, dirty }) => {
            changes.collect(vm, config.dirty_log, dirty)?;
            changes.write(&vm.memory, directory)?
        }
        None => SavedMemory::write_all(&vm.memory, directory)?,
    };
    let regions = vm.memory.regions();
    let zones = regions.iter().map(|ram| ZoneState { start: ram.start().0, size: ram.size() });
    let state = VmState {
        page_size: regions.first().map_or(Bytes(0), |ram| ram.plan().base_page_size()),
        ipa_bits: vm.ipa_bits,
        config: config.clone(),
        zones: zones.collect(),
        memory: memory.name.clone(),
        data_bytes: memory.data.bytes,
        memory_crc: memory.data.crc,
        changes: memory.changes.clone(),
        devices,
        machine,
    };
    directory
        .commit(memory.new_file(), &state)
        .inspect_err(|_| directory.discard(memory.new_name()))?;
    let sizes = SavedSizes {
        memory: Bytes(regions.iter().map(|ram| ram.size().0).sum()),
        data: memory.data.bytes,
        written: memory.written,
    };
    if let Some(logs) = logs {
        logs.changes.set_committed(memory);
    }
    Ok(sizes)
}
