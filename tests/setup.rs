// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `scripts/setup` on each distribution, with a package manager that records its arguments.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Output, Stdio},
    sync::{Mutex, PoisonError},
};

use tempfile::TempDir;

/// Programs that `scripts/setup` itself requires.
const BASIC_PROGRAMS: [&str; 10] =
    ["awk", "bash", "dirname", "env", "grep", "head", "id", "sed", "touch", "uname"];

/// Excludes the start of a process while a program is written: until the process executes its own
/// program, it has the file open, and no process can execute that.
static PROGRAMS: Mutex<()> = Mutex::new(());

/// Machine of a distribution with no tool of the lab in PATH.
struct BareMachine(TempDir);

impl BareMachine {
    fn new(os_release: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let machine = Self(directory);
        fs::create_dir(machine.path().join("bin")).unwrap();
        for name in BASIC_PROGRAMS {
            let found = ["/usr/bin", "/bin"].map(|bin| Path::new(bin).join(name));
            let program = found.iter().find(|program| program.exists()).unwrap();
            // No link: a fake program of this name must not overwrite the machine's.
            machine.add_program(name, &format!("exec {} \"$@\"", program.display()));
        }
        fs::write(machine.path().join("os-release"), os_release).unwrap();
        // An installed Rust toolchain, which needs no package.
        machine.add_program("rustup", "exit 1");
        machine
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn add_program(&self, name: &str, script: &str) {
        let path = self.path().join("bin").join(name);
        let _lock = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Adds a package manager and a `sudo` that record their arguments in the file `calls`.
    fn add_package_manager(&self, name: &str) {
        let calls = self.path().join("calls").display().to_string();
        self.add_program(name, &format!("echo \"{name} $*\" >>{calls}"));
        self.add_program("id", "echo 1000");
        self.add_program("sudo", "shift; [ \"$1\" = -- ] && shift; exec \"$@\"");
    }

    fn calls(&self) -> String {
        fs::read_to_string(self.path().join("calls")).unwrap_or_default()
    }

    fn setup(&self, arguments: &[&str]) -> Output {
        let bin = self.path().join("bin");
        let lock = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
        let process = Command::new(bin.join("bash"))
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/setup"))
            .args(arguments)
            .env_clear()
            .env("PATH", &bin)
            .env("HOME", self.path())
            .env("GRANULE_OS_RELEASE", self.path().join("os-release"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(lock);
        process.wait_with_output().unwrap()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn missing_tools_are_installed_by_the_names_of_the_distribution() {
    for (os_release, manager, command, packages) in [
        (
            "ID=debian",
            "apt-get",
            "install --no-install-recommends",
            ["qemu-system-arm", "xz-utils"],
        ),
        ("ID=mint\nID_LIKE='ubuntu debian'", "apt-get", "install", ["qemu-system-arm", "xz-utils"]),
        ("ID=fedora", "dnf", "install", ["qemu-system-aarch64", "xz"]),
        ("ID=arch", "pacman", "-S", ["qemu-system-aarch64", "xz"]),
    ] {
        let machine = BareMachine::new(os_release);
        machine.add_package_manager(manager);

        let output = machine.setup(&[]);

        let calls = machine.calls();
        let install = calls.lines().last().unwrap_or_default();
        let words: Vec<&str> = install.split(' ').collect();
        assert!(install.contains(command), "{os_release}: {calls}");
        assert!(packages.iter().all(|name| words.contains(name)), "{os_release}: {calls}");
        assert!(!words.contains(&"shellcheck"), "{os_release}: {calls}");
        // The recorded package manager installs nothing.
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains("missing  flex"), "{}", text(&output.stderr));
    }
}

#[test]
fn an_arm64_machine_needs_no_cross_compiler() {
    for (machine_name, needs_cross_compiler) in [("aarch64", false), ("x86_64", true)] {
        let machine = BareMachine::new("ID=debian");
        machine.add_program("uname", &format!("echo {machine_name}"));
        machine.add_package_manager("apt-get");

        machine.setup(&[]);

        let calls = machine.calls();
        let installs = |package| calls.lines().any(|call| call.split(' ').any(|w| w == package));
        assert!(installs("gcc") && installs("qemu-system-arm"), "{calls}");
        assert_eq!(installs("gcc-aarch64-linux-gnu"), needs_cross_compiler, "{calls}");
    }
}

#[test]
fn an_unknown_distribution_lists_the_tools_and_their_packages() {
    let machine = BareMachine::new("ID=void");

    let output = machine.setup(&[]);

    let error = text(&output.stderr);
    let row = error.lines().find(|line| line.contains("missing  xz ")).unwrap_or_default();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("Debian") && error.contains("distribution is unknown"), "{error}");
    assert!(row.contains("xz-utils"), "{error}");
}

#[test]
fn a_check_calls_no_package_manager() {
    let machine = BareMachine::new("ID=debian");
    machine.add_package_manager("apt-get");

    let output = machine.setup(&["--dev", "--check"]);

    let printed = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert_eq!(machine.calls(), "");
    for missing in ["missing  flex", "missing  shellcheck", "Rust 1."] {
        assert!(printed.contains(missing), "{missing} in {printed}");
    }
}

#[test]
fn rustup_is_installed_from_a_distribution_that_has_it() {
    for (os_release, manager, has_package) in [
        ("ID=debian", "apt-get", true),
        ("ID=debian", "apt-get", false),
        ("ID=fedora", "dnf", true),
    ] {
        let machine = BareMachine::new(os_release);
        machine.add_package_manager(manager);
        fs::remove_file(machine.path().join("bin/rustup")).unwrap();
        let rows = if has_package { "echo 'rustup | 1.27.1-3 | mirror trixie/main'" } else { ":" };
        machine.add_program("apt-cache", rows);
        machine.add_program("uname", "echo aarch64");
        let packages = include_str!("../scripts/packages");
        for row in packages.lines().filter(|row| row.starts_with("lab ")) {
            let columns: Vec<&str> = row.split_whitespace().collect();
            let probe = columns[3];
            if columns[2] == "cross" {
                continue;
            }
            match Path::new(probe).is_absolute() {
                true if !Path::new(probe).exists() => {
                    return granule_types::testing::skip(format!("{probe} is missing"));
                }
                true => {}
                false => machine.add_program(probe, ":"),
            }
        }

        let output = machine.setup(&[]);

        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        let cause = if has_package { "although its package" } else { "own installer" };
        assert!(error.contains(cause), "{error}");
        let calls = machine.calls();
        assert_eq!(calls.lines().any(|call| call.ends_with(" rustup")), has_package, "{calls}");
    }
}
