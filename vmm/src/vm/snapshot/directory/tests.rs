// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use std::{error::Error, path::PathBuf};

use granule_types::units::Bytes;

use super::{
    super::{
        OpenSnapshot,
        open::MAX_READS,
        state::{ChangesState, testing::small_state},
    },
    *,
};
use crate::devices::virtio::testing::wait_until;

fn save(directory: &SnapshotDirectory, vcpus: u32) {
    let (name, file) = directory.create_memory().unwrap();
    let mut state = small_state(name);
    state.config.vcpus = vcpus;
    let committed = directory.commit(&file, &state).unwrap();
    directory.remove_earlier(&committed);
}

/// Opens a directory that was locked before: a program that another test starts shares the lock until it
/// executes.
fn open_again(path: &Path) -> SnapshotDirectory {
    let mut opened = None;
    wait_until("the earlier lock ends", || {
        opened = SnapshotDirectory::open(path).ok();
        opened.is_some()
    });
    opened.unwrap()
}

fn names(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

fn refusal(path: &Path) -> String {
    let error = OpenSnapshot::open(path).unwrap_err();
    let cause = error.source().map(ToString::to_string).unwrap_or_default();
    format!("{error}: {cause}")
}

fn new_directory() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("snapshot");
    (folder, path)
}

#[test]
fn a_snapshot_replaces_the_earlier_one() {
    let (_folder, path) = new_directory();
    let directory = SnapshotDirectory::open(&path).unwrap();

    save(&directory, 1);
    save(&directory, 2);

    assert_eq!(names(&path), ["memory-1", STATE_NAME]);
    assert_eq!(OpenSnapshot::open(&path).unwrap().state.config.vcpus, 2);
}

#[test]
fn links_and_directories_in_place_of_its_files_are_refused() {
    for file in ["memory-0", STATE_NAME] {
        let (folder, path) = new_directory();
        save(&SnapshotDirectory::open(&path).unwrap(), 1);
        let moved = folder.path().join("moved");
        fs::rename(path.join(file), &moved).unwrap();

        std::os::unix::fs::symlink(&moved, path.join(file)).unwrap();
        assert!(refusal(&path).contains("symbolic link"), "{file}");

        fs::remove_file(path.join(file)).unwrap();
        fs::create_dir(path.join(file)).unwrap();
        assert!(refusal(&path).contains("not a regular file"), "{file}");
    }
}

#[test]
fn an_interruption_before_the_commit_leaves_the_earlier_snapshot() {
    let (_folder, path) = new_directory();
    let directory = SnapshotDirectory::open(&path).unwrap();
    save(&directory, 1);

    // What an interruption leaves after each of its steps.
    directory.create_memory().unwrap();
    fs::write(path.join(PARTIAL_STATE_NAME), "{").unwrap();

    assert_eq!(OpenSnapshot::open(&path).unwrap().state.config.vcpus, 1);
    save(&directory, 3);
    assert_eq!(names(&path), ["memory-2", STATE_NAME]);
    assert_eq!(OpenSnapshot::open(&path).unwrap().state.config.vcpus, 3);
}

#[test]
fn what_an_interruption_has_left_is_removed_by_the_next_process() {
    let (_folder, path) = new_directory();
    let directory = SnapshotDirectory::open(&path).unwrap();
    save(&directory, 1);
    directory.create_memory().unwrap();
    directory.create_changes().unwrap();
    directory.create(PARTIAL_STATE_NAME).unwrap();
    assert!(SnapshotDirectory::open(&path).is_err(), "the directory is locked");
    drop(directory);

    let _directory = open_again(&path);

    assert_eq!(names(&path), ["memory-0", STATE_NAME]);
    assert_eq!(OpenSnapshot::open(&path).unwrap().state.config.vcpus, 1);
}

#[test]
fn what_a_first_snapshot_has_left_is_removed_by_the_next_process() {
    let (_folder, path) = new_directory();
    SnapshotDirectory::open(&path).unwrap().create_memory().unwrap();

    drop(open_again(&path));

    assert!(names(&path).is_empty());
}

#[test]
fn files_beside_a_state_that_cannot_be_read_are_kept() {
    let (_folder, path) = new_directory();
    SnapshotDirectory::open(&path).unwrap().create_memory().unwrap();
    fs::write(path.join(STATE_NAME), "of another version").unwrap();

    drop(open_again(&path));

    assert_eq!(names(&path), ["memory-0", STATE_NAME]);
}

#[test]
fn memory_that_is_replaced_stays_open_in_the_vm_that_uses_it() {
    let (_folder, path) = new_directory();
    let directory = SnapshotDirectory::open(&path).unwrap();
    save(&directory, 1);
    let restored = OpenSnapshot::open(&path).unwrap();

    save(&directory, 2);

    // The VM that was restored from it still has the file.
    assert_eq!(restored.memory.metadata().unwrap().len(), 0);
}

#[test]
fn the_state_is_read_again_if_its_files_are_replaced_meanwhile() {
    let (_folder, path) = new_directory();
    let directory = SnapshotDirectory::open(&path).unwrap();
    save(&directory, 1);
    // Another VM commits after each of the first `commits` reads.
    let open = |commits| {
        let mut reads = 0;
        let opened = OpenSnapshot::open_by(&path, || {
            let text = read_state(&path);
            if reads < commits {
                save(&directory, 10 + reads);
            }
            reads += 1;
            text
        });
        (opened.map(|snapshot| snapshot.state.config.vcpus).ok(), reads)
    };

    assert_eq!(open(2), (Some(11), 3));
    assert_eq!(open(u32::MAX), (None, MAX_READS));
    let memory = OpenSnapshot::open(&path).unwrap().state.memory;
    fs::remove_file(path.join(memory)).unwrap();
    assert_eq!(open(0), (None, 2));
}

#[test]
fn what_is_no_snapshot_is_refused_with_its_reason() {
    let (_folder, path) = new_directory();
    assert!(refusal(&path).contains("there is no snapshot"), "{}", refusal(&path));
    save(&SnapshotDirectory::open(&path).unwrap(), 1);
    let state = path.join(STATE_NAME);
    let text = fs::read_to_string(&state).unwrap();

    for (changed, expected) in [
        (text[..text.len() / 2].to_owned(), "truncated or damaged"),
        (text.replace("snapshot/2", "snapshot/1"), "'granule.snapshot/1'"),
        (text.replace("\"vcpus\":1", "\"vcpus\":3"), "truncated or damaged"),
        (String::new(), "not the header"),
    ] {
        fs::write(&state, changed).unwrap();
        assert!(refusal(&path).contains(expected), "{}", refusal(&path));
    }
    fs::write(&state, &text).unwrap();
    fs::remove_file(path.join("memory-0")).unwrap();
    assert!(refusal(&path).contains("memory-0"), "{}", refusal(&path));
}

#[test]
fn files_that_the_state_does_not_name_are_removed() {
    let (_folder, path) = new_directory();
    let directory = SnapshotDirectory::open(&path).unwrap();
    save(&directory, 1);
    let commit_changes = |changes: &mut Vec<ChangesState>| {
        let (name, file) = directory.create_changes().unwrap();
        changes.push(ChangesState { name, bytes: Bytes(0), crc: 0 });
        let mut state = small_state("memory-0".to_owned());
        state.changes.clone_from(changes);
        let before = names(&path);
        let committed = directory.commit(&file, &state).unwrap();
        assert_eq!(names(&path), before, "the guest waits for the commit");
        directory.remove_earlier(&committed);
    };

    let mut changes = Vec::new();
    commit_changes(&mut changes);
    directory.create_changes().unwrap();
    commit_changes(&mut changes);
    fs::write(path.join("changes-kept"), "").unwrap();

    let kept = ["changes-1", "changes-3", "changes-kept", "memory-0", STATE_NAME];
    assert_eq!(names(&path), kept);
    assert_eq!(OpenSnapshot::open(&path).unwrap().changes.len(), 2);
    fs::remove_file(path.join("changes-3")).unwrap();
    assert!(refusal(&path).contains("changes-3"), "{}", refusal(&path));
    save(&directory, 1);
    assert_eq!(names(&path), ["changes-kept", "memory-2", STATE_NAME]);
}

#[test]
fn a_memory_file_outside_of_the_directory_is_refused() {
    let (_folder, path) = new_directory();
    let directory = SnapshotDirectory::open(&path).unwrap();
    for name in ["../memory-0", "memory-0/x", "memory-+1", "memory-", ""] {
        let (_, file) = directory.create_memory().unwrap();
        directory.commit(&file, &small_state(name.to_owned())).unwrap();

        assert!(refusal(&path).contains("no memory file"), "{name}: {}", refusal(&path));
    }
}

#[test]
fn a_state_that_names_a_file_of_changes_without_end_is_refused() {
    let (_folder, path) = new_directory();
    let directory = SnapshotDirectory::open(&path).unwrap();
    let (name, file) = directory.create_memory().unwrap();
    let (changes, _) = directory.create_changes().unwrap();
    let mut state = small_state(name);
    state.changes = vec![ChangesState { name: changes, bytes: Bytes(0), crc: 0 }; 129];
    directory.commit(&file, &state).unwrap();

    assert!(refusal(&path).contains("names 129 files of changes"), "{}", refusal(&path));
}
