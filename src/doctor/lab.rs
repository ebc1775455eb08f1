// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks for `granule lab`: emulator, build tools, Rust, disk, memory.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    thread::available_parallelism,
};

use granule_types::units::Bytes;
use granule_vmm::memory::kib_field;

use super::{
    check::{Check, Group, Status},
    packages::{Distribution, Tool},
};

const EMULATOR: &str = "qemu-system-aarch64";
/// Oldest QEMU whose plugin interface and virtual clock the lab supports.
const MIN_QEMU: (u32, u32) = (7, 2);
/// Maximum memory of one emulator in the default matrix.
const MEMORY_PER_EMULATOR: Bytes = Bytes::gib(4);
/// Disk space of the sources and objects of one version, rounded up.
const DISK_OF_ONE_VERSION: Bytes = Bytes::gib(2);
/// Disk space of those of all versions and a guest.
const DISK_OF_ALL_VERSIONS: Bytes = Bytes::gib(9);
/// Path of the arm64 program below cargo's target directory.
const ARM64_PROGRAM: &str = "aarch64-unknown-linux-musl/release/granule";

fn check(name: impl Into<String>, status: Status, found: impl Into<String>) -> Check {
    Check::new(Group::Lab, name, status, found)
}

/// Returns the check of the distribution's package names.
pub fn distribution_check(os_release: &str, distribution: Option<Distribution>) -> Check {
    let value = |name: &str| os_release.lines().find_map(|line| line.strip_prefix(name));
    let name = value("PRETTY_NAME=").map_or("unknown", |name| name.trim_matches('"'));
    match distribution {
        Some(_) => check("distribution", Status::Ok, name),
        None => check("distribution", Status::Warn, format!("{name}: package names are Debian's"))
            .with_remedy("install your distribution's equivalents"),
    }
}

/// Checks tools, `PATH` being the value of the variable of this name.
pub fn tool_checks(tools: &[Tool], distribution: Distribution, path: &str) -> Vec<Check> {
    tools.iter().map(|tool| tool_check(tool, distribution, path)).collect()
}

fn tool_check(tool: &Tool, distribution: Distribution, path: &str) -> Check {
    // A header is better known by its package than by its path.
    let name = if tool.probe.starts_with('/') { tool.package } else { tool.probe };
    let Some(found) = find(tool.probe, path) else {
        let status = if tool.is_required { Status::Missing } else { Status::Warn };
        let remedy = format!("{} {}", distribution.install_command(), tool.package);
        let found = format!("not found ({})", tool.purpose);
        let missing = check(name, status, found).with_remedy(remedy);
        return Check { package: Some(tool.package.to_owned()), ..missing };
    };
    if tool.probe == EMULATOR {
        let output = |option: &str| {
            let output = Command::new(&found).arg(option).output();
            output
                .map_or_else(|_| String::new(), |o| String::from_utf8_lossy(&o.stdout).into_owned())
        };
        return emulator_check(&output("--version"), &output("-help"));
    }
    check(name, Status::Ok, found.display().to_string())
}

/// Returns the path of a program in the directories of `path`, or of an existing absolute path.
fn find(probe: &str, path: &str) -> Option<PathBuf> {
    if probe.starts_with('/') {
        return Some(PathBuf::from(probe)).filter(|path| path.exists());
    }
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut directories = env::split_paths(path).chain(system);
    directories.find_map(|directory| Some(directory.join(probe)).filter(|path| path.is_file()))
}

/// Checks the outputs of the emulator's `--version` and `-help`.
fn emulator_check(version_text: &str, help: &str) -> Check {
    let upgrade = "install QEMU 7.2 or later, or name another one with granule lab --qemu";
    let Some(version) = parse_version(version_text) else {
        let found = "its version cannot be read";
        return check(EMULATOR, Status::Missing, found).with_remedy(upgrade);
    };
    let found = format!("version {}.{}", version.0, version.1);
    if version < MIN_QEMU {
        return check(EMULATOR, Status::Missing, found).with_remedy(upgrade);
    }
    if !help.lines().any(|line| line.starts_with("-plugin ")) {
        return check(EMULATOR, Status::Missing, format!("{found} without plugins"))
            .with_remedy("install a QEMU that is built with --enable-plugins");
    }
    check(EMULATOR, Status::Ok, format!("{found} with plugins"))
}

/// Parses the version in a line such as `QEMU emulator version 7.2.22 (Debian …)`.
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let version = text.split_once("version ")?.1;
    let mut numbers = version.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Checks for the arm64 `granule` beside this program, or for the tool that builds it.
pub fn rust_check(path: &str) -> Check {
    let name = "granule for arm64";
    let program = env::current_exe().unwrap_or_default();
    let built = program.ancestors().nth(2).map(|target| target.join(ARM64_PROGRAM));
    if let Some(built) = built.filter(|built| built.is_file()) {
        return check(name, Status::Ok, built.display().to_string());
    }
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo")));
    let cargo = find("cargo", path)
        .or_else(|| home.map(|home| home.join("bin/cargo")).filter(|cargo| cargo.is_file()));
    match cargo {
        Some(cargo) => {
            check(name, Status::Ok, format!("scripts/lab builds it with {}", cargo.display()))
        }
        None => check(name, Status::Missing, "neither built nor is cargo found")
            .with_remedy("install rustup (its own installer or a package), then run scripts/setup"),
    }
}

/// Checks the free space of the file system that holds the cache.
pub fn disk_check(cache: &Path) -> Check {
    let name = "disk space";
    let Some(existing) = cache.ancestors().find(|path| path.is_dir()) else {
        return check(name, Status::Missing, format!("{} has no parent", cache.display()))
            .with_remedy("set the cache directory with GRANULE_CACHE");
    };
    let writable = rustix::fs::access(existing, rustix::fs::Access::WRITE_OK).is_ok();
    let is_used = fs::read_dir(cache).is_ok_and(|mut entries| entries.next().is_some());
    match rustix::fs::statvfs(existing) {
        Ok(stat) => {
            disk_space_check(cache, Bytes(stat.f_bavail * stat.f_frsize), writable, is_used)
        }
        Err(error) => check(name, Status::Warn, format!("{}: {error}", existing.display())),
    }
}

fn disk_space_check(cache: &Path, free: Bytes, writable: bool, is_used: bool) -> Check {
    let found = format!("{} GiB free for the cache {}", free.0 >> 30, cache.display());
    let elsewhere = "free space, or set another directory with GRANULE_CACHE";
    let status = match () {
        () if !writable => {
            let found = format!("no permission to write {}", cache.display());
            return check("disk space", Status::Missing, found)
                .with_remedy("set a writable directory with GRANULE_CACHE");
        }
        () if free >= DISK_OF_ALL_VERSIONS => return check("disk space", Status::Ok, found),
        // The cache may already hold the kernels.
        () if free >= DISK_OF_ONE_VERSION || is_used => Status::Warn,
        () => Status::Missing,
    };
    let needs = format!(
        "one version needs {} GiB, all versions {} GiB: {elsewhere}",
        DISK_OF_ONE_VERSION.0 >> 30,
        DISK_OF_ALL_VERSIONS.0 >> 30
    );
    check("disk space", status, found).with_remedy(needs)
}

/// Checks memory and CPUs against the default number of emulators.
pub fn memory_check(meminfo: &str) -> Check {
    let cpus = available_parallelism().map_or(1, |cpus| cpus.get() as u64);
    emulator_memory_check(kib_field(meminfo, "MemAvailable").unwrap_or(Bytes(0)), cpus)
}

fn emulator_memory_check(available: Bytes, cpus: u64) -> Check {
    let found = format!("{cpus} CPUs, {} GiB of memory available", available.0 >> 30);
    let fitting = available.0 / MEMORY_PER_EMULATOR.0;
    if fitting >= cpus {
        return check("memory", Status::Ok, found);
    }
    let remedy = match fitting {
        0 => "an emulator needs up to 4 GiB: free memory, or leave out the largest pages \
              (granule lab --jobs 1 -s anonymous)"
            .to_owned(),
        _ => format!(
            "{cpus} emulators need up to {} GiB: use granule lab --jobs {fitting}",
            4 * cpus
        ),
    };
    check("memory", Status::Warn, found).with_remedy(remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_emulator_and_one_without_plugins_are_refused() {
        let help = "-plugin [file=]<file>[,<argname>=<argvalue>]\n";
        for (version, help, status, found) in [
            (
                "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg)",
                help,
                Status::Ok,
                "version 7.2 with plugins",
            ),
            ("QEMU emulator version 10.1.0", help, Status::Ok, "version 10.1 with plugins"),
            (
                "QEMU emulator version 10.1.0",
                "-pidfile",
                Status::Missing,
                "version 10.1 without plugins",
            ),
            ("QEMU emulator version 6.2.0", help, Status::Missing, "version 6.2"),
            ("", help, Status::Missing, "its version cannot be read"),
        ] {
            let check = emulator_check(version, help);
            assert_eq!((check.status, check.found.as_str()), (status, found));
        }
    }

    #[test]
    fn a_missing_tool_names_its_package_and_an_optional_one_is_a_warning() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("flex"), "").unwrap();
        let path = folder.path().to_str().unwrap();
        let check = |probe, is_required| {
            let tool = Tool { probe, is_required, package: "p", purpose: "build" };
            tool_check(&tool, Distribution::Fedora, path)
        };

        let missing = check("no-such-tool", true);
        assert_eq!(missing.status, Status::Missing);
        assert_eq!(missing.remedy.as_deref(), Some("sudo dnf install p"));
        assert_eq!(missing.package.as_deref(), Some("p"));
        assert_eq!(check("no-such-tool", false).status, Status::Warn);
        assert_eq!(check("flex", true).status, Status::Ok);
        assert_eq!(check("/no/such/header.h", true).name, "p");
    }

    #[test]
    fn too_little_disk_space_is_missing_unless_the_cache_is_in_use() {
        let check = |gib, writable, is_used| {
            disk_space_check(Path::new("/c"), Bytes::gib(gib), writable, is_used).status
        };

        assert_eq!(check(20, true, false), Status::Ok);
        assert_eq!(check(3, true, false), Status::Warn);
        assert_eq!(check(1, true, false), Status::Missing);
        assert_eq!(check(1, true, true), Status::Warn);
        assert_eq!(check(20, false, true), Status::Missing);
    }

    #[test]
    fn too_little_memory_reduces_the_number_of_emulators() {
        let check = |gib, cpus| emulator_memory_check(Bytes::gib(gib), cpus);

        assert_eq!(check(16, 4).status, Status::Ok);
        assert!(check(9, 4).remedy.unwrap().ends_with("--jobs 2"));
        assert!(check(3, 4).remedy.unwrap().contains("--jobs 1"));
    }

    #[test]
    fn an_unknown_distribution_is_reported_with_debians_package_names() {
        let known = distribution_check("PRETTY_NAME=\"Debian 13\"\n", Some(Distribution::Debian));
        let unknown = distribution_check("PRETTY_NAME=\"NixOS\"\n", None);

        assert_eq!((known.status, known.found.as_str()), (Status::Ok, "Debian 13"));
        assert_eq!(unknown.status, Status::Warn);
        assert!(unknown.found.contains("NixOS") && unknown.found.contains("Debian's"));
    }
}
