// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Opens `/dev/kvm` and explains why it cannot be used.
//!
//! The error of `open(2)` distinguishes a missing node or driver (`ENOENT`, `ENODEV`, `ENXIO`), a
//! missing permission (`EACCES`) and a device cgroup (`EPERM`). `/proc/misc` lists a loaded driver
//! even in a container that hides the node. The caller supplies the architecture-specific cause of
//! a missing driver. An opened file is KVM's only if `KVM_GET_API_VERSION` returns 12
//! (`Documentation/virt/kvm/api.rst`, 4.1).

use std::{ffi::CString, fs, io, os::unix::fs::MetadataExt};

use kvm_ioctls::Kvm;

use super::KvmError;

const KVM_DEVICE: &str = "/dev/kvm";

/// KVM API version of Linux 2.6.22 and later.
const API_VERSION: i32 = 12;

/// Major number of the misc devices.
const MISC_MAJOR: u32 = 10;

/// Opens `/dev/kvm` and checks the API version. `explain_missing_driver` is called when no KVM
/// driver is loaded.
pub fn open(explain_missing_driver: fn() -> String) -> Result<Kvm, KvmError> {
    open_at(KVM_DEVICE, explain_missing_driver).map_err(KvmError::Open)
}

fn open_at(path: &str, explain_missing_driver: fn() -> String) -> Result<Kvm, String> {
    let kvm = CString::new(path)
        .map_err(io::Error::from)
        .and_then(|path| Ok(Kvm::new_with_path(path)?))
        .map_err(|error| explain_open_error(&error, explain_missing_driver))?;
    match kvm.get_api_version() {
        API_VERSION => Ok(kvm),
        ..0 => Err(format!(
            "{KVM_DEVICE} exists and is not KVM ({}): remove it and create the node again (sudo \
             modprobe kvm, or sudo mknod {KVM_DEVICE} c 10 232)",
            io::Error::last_os_error()
        )),
        other => Err(wrong_version(other)),
    }
}

fn wrong_version(version: i32) -> String {
    format!(
        "{KVM_DEVICE} has KVM API version {version}; version {API_VERSION} is required: boot \
         another kernel"
    )
}

/// Describes the cause and remedy of an error from opening `/dev/kvm`.
fn explain_open_error(error: &io::Error, explain_missing_driver: fn() -> String) -> String {
    match error.raw_os_error() {
        Some(libc::EPERM) => format!(
            "a device cgroup forbids access to {KVM_DEVICE} for every user: pass the device to \
             the container or service (docker run --device {KVM_DEVICE}, systemd's \
             DeviceAllow={KVM_DEVICE} rw)"
        ),
        Some(libc::EACCES) => {
            let groups = fs::read_to_string("/etc/group").unwrap_or_default();
            let (group, mode) =
                fs::metadata(KVM_DEVICE).map_or((0, 0), |file| (file.gid(), file.mode()));
            let hint = match rustix::process::geteuid().is_root() {
                true => ROOT_DENIED_HINT.to_owned(),
                false => denied_hint(group, mode, &groups),
            };
            format!("this user may not open {KVM_DEVICE}: {hint}")
        }
        Some(code @ (libc::ENOENT | libc::ENODEV | libc::ENXIO)) => {
            let misc = fs::read_to_string("/proc/misc").unwrap_or_default();
            let hint = match driver_minor(&misc) {
                Some(minor) => node_hint(code == libc::ENOENT, minor),
                None => explain_missing_driver(),
            };
            format!("{KVM_DEVICE} is not available: {hint}")
        }
        _ => format!("{KVM_DEVICE} cannot be opened ({error})"),
    }
}

/// Returns the minor number of the KVM driver, if the text of `/proc/misc` lists it.
fn driver_minor(misc: &str) -> Option<u32> {
    misc.lines().find_map(|line| {
        let (minor, name) = line.trim().split_once(' ')?;
        (name == "kvm").then(|| minor.parse().ok())?
    })
}

/// Returns the hint for a loaded driver whose node is missing or belongs to another driver.
fn node_hint(missing: bool, minor: u32) -> String {
    let node = if missing { "the node is missing" } else { "the node belongs to another driver" };
    format!(
        "the kernel has KVM, but {node}: in a container, pass the device in (docker run --device \
         {KVM_DEVICE}); elsewhere create it (sudo rm -f {KVM_DEVICE}; sudo mknod {KVM_DEVICE} c \
         {MISC_MAJOR} {minor})"
    )
}

/// Hint for root without access.
const ROOT_DENIED_HINT: &str = "the file system is mounted nodev, or a security module \
                                (SELinux, AppArmor) forbids access; read the kernel's log (sudo \
                                dmesg)";

/// Returns the hint for a user without access. `groups` is the text of `/etc/group`.
fn denied_hint(group: u32, mode: u32, groups: &str) -> String {
    const GROUP_READ_WRITE: u32 = 0o060;
    if group == 0 || mode & GROUP_READ_WRITE != GROUP_READ_WRITE {
        return "only root may: run this as root, or allow a group \
                (chgrp kvm /dev/kvm && chmod 660 /dev/kvm, as root)"
            .to_owned();
    }
    let name = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(group)).then_some(name)
    });
    match name {
        Some(name) => format!(
            "group {name} has access: join it (sudo usermod --append --groups {name} \
             \"$USER\") and log in again"
        ),
        None => format!(
            "group {group} has access but no name: create it (sudo groupadd --gid {group} kvm), \
             join it and log in again"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUPS: &str = "root:x:0:\nkvm:x:104:someone\n";
    const MISC_WITH_KVM: &str = "232 kvm\n 61 nvram\n";

    #[test]
    fn denied_hint_names_the_group_or_root() {
        for (group, mode, hint) in [
            (104, 0o020_660, "--groups kvm "),
            (105, 0o020_660, "group 105"),
            (0, 0o020_660, "only root may"),
            (104, 0o020_600, "only root may"),
        ] {
            let actual = denied_hint(group, mode, GROUPS);
            assert!(actual.contains(hint), "{actual}");
        }
    }

    #[test]
    fn a_loaded_driver_is_found_without_its_node() {
        assert_eq!(driver_minor(MISC_WITH_KVM), Some(232));
        assert_eq!(driver_minor(" 61 nvram\n100 vhost-kvm\n"), None);
        assert!(node_hint(true, 232).contains("mknod /dev/kvm c 10 232"));
        assert!(node_hint(true, 232).contains("is missing"));
        assert!(node_hint(false, 232).contains("another driver"));
    }

    #[test]
    fn each_open_error_has_its_cause() {
        for (code, cause) in [
            (libc::ENOENT, "/dev/kvm is not available"),
            (libc::ENODEV, "/dev/kvm is not available"),
            (libc::ENXIO, "/dev/kvm is not available"),
            (libc::EACCES, "may not open /dev/kvm"),
            (libc::EPERM, "--device /dev/kvm"),
            (libc::EMFILE, "cannot be opened"),
        ] {
            let error = explain_open_error(&io::Error::from_raw_os_error(code), String::new);
            assert!(error.contains(cause), "{code}: {error}");
        }
    }

    #[test]
    fn another_device_a_missing_node_and_another_version_are_refused() {
        let other = open_at("/dev/null", String::new).unwrap_err();
        let missing = open_at("/nonexistent/kvm", String::new).unwrap_err();
        let version = wrong_version(11);

        assert!(other.contains("is not KVM"), "{other}");
        assert!(missing.contains("is not available"), "{missing}");
        assert!(version.contains("version 11") && version.contains("version 12"), "{version}");
    }
}
