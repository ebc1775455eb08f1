// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Why `/dev/kvm` cannot be used, and what to do about it.
//!
//! The errors of `open(2)` say which of three things lacks: the node or the driver behind it
//! (`ENOENT`, `ENODEV`, `ENXIO`), the permission (`EACCES`), or a device cgroup's leave (`EPERM`).
//! Whether the driver runs stands in `/proc/misc`, whatever a container shows of `/dev`; why it does
//! not run is the architecture's to tell. What opens need not be KVM, nor one that we can talk to:
//! `KVM_GET_API_VERSION` has been 12 since Linux 2.6.22 and is to be checked (the kernel's
//! `Documentation/virt/kvm/api.rst`, 4.1).

use std::{ffi::CStr, fs, io, os::unix::fs::MetadataExt};

use kvm_ioctls::Kvm;
use thiserror::Error;

use crate::arch;

const PATH: &str = "/dev/kvm";
const DEVICE: &CStr = c"/dev/kvm";

/// The interface's version.
const VERSION: i32 = 12;

/// The major number of all devices in `/proc/misc`.
const MISC: u32 = 10;

/// `/dev/kvm` cannot be used.
#[derive(Debug, Error)]
pub enum AccessError {
    /// It is not there, or nothing answers behind it.
    #[error("there is no KVM behind {PATH}: {hint}")]
    Missing {
        /// What is missing and how to get it.
        hint: String,
    },
    /// It is there, but not for this user.
    #[error("this user may not open {PATH}: {hint}")]
    Denied {
        /// Which group to join, or what else to do.
        hint: String,
    },
    /// It is there, but not for this container or service.
    #[error(
        "a device cgroup keeps {PATH} from this process, whoever runs it: let the container or \
         service have it (docker run --device {PATH}, systemd's DeviceAllow={PATH} rw)"
    )]
    Cgroup,
    /// What is there is something else.
    #[error(
        "{PATH} is there and is no KVM ({0}): remove it, and make the node anew (sudo modprobe kvm, \
         or sudo mknod {PATH} c 10 232)"
    )]
    Other(io::Error),
    /// It is a KVM of another interface.
    #[error(
        "{PATH} speaks version {0} of KVM's interface, and version {VERSION} is the one to be \
         used: run another kernel"
    )]
    Version(i32),
    /// Another reason, which the kernel tells.
    #[error("{PATH} cannot be opened ({0})")]
    Failed(io::Error),
}

/// Opens KVM and makes sure that it is one.
///
/// # Errors
/// It cannot be used; the error says why and what to do.
pub fn open() -> Result<Kvm, AccessError> {
    open_at(DEVICE)
}

fn open_at(path: &CStr) -> Result<Kvm, AccessError> {
    let kvm = Kvm::new_with_path(path).map_err(|error| explain(error.into()))?;
    match kvm.get_api_version() {
        VERSION => Ok(kvm),
        ..0 => Err(AccessError::Other(io::Error::last_os_error())),
        other => Err(AccessError::Version(other)),
    }
}

/// What an error of opening `/dev/kvm` comes from.
fn explain(error: io::Error) -> AccessError {
    match error.raw_os_error() {
        Some(libc::EPERM) => AccessError::Cgroup,
        Some(libc::EACCES) => {
            let groups = fs::read_to_string("/etc/group").unwrap_or_default();
            let (group, mode) = fs::metadata(PATH).map_or((0, 0), |file| (file.gid(), file.mode()));
            AccessError::Denied {
                hint: match rustix::process::geteuid().is_root() {
                    true => denied_to_root().to_owned(),
                    false => denied(group, mode, &groups),
                },
            }
        }
        Some(code @ (libc::ENOENT | libc::ENODEV | libc::ENXIO)) => {
            let misc = fs::read_to_string("/proc/misc").unwrap_or_default();
            let hint = match driver(&misc) {
                Some(minor) => no_node(code == libc::ENOENT, minor),
                None => arch::host::why_no_kvm(),
            };
            AccessError::Missing { hint }
        }
        _ => AccessError::Failed(error),
    }
}

/// The minor number of KVM's driver, if it runs, by the text of `/proc/misc`.
fn driver(misc: &str) -> Option<u32> {
    misc.lines().find_map(|line| {
        let (minor, name) = line.trim().split_once(' ')?;
        (name == "kvm").then(|| minor.parse().ok())?
    })
}

/// What to do where the driver runs and the node is missing, or leads elsewhere.
fn no_node(missing: bool, minor: u32) -> String {
    let node = if missing {
        "the node is missing"
    } else {
        "the node is another's"
    };
    format!(
        "the kernel has it, {node}: in a container, have it passed in (docker run --device {PATH}); \
         elsewhere make it (sudo rm -f {PATH}; sudo mknod {PATH} c {MISC} {minor})"
    )
}

/// What to do where root is denied what is root's.
const fn denied_to_root() -> &'static str {
    "not even root may, so it is not its mode: its file system is mounted nodev, or a security \
     module (SELinux, AppArmor) forbids it; the kernel's log says so (sudo dmesg)"
}

/// What to do where access is denied, by the device's group and mode and by `/etc/group`.
fn denied(group: u32, mode: u32, groups: &str) -> String {
    const GROUP_MAY: u32 = 0o060;
    if group == 0 || mode & GROUP_MAY != GROUP_MAY {
        return "only root may: run this as root, or give a group access \
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
            "its group {name} may: join it (sudo usermod --append --groups {name} \"$USER\") and log \
             in again"
        ),
        None => format!("its group {group} may, and this user is not in it"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUPS: &str = "root:x:0:\nkvm:x:104:someone\n";
    const MISC_WITH_KVM: &str = "232 kvm\n 61 nvram\n";

    #[test]
    fn the_group_to_join_is_named() {
        assert!(denied(104, 0o020_660, GROUPS).contains("--groups kvm "));
        assert!(denied(105, 0o020_660, GROUPS).contains("group 105"));
    }

    #[test]
    fn where_no_group_has_access_joining_one_does_not_help() {
        for (group, mode) in [(0, 0o020_660), (104, 0o020_600)] {
            let hint = denied(group, mode, GROUPS);
            assert!(hint.starts_with("only root may"), "{hint}");
        }
    }

    #[test]
    fn a_driver_that_runs_is_known_without_its_node() {
        assert_eq!(driver(MISC_WITH_KVM), Some(232));
        assert_eq!(driver(" 61 nvram\n100 vhost-kvm\n"), None);
        assert!(no_node(true, 232).contains("mknod /dev/kvm c 10 232"));
        assert!(no_node(true, 232).contains("is missing"));
        assert!(no_node(false, 232).contains("another's"));
    }

    #[test]
    fn each_error_of_opening_has_its_cause() {
        let error = |code| explain(io::Error::from_raw_os_error(code));

        for code in [libc::ENOENT, libc::ENODEV, libc::ENXIO] {
            assert!(matches!(error(code), AccessError::Missing { .. }), "{code}");
        }
        assert!(matches!(error(libc::EACCES), AccessError::Denied { .. }));
        assert!(matches!(error(libc::EPERM), AccessError::Cgroup));
        assert!(error(libc::EPERM).to_string().contains("--device /dev/kvm"));
        assert!(matches!(error(libc::EMFILE), AccessError::Failed(_)));
    }

    #[test]
    fn what_opens_and_is_no_kvm_is_told() {
        let error = open_at(c"/dev/null").unwrap_err();

        assert!(matches!(error, AccessError::Other(_)), "{error}");
        assert!(error.to_string().contains("is no KVM"), "{error}");
    }

    #[test]
    fn what_is_not_there_is_missing() {
        let error = open_at(c"/nonexistent/kvm").unwrap_err();

        assert!(matches!(error, AccessError::Missing { .. }), "{error}");
    }

    #[test]
    fn another_version_is_told_with_the_one_wanted() {
        let text = AccessError::Version(11).to_string();

        assert!(text.contains("version 11") && text.contains("version 12"));
    }
}
