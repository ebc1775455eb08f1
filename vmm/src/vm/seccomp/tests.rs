// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use std::{
    io::Write as _,
    process::{Command, Stdio},
};

use super::{
    exercises::{Opened, run_components, start_client},
    recorder::Recorder,
    *,
};

const ROLES: [ThreadRole; 4] =
    [ThreadRole::Main, ThreadRole::Vcpu, ThreadRole::Console, ThreadRole::Api];

#[test]
fn the_filter_of_each_role_is_within_that_of_the_process() {
    let process = ThreadRole::Main.numbers();

    for role in ROLES {
        assert!(role.filter().is_ok(), "{role:?}");
        let within = role.numbers().iter().all(|call| process.contains(call));
        assert!(within, "{role:?}");
    }
}

#[test]
fn programs_and_sockets_and_io_uring_are_not_allowed() {
    let process = ThreadRole::Main.numbers();

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

/// Runs in a child process, because a filter stays in force.
#[test]
fn a_forbidden_call_ends_the_process_with_its_number() {
    if std::env::var_os("GRANULE_TEST_SECCOMP").is_some() {
        ThreadRole::Console.confine().unwrap();
        // SAFETY: the call has no arguments; the filter ends the process.
        unsafe { libc::getppid() };
        return;
    }
    if !has_seccomp() {
        return granule_types::testing::skip("this host has no seccomp");
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "vm::seccomp::tests::a_forbidden_call_ends_the_process_with_its_number"])
        .args(["--nocapture", "--test-threads=1"])
        .env("GRANULE_TEST_SECCOMP", "1")
        .output()
        .unwrap();

    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    let number = format!("system call {:04} is not allowed", libc::SYS_getppid);
    assert!(message.contains(&number), "{message}");
}

#[test]
fn every_allowed_call_names_its_user_once() {
    let mut names: Vec<_> = ThreadRole::Main.allowed().map(|call| call.name).collect();
    names.sort_unstable();
    let count = names.len();
    names.dedup();

    assert_eq!(names.len(), count);
    for call in ThreadRole::Main.allowed() {
        assert!(!call.user.is_empty(), "{}", call.name);
    }
}

/// Name of the variable that makes the test the recorded child process; its value is a folder.
const RECORD: &str = "GRANULE_TEST_RECORD";

/// Runs in a child process, because filters stay in force and a forbidden call ends the process.
#[test]
fn every_allowed_call_is_exercised() {
    if let Some(folder) = std::env::var_os(RECORD) {
        return record_components(Path::new(&folder));
    }
    if !has_seccomp() {
        return granule_types::testing::skip("this host has no seccomp");
    }
    let folder = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "vm::seccomp::tests::every_allowed_call_is_exercised"])
        .args(["--nocapture", "--test-threads=1"])
        .env(RECORD, folder.path())
        // One arena, so that allocations use brk.
        .env("MALLOC_ARENA_MAX", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"key\n").unwrap();
    let output = child.wait_with_output().unwrap();

    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    if printed.contains("NO NOTIFICATIONS") {
        return granule_types::testing::skip("this host's seccomp has no user notifications");
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}{errors}");
    let seen: Vec<_> = printed.lines().filter_map(|line| line.strip_prefix("SEEN ")).collect();
    // `a_forbidden_call_ends_the_process_with_its_number` exercises exit_group.
    let missing: Vec<_> = ThreadRole::Main
        .allowed()
        .map(|call| call.name)
        .filter(|name| !seen.contains(name) && *name != "SYS_exit_group")
        .collect();
    assert!(missing.is_empty(), "no component uses {missing:?}");
}

fn record_components(folder: &Path) {
    let opened = Opened::new(folder);
    let client = start_client(&opened);
    let recorder = match Recorder::record(|| run_components(opened)) {
        Ok(recorder) => recorder,
        Err(error) => return println!("NO NOTIFICATIONS {error}"),
    };
    assert!(client.join().unwrap().contains("running"));
    for call in ThreadRole::Main.allowed().filter(|call| recorder.saw(call.number)) {
        println!("\nSEEN {}", call.name);
    }
}
