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
fn each_role_has_a_filter_of_its_actions_within_those_of_the_main_thread() {
    let process = ThreadRole::Main.actions();
    let calls = 0..i64::try_from(Actions::CALLS).unwrap();

    for role in ROLES {
        let actions = role.actions();
        assert_eq!(role.filter().as_slice(), Program::compile(&actions).as_slice(), "{role:?}");
        let outside: Vec<_> = calls.clone().filter(|call| actions.allows(*call)).collect();
        assert!(outside.iter().all(|call| process.allows(*call)), "{role:?}");
        assert!(!outside.is_empty(), "{role:?}");
    }
}

#[test]
fn programs_and_sockets_and_io_uring_are_not_allowed() {
    let process = ThreadRole::Main.actions();

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
        assert!(!process.allows(call), "{call}");
    }
}

/// Returns the calls of all roles, and the code that uses them.
fn allowed_calls() -> impl Iterator<Item = AllowedCall> {
    ThreadRole::Main.allowed_calls().iter().copied().flatten().copied()
}

#[test]
fn every_allowed_call_is_listed_once_with_its_user() {
    let calls: BTreeMap<_, _> = allowed_calls().collect();

    assert_eq!(calls.len(), allowed_calls().count());
    assert!(calls.values().all(|user| !user.is_empty()));
}

/// Environment variable of the child process: folder for its files.
const FOLDER_VARIABLE: &str = "GRANULE_TEST_SECCOMP";
/// Environment variable of the child process: number of the call that its filters lack.
const REMOVED_CALL_VARIABLE: &str = "GRANULE_TEST_WITHOUT";

/// Returns the filter of a role without one of its calls, if filters of this process lack one.
pub(super) fn filter_without_removed_call(role: ThreadRole) -> Option<Program> {
    let removed = std::env::var(REMOVED_CALL_VARIABLE).ok()?;
    let mut actions = role.actions();
    actions.forbid(removed.parse().unwrap());
    for values in ARGUMENT_RESTRICTED_CALLS {
        actions.allow_values(*values);
    }
    Some(Program::compile(&actions))
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

    for (number, user) in allowed_calls() {
        let output = run_child(Some(number));
        let message = String::from_utf8_lossy(&output.stderr);
        let named = output.status.code() == Some(1)
            && message.contains(&format!("system call {number:04} is not allowed"));
        // The kernel ends the process if the handler is blocked or itself needs the call.
        let killed = output.status.signal() == Some(libc::SIGSYS);
        assert!(named || killed, "no component uses {number} ({user}): {message}");
    }
}

#[test]
fn a_vcpu_thread_cannot_type_into_the_terminal() {
    const VARIABLE: &str = "GRANULE_TEST_TERMINAL";
    if std::env::var_os(VARIABLE).is_some() {
        ThreadRole::Vcpu.confine().unwrap();
        // SAFETY: the argument is a character; the call must not return.
        unsafe { libc::ioctl(0, libc::TIOCSTI, c"x".as_ptr()) };
        std::process::exit(0);
    }
    if !has_seccomp() {
        return granule_types::testing::skip("this host has no seccomp");
    }

    let name = "vm::seccomp::tests::a_vcpu_thread_cannot_type_into_the_terminal";
    let output = child_test_command(name).env(VARIABLE, "").output().unwrap();

    let message = String::from_utf8_lossy(&output.stderr);
    let expected = format!("system call {:04} is not allowed", libc::SYS_ioctl);
    assert!(message.contains(&expected), "{message}");
    assert_eq!(output.status.code(), Some(1), "{message}");
}
