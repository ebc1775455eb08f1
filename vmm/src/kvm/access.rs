// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Why `/dev/kvm` cannot be opened, and what to do about it.

use std::{fs, io, os::unix::fs::MetadataExt};

use thiserror::Error;

const PATH: &str = "/dev/kvm";

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
    /// Another reason, which the kernel tells.
    #[error("{PATH} cannot be opened")]
    Other(#[source] io::Error),
}

/// What an error of opening `/dev/kvm` comes from; `missing` says why there may be none.
pub fn explain(error: io::Error, missing: impl FnOnce() -> String) -> AccessError {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => AccessError::Missing { hint: missing() },
        Some(libc::EACCES | libc::EPERM) => {
            let groups = fs::read_to_string("/etc/group").unwrap_or_default();
            let (group, mode) = fs::metadata(PATH).map_or((0, 0), |file| (file.gid(), file.mode()));
            AccessError::Denied {
                hint: denied(group, mode, &groups),
            }
        }
        _ => AccessError::Other(error),
    }
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
    fn a_missing_device_and_a_denied_one_are_told_apart() {
        let hint = || "no module".to_owned();
        let error = |code| explain(io::Error::from_raw_os_error(code), hint);

        assert!(matches!(error(libc::ENOENT), AccessError::Missing { .. }));
        assert!(matches!(error(libc::EACCES), AccessError::Denied { .. }));
        assert!(matches!(error(libc::EMFILE), AccessError::Other(_)));
        assert!(error(libc::ENODEV).to_string().ends_with("no module"));
    }
}
