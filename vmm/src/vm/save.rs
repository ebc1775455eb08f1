// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Takes a [snapshot](super::snapshot) of a VM.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use granule_types::{error_text, units::Bytes};
use kvm_bindings::KVM_CAP_ARM_MTE;

use super::{
    builder::Vm,
    change_log::ChangeLog,
    config::VmConfig,
    dirty_logs::DirtyLogs,
    outcome::{VmError, failed},
    saved_memory::SavedMemory,
    snapshot::{Committed, SnapshotDirectory, VmState, ZoneState},
    vcpu::RunState,
};
use crate::{
    arch::{guest, host},
    devices::{DeviceState, virtio::block::Disk},
};

/// Sizes of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedSizes {
    /// Guest memory.
    pub memory: Bytes,
    /// Pages that are not zero in the memory file.
    pub data: Bytes,
    /// Bytes that were written to new files of memory and changes.
    pub written: Bytes,
    /// Indicates that the snapshot is the one of the directory also after the host has stopped.
    pub is_durable: bool,
}

/// Checks that a snapshot has all that a VM of this configuration needs.
///
/// # Errors
/// It does not: the option, and the reason.
pub fn check_completeness(config: &VmConfig) -> Result<(), &'static str> {
    match config.vm_capabilities.contains(&KVM_CAP_ARM_MTE) {
        true => Err("does not support --vm-capability 205 (MTE), because it has no tags"),
        false => Ok(()),
    }
}

/// States of the devices, by name.
type DeviceStates = BTreeMap<String, DeviceState>;

/// Logs of an incremental snapshot.
pub struct ChangeLogs<'a> {
    pub changes: &'a mut ChangeLog,
    pub dirty: &'a mut DirtyLogs,
}

/// Saves a VM to a directory, and continues it if it ran. With `logs`, the snapshot has only what
/// changed since the last one, if there is one. Also returns the time in which the VM was stopped.
///
/// # Errors
/// A device cannot be saved, or a file cannot be written: the VM continues as before, and the
/// directory contains its earlier snapshot, if there was one. Or the VM cannot continue: it stays
/// paused, and if this is the error that is returned, the new snapshot is complete.
pub fn save(
    vm: &Vm,
    config: &VmConfig,
    directory: &SnapshotDirectory,
    logs: Option<ChangeLogs<'_>>,
) -> Result<(SavedSizes, Duration), VmError> {
    let save = |devices| save_stopped(vm, config, directory, logs, devices);
    finish_save(while_stopped(vm, save), directory)
}

/// Saves a VM that runs, and stops it only to save what has changed since its memory was written:
///
/// ```text
/// stop ── start logs ── continue ── write all memory ── stop ── write changes, commit ── continue
/// ```
///
/// # Errors
/// As for [`save`]; if the VM cannot continue after the first stop, there is no new snapshot.
pub fn save_live(
    vm: &Vm,
    config: &VmConfig,
    directory: &SnapshotDirectory,
    logs: ChangeLogs<'_>,
) -> Result<(SavedSizes, Duration), VmError> {
    let ((), first) =
        while_stopped(vm, |_| Ok(logs.changes.begin(vm, config.dirty_log, logs.dirty)?))
            .finish()?;
    let base = SavedMemory::write_all(&vm.memory, directory)?;
    // As much as possible while the guest runs: the second stop flushes what it has written since.
    flush_disks(vm).inspect_err(|_| directory.discard(&base.name))?;
    let (name, written) = (base.name.clone(), base.written);
    // The commit then waits for the changes only.
    base.new_file()
        .sync_data()
        .map_err(failed(directory.description()))
        .inspect_err(|_| directory.discard(&name))?;
    let ChangeLogs { changes, dirty } = logs;
    changes.set_base(base);
    let logs = ChangeLogs { changes: &mut *changes, dirty };
    let save = |devices| save_stopped(vm, config, directory, Some(logs), devices);
    let stopped = while_stopped(vm, save);
    if stopped.done.is_err() {
        directory.discard(&name);
        changes.drop_base();
    }
    let (saved, second) = finish_save(stopped, directory)?;
    Ok((SavedSizes { written: Bytes(written.0 + saved.written.0), ..saved }, first + second))
}

/// Outcome of work on a stopped VM.
struct Stopped<T> {
    done: Result<T, VmError>,
    /// Result of its continuation.
    resumed: Result<(), VmError>,
    /// Time in which it was stopped.
    time: Duration,
}

impl<T> Stopped<T> {
    /// Returns the result of the work, with the time in which the VM was stopped. An error of the work
    /// hides that the VM cannot continue, which is logged then.
    fn finish(self) -> Result<(T, Duration), VmError> {
        match (self.done, self.resumed) {
            (Ok(done), Ok(())) => Ok((done, self.time)),
            (Ok(_), Err(error)) => Err(failed("the VM stays paused")(error_text(&error))),
            (Err(error), resumed) => {
                if let Err(paused) = resumed {
                    log::error!("the VM stays paused: {}", error_text(&paused));
                }
                Err(error)
            }
        }
    }
}

/// Removes the earlier snapshot, if there is a new one, and returns the sizes of the latter.
fn finish_save(
    stopped: Stopped<(SavedSizes, Committed)>,
    directory: &SnapshotDirectory,
) -> Result<(SavedSizes, Duration), VmError> {
    if let Ok((_, committed)) = &stopped.done {
        directory.remove_earlier(committed);
    }
    let ((sizes, _), time) = stopped.finish()?;
    Ok((sizes, time))
}

/// Calls `work` with the states of the devices, while these and the vCPUs are stopped.
fn while_stopped<T>(vm: &Vm, work: impl FnOnce(DeviceStates) -> Result<T, VmError>) -> Stopped<T> {
    let start = Instant::now();
    let requested = vm.vcpus.requested_state();
    let was_suspended = vm.has_suspended_devices.get();
    let done = match vm.pause() {
        Err(error) => Err(error),
        Ok(()) if vm.vcpus.has_ended() => {
            Err(VmError::Refused("the guest has ended and cannot be saved".to_owned()))
        }
        Ok(()) => {
            // Those before a device that refuses are suspended.
            vm.has_suspended_devices.set(true);
            vm.bus.suspend().map_err(|reason| {
                VmError::Refused(format!("the VM cannot be saved with this device: {reason}"))
            })
        }
    };
    let done = done.and_then(work);
    let resumed = match requested {
        _ if was_suspended => Ok(()),
        RunState::Running => vm.resume(),
        // A request that they execute later is no part of the snapshot.
        _ => Ok(()),
    };
    Stopped { done, resumed, time: start.elapsed() }
}

fn save_stopped(
    vm: &Vm,
    config: &VmConfig,
    directory: &SnapshotDirectory,
    mut logs: Option<ChangeLogs<'_>>,
    devices: DeviceStates,
) -> Result<(SavedSizes, Committed), VmError> {
    // Memory may refer to what the guest has written, also before it has reset the device.
    flush_disks(vm)?;
    vm.rewind_counter()?;
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
        counter_frequency: host::counter_frequency(),
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
    let committed = directory
        .commit(memory.new_file(), &state)
        .inspect_err(|_| directory.discard(memory.new_name()))?;
    let sizes = SavedSizes {
        memory: vm.memory.size(),
        data: memory.data.bytes,
        written: memory.written,
        is_durable: committed.is_durable,
    };
    if let Some(logs) = logs {
        logs.changes.set_committed(memory);
    }
    Ok((sizes, committed))
}

fn flush_disks(vm: &Vm) -> Result<(), VmError> {
    vm.disks.iter().try_for_each(Disk::flush_for_snapshot).map_err(failed("the VM cannot be saved"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_with_tagged_memory_is_refused() {
        let with = |vm_capabilities| VmConfig { vm_capabilities, ..VmConfig::default() };

        assert!(check_completeness(&with(vec![252, 205])).unwrap_err().contains("MTE"));
        assert_eq!(check_completeness(&with(vec![252])), Ok(()));
    }
}
