// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of the filters. A child process runs the [components](super::components) once with the
//! filters, and once for each allowed call without this call, which must end the process.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::unix::process::ExitStatusExt as _,
    process::Output,
};

use super::{components::run_components, *};
use crate::devices::virtio::testing::child_test_command;

const ROLES: [ThreadRole; 4] =
    [ThreadRole::Main, ThreadRole::Vcpu, ThreadRole::Console, ThreadRole::Api];

#[test]
fn the_filter_of_each_role_is_a_subset_of_the_main_filter() {
    let process = ThreadRole::Main.allowed_numbers();

    for role in ROLES {
        assert!(role.compile_filter().len() < 256, "{role:?}");
        let within = role.allowed_numbers().iter().all(|call| process.contains(call));
        assert!(within, "{role:?}");
    }
}

#[test]
fn programs_and_sockets_and_io_uring_are_not_allowed() {
    let process = ThreadRole::Main.allowed_numbers();

    for call in [
        libc::SYS_execve,
        libc::SYS_execveat,
        libc::SYS_ptrace,
        libc::SYS_mount,
        libc::SYS_socket,
        libc::SYS_bind,
        libc::SYS_bpf,
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
    ] {
        assert!(!process.contains(&call), "{call}");
    }
}

#[test]
fn every_allowed_call_is_listed_once_with_its_user() {
    let calls: BTreeMap<_, _> = ThreadRole::Main.allowed_calls().copied().collect();

    assert_eq!(calls.len(), ThreadRole::Main.allowed_calls().count());
    assert!(calls.values().all(|user| !user.is_empty()));
}

/// Environment variable of the child process: folder for its files.
const FOLDER_VARIABLE: &str = "GRANULE_TEST_SECCOMP";
/// Environment variable of the child process: number of the call that its filters lack.
const REMOVED_CALL_VARIABLE: &str = "GRANULE_TEST_WITHOUT";

/// Returns the call that the filters of this process lack.
pub(super) fn removed_call() -> Option<i64> {
    std::env::var(REMOVED_CALL_VARIABLE).ok()?.parse().ok()
}

/// Runs the components in a child process, with filters that lack the call `without`, if any.
fn run_child(without: Option<i64>) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    fs::write(&keys, "key\n").unwrap();
    let mut child = child_test_command(
        "vm::seccomp::tests::every_allowed_call_is_needed_and_others_end_the_process",
    );
    if let Some(call) = without {
        child.env(REMOVED_CALL_VARIABLE, call.to_string());
    }
    // With one arena, the allocator uses brk.
    child.env(FOLDER_VARIABLE, folder.path()).env("MALLOC_ARENA_MAX", "1");
    child.stdin(File::open(keys).unwrap()).output().unwrap()
}

#[test]
fn every_allowed_call_is_needed_and_others_end_the_process() {
    if let Some(folder) = std::env::var_os(FOLDER_VARIABLE) {
        run_components(Path::new(&folder));
        // The test harness would end the process in a thread without filters.
        std::process::exit(0);
    }
    if !has_seccomp() {
        return granule_types::testing::skip("this host has no seccomp");
    }
    let all = run_child(None);
    assert!(all.status.success(), "{}", String::from_utf8_lossy(&all.stderr));

    for (number, user) in ThreadRole::Main.allowed_calls() {
        let output = run_child(Some(*number));
        let message = String::from_utf8_lossy(&output.stderr);
        let named = output.status.code() == Some(1)
            && message.contains(&format!("system call {number:04} is not allowed"));
        // The kernel ends the process if the handler is blocked or itself needs the call.
        let killed = output.status.signal() == Some(libc::SIGSYS);
        assert!(named || killed, "no component uses {number} ({user}): {message}");
    }
}
