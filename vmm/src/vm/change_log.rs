// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Log of the pages that changed since the last [snapshot](super::snapshot), for incremental ones.
//!
//! | writer | log |
//! |---|---|
//! | vCPUs, and KVM when the state of the machine is saved | dirty logs of the memslots |
//! | devices, and the balloon that discards pages | [`GuestMemory::mark_device_write`] |
//! | kernel, boot data and restored memory, before the guest runs | none: the first snapshot is full |
//!
//! Devices and vCPUs are stopped when the logs are read. Pages that were read from the logs stay
//! pending until a snapshot with their contents is committed, so a snapshot that fails loses none.

use super::{
    builder::Vm,
    config::VmConfig,
    dirty_logs::DirtyLogs,
    outcome::{VmError, failed},
    saved_memory::SavedMemory,
    snapshot::SnapshotDirectory,
};
use crate::{
    kvm::{KvmError, memslot::DirtyMode},
    memory::{GuestMemory, PageSet, changes::Changes},
};

/// Checks that all writers of guest memory are logged.
///
/// # Errors
/// Memory of this VM has a writer that is not: the option, and the reason.
pub fn check_writers(config: &VmConfig) -> Result<(), &'static str> {
    match config.dirty_log {
        _ if config.devices.vsock.is_some() => Err(
            "does not support --vsock, because the host's kernel writes to guest memory without a \
             log",
        ),
        DirtyMode::Ring | DirtyMode::RingOnly => Err(
            "does not support --dirty-log ring and ring-only, because KVM writes tables of the \
             interrupt controller outside of its rings",
        ),
        DirtyMode::Plain | DirtyMode::Manual | DirtyMode::ManualInitiallySet => Ok(()),
    }
}

/// Log of the pages that changed since the last snapshot.
#[derive(Debug, Default)]
pub struct ChangeLog {
    is_logging: bool,
    /// Pages that no committed snapshot has, for each region.
    pending: Vec<PageSet>,
    /// Files to which the pending pages are changes.
    base: Base,
}

/// Files of a snapshot since logging started.
#[derive(Debug, Default)]
enum Base {
    /// No files: the next snapshot has all memory.
    #[default]
    None,
    /// The last snapshot.
    Committed(SavedMemory),
    /// The snapshot that is being taken, which has all changes to its memory file.
    BeingTaken(SavedMemory),
}

impl Base {
    const fn memory(&self) -> Option<&SavedMemory> {
        match self {
            Self::None => None,
            Self::Committed(memory) | Self::BeingTaken(memory) => Some(memory),
        }
    }
}

impl ChangeLog {
    /// Returns whether the dirty logs of the VM belong to this log.
    pub const fn is_logging(&self) -> bool {
        self.is_logging
    }

    /// Takes the changed pages from the logs, or starts the logs. vCPUs and devices must be stopped,
    /// and KVM must have written the state of the interrupt controller to memory.
    ///
    /// # Errors
    /// KVM cannot log. No page is lost.
    pub fn collect(
        &mut self,
        vm: &Vm,
        mode: DirtyMode,
        logs: &mut DirtyLogs,
    ) -> Result<(), KvmError> {
        let regions = vm.memory.regions();
        if !self.is_logging {
            logs.start(vm, mode)?;
            regions.iter().for_each(|ram| ram.log_device_writes());
            self.is_logging = true;
            return Ok(());
        }
        for (index, ram) in regions.iter().enumerate() {
            self.add(index, &ram.take_device_writes());
        }
        logs.clear(vm, |index, words| self.add(index, words))
    }

    /// Forgets what changed before, for a snapshot of all memory that is written while the VM runs. vCPUs
    /// and devices must be stopped.
    ///
    /// # Errors
    /// KVM cannot log.
    pub fn begin(
        &mut self,
        vm: &Vm,
        mode: DirtyMode,
        logs: &mut DirtyLogs,
    ) -> Result<(), KvmError> {
        self.collect(vm, mode, logs)?;
        vm.memory.regions().iter().for_each(|ram| drop(ram.take_device_writes()));
        self.pending.clear();
        self.base = Base::None;
        Ok(())
    }

    /// Takes memory that was written since [`Self::begin`], so that the next snapshot has what changed
    /// since.
    pub fn set_base(&mut self, memory: SavedMemory) {
        self.base = Base::BeingTaken(memory);
    }

    /// Closes memory whose snapshot failed, whose file was removed: its blocks are free then, and the next
    /// snapshot has all memory.
    pub fn drop_base(&mut self) {
        self.base = Base::None;
    }

    /// Adds pages of a region.
    fn add(&mut self, region: usize, words: &[u64]) {
        if self.pending.len() <= region {
            self.pending.resize_with(region + 1, PageSet::default);
        }
        self.pending[region].add(words);
    }

    /// Writes the pending pages as changes to the last snapshot, or all memory if there is no such
    /// snapshot or a restore of it would read too much.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(
        &mut self,
        memory: &GuestMemory,
        directory: &SnapshotDirectory,
    ) -> Result<SavedMemory, VmError> {
        // The files of the last snapshot may have been moved or removed.
        if self.base.memory().is_some_and(|last| !last.exists(directory)) {
            self.base = Base::None;
        }
        let Some(last) = self.base.memory() else {
            return SavedMemory::write_all(memory, directory);
        };
        let changes = Changes::find(memory, &self.pending, &directory.page_map)
            .map_err(failed(directory.description()))?;
        // The guest is stopped, and the changes are not more than all memory.
        match &self.base {
            Base::Committed(last) if !last.has_space_for(changes.existing_bytes()) => {
                SavedMemory::write_all(memory, directory)
            }
            _ => last.write_changes(&changes, directory),
        }
    }

    /// Makes memory that was written, and whose snapshot is committed, that of the last snapshot.
    pub fn set_committed(&mut self, memory: SavedMemory) {
        self.base = Base::Committed(memory);
        self.pending.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use granule_types::units::{Bytes, GuestAddress};
    use vm_memory::Bytes as _;

    use super::*;
    use crate::{
        memory::{
            BackingPlan, GuestRam, HostPages, RamOptions, changes::ChangesData, image,
            layers::LayeredImage,
        },
        vm::{
            config::VsockConfig,
            snapshot::{OpenSnapshot, testing::small_state},
        },
    };

    const START: u64 = 0x4000_0000;
    const SIZE: Bytes = Bytes::mib(1);
    const PAGE: u64 = 4096;

    fn memory() -> GuestMemory {
        let host = HostPages::of_this_host().unwrap();
        let plan = BackingPlan::new("anonymous".parse().unwrap(), &host).unwrap();
        let options = RamOptions::default();
        let ram = GuestRam::new(plan, &host, GuestAddress(START), SIZE, options).unwrap();
        ram.log_device_writes();
        GuestMemory::new(vec![ram]).unwrap()
    }

    /// Writes a byte to each of these pages, as a device does.
    fn write_pages(memory: &GuestMemory, pages: impl Iterator<Item = u64>, byte: u8) {
        for page in pages {
            let address = GuestAddress(START + page * PAGE);
            memory.mark_device_write(address, Bytes(1));
            memory.map().write_obj(byte, address).unwrap();
        }
    }

    /// Returns the log after a first snapshot of 64 pages.
    fn saved_once(memory: &GuestMemory, directory: &SnapshotDirectory) -> ChangeLog {
        let mut log = ChangeLog { is_logging: true, ..ChangeLog::default() };
        write_pages(memory, 0..64, 1);
        save(&mut log, memory, directory);
        log
    }

    fn collect(log: &mut ChangeLog, memory: &GuestMemory) {
        log.add(0, &memory.regions()[0].take_device_writes());
    }

    fn save(log: &mut ChangeLog, memory: &GuestMemory, directory: &SnapshotDirectory) {
        collect(log, memory);
        let saved = log.write(memory, directory).unwrap();
        let mut state = small_state(saved.name.clone());
        state.changes = saved.changes.clone();
        let committed = directory.commit(saved.new_file(), &state).unwrap();
        directory.remove_earlier(&committed);
        log.set_committed(saved);
    }

    /// Returns the first byte of each page in the snapshot.
    fn restored(path: &Path) -> Vec<u8> {
        let snapshot = OpenSnapshot::open(path).unwrap();
        let mut image = LayeredImage::from(snapshot.memory);
        for (changes, file) in snapshot.state.changes.iter().zip(snapshot.changes) {
            let data = ChangesData { bytes: changes.bytes, crc: changes.crc };
            image.add(file, data, SIZE).unwrap();
        }
        let base = OpenSnapshot::open(path).unwrap().memory;
        let target = memory();
        image::load(&target, &base, 1).unwrap();
        image.apply_changes(&target).unwrap();
        first_bytes(&target)
    }

    fn first_bytes(memory: &GuestMemory) -> Vec<u8> {
        let read = |page| memory.map().read_obj(GuestAddress(START + page * PAGE)).unwrap();
        (0..SIZE.0 / PAGE).map(read).collect()
    }

    fn names(path: &Path) -> Vec<String> {
        let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn changes_are_saved_until_they_are_half_of_the_data() {
        let folder = tempfile::tempdir().unwrap();
        let directory = SnapshotDirectory::open(folder.path()).unwrap();
        let memory = memory();
        let mut log = saved_once(&memory, &directory);

        write_pages(&memory, 3..5, 2);
        save(&mut log, &memory, &directory);
        write_pages(&memory, [4, 100].into_iter(), 3);
        assert_eq!(memory.discard(GuestAddress(START + 7 * PAGE), Bytes(PAGE)), Bytes(PAGE));
        save(&mut log, &memory, &directory);

        assert_eq!(names(folder.path()), ["changes-1", "changes-2", "memory-0", "state.jsonl"]);
        assert_eq!(restored(folder.path()), first_bytes(&memory));
        // Three pages and their headers, and a header for the page of zeros.
        assert_eq!(log.base.memory().unwrap().written, Bytes(2 * PAGE + 3 * 16));
        write_pages(&memory, 0..40, 4);
        save(&mut log, &memory, &directory);
        assert_eq!(names(folder.path()), ["memory-3", "state.jsonl"]);
        assert_eq!(restored(folder.path()), first_bytes(&memory));
    }

    #[test]
    fn a_log_of_device_writes_starts_without_those_of_an_earlier_one() {
        let memory = memory();
        write_pages(&memory, 5..7, 1);

        memory.regions()[0].log_device_writes();
        write_pages(&memory, 8..9, 1);

        assert_eq!(memory.regions()[0].take_device_writes()[0], 1 << 8);
    }

    #[test]
    fn pages_stay_pending_after_a_failure() {
        let folder = tempfile::tempdir().unwrap();
        let directory = SnapshotDirectory::open(folder.path()).unwrap();
        let memory = memory();
        let mut log = saved_once(&memory, &directory);
        write_pages(&memory, 5..7, 2);

        // The state of this attempt is not committed.
        collect(&mut log, &memory);
        let failed = log.write(&memory, &directory).unwrap();
        directory.discard(failed.new_name());
        write_pages(&memory, 8..9, 3);
        save(&mut log, &memory, &directory);

        assert_eq!(names(folder.path()), ["changes-1", "memory-0", "state.jsonl"]);
        assert_eq!(restored(folder.path()), first_bytes(&memory));
    }

    #[test]
    fn a_snapshot_is_full_after_one_whose_memory_was_written_has_failed() {
        let folder = tempfile::tempdir().unwrap();
        let directory = SnapshotDirectory::open(folder.path()).unwrap();
        let memory = memory();
        let mut log = saved_once(&memory, &directory);
        let failed = SavedMemory::write_all(&memory, &directory).unwrap();
        directory.discard(&failed.name);

        log.set_base(failed);
        log.drop_base();
        assert!(log.base.memory().is_none());
        write_pages(&memory, 5..7, 2);
        save(&mut log, &memory, &directory);

        assert_eq!(restored(folder.path()), first_bytes(&memory));
        assert!(log.base.memory().unwrap().changes.is_empty());
    }

    #[test]
    fn a_snapshot_is_full_after_the_files_of_the_last_one_were_moved() {
        let folder = tempfile::tempdir().unwrap();
        let directory = SnapshotDirectory::open(folder.path()).unwrap();
        let memory = memory();
        let mut log = saved_once(&memory, &directory);
        let moved = folder.path().join("moved");
        fs::rename(folder.path().join("memory-0"), &moved).unwrap();

        write_pages(&memory, 5..7, 2);
        save(&mut log, &memory, &directory);

        assert_eq!(restored(folder.path()), first_bytes(&memory));
        assert!(log.base.memory().unwrap().changes.is_empty());
    }

    #[test]
    fn changes_to_a_base_of_the_same_snapshot_may_have_any_size() {
        let folder = tempfile::tempdir().unwrap();
        let directory = SnapshotDirectory::open(folder.path()).unwrap();
        let memory = memory();
        let mut log = ChangeLog { is_logging: true, ..ChangeLog::default() };
        write_pages(&memory, 0..64, 1);

        log.set_base(SavedMemory::write_all(&memory, &directory).unwrap());
        write_pages(&memory, 1..64, 2);
        save(&mut log, &memory, &directory);

        assert_eq!(names(folder.path()), ["changes-1", "memory-0", "state.jsonl"]);
        assert_eq!(restored(folder.path()), first_bytes(&memory));
        write_pages(&memory, 7..8, 3);
        save(&mut log, &memory, &directory);
        assert_eq!(names(folder.path()), ["memory-2", "state.jsonl"]);
    }

    #[test]
    fn writers_without_a_log_are_refused() {
        let mut with_vsock = VmConfig::default();
        with_vsock.devices.vsock = Some(VsockConfig { cid: 3 });
        let with = |dirty_log| VmConfig { dirty_log, ..VmConfig::default() };
        for (config, option) in [
            (with_vsock, "--vsock"),
            (with(DirtyMode::Ring), "--dirty-log"),
            (with(DirtyMode::RingOnly), "--dirty-log"),
        ] {
            let reason = check_writers(&config).unwrap_err();
            assert!(reason.contains(option), "{reason}");
        }
        assert!(check_writers(&with(DirtyMode::Manual)).is_ok());
    }
}
