// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use std::process::Command;

use super::*;

const ROLES: [ThreadRole; 4] = [
    ThreadRole::Main,
    ThreadRole::Vcpu,
    ThreadRole::Console,
    ThreadRole::Api,
];

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
        .args([
            "--exact",
            "vm::seccomp::tests::a_forbidden_call_ends_the_process_with_its_number",
        ])
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
