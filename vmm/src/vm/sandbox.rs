// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Confinement of the process while it runs a guest.
//!
//! A guest that exploits a device runs code in this process. Two mechanisms limit that code:
//!
//! * Landlock limits file access to the folders of `/proc` and `/sys` that report memory and
//!   counters. All other files are [open](super::open_files) already. Files in the control socket's
//!   folder can be removed, because the socket is removed at the end, and files of snapshots are
//!   written to their directory.
//! * seccomp limits each kind of thread to the system calls that it uses. Programs cannot be
//!   executed, and network sockets cannot be created.
//!
//! If the host kernel lacks one of them, the VM runs without it and logs a warning.

use std::{io, path::Path};

use landlock::{
    ABI, Access, AccessFs, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus,
};

use super::{
    outcome::{VmError, failed},
    stats::STAT_REFRESH,
};

/// Restricts the process to reading the files that report memory and counters, to removing files
/// from `socket_folder`, and to files in `snapshot_folder`.
pub fn restrict_file_access(
    socket_folder: Option<&Path>,
    snapshot_folder: Option<&Path>,
) -> Result<(), VmError> {
    let refused = || failed("Landlock refuses the rules; --sandbox off runs without it");
    let abi = ABI::V3;
    let (read, all) = (AccessFs::from_read(abi), AccessFs::from_all(abi));
    let rules = Ruleset::default().handle_access(all);
    let mut rules = rules.and_then(Ruleset::create).map_err(refused())?;
    for (path, access) in [
        ("/dev/urandom", read),
        ("/proc", read),
        (STAT_REFRESH, all & AccessFs::from_file(abi)),
        ("/sys/kernel", read),
        ("/sys/devices/system", read),
    ] {
        // A missing file needs no rule.
        if let Ok(file) = PathFd::new(path) {
            rules = rules.add_rule(PathBeneath::new(file, access)).map_err(refused())?;
        }
    }
    let snapshots = AccessFs::ReadDir
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::RemoveFile;
    let folders = [(socket_folder, AccessFs::RemoveFile.into()), (snapshot_folder, snapshots)];
    for (path, access) in folders {
        let Some(path) = path else { continue };
        let object = format!("{} cannot be opened for a Landlock rule", path.display());
        let folder =
            PathFd::new(path).map_err(|_| io::Error::last_os_error()).map_err(failed(object))?;
        let rule = PathBeneath::new(folder, access);
        rules = rules.add_rule(rule).map_err(refused())?;
    }
    let status = rules.restrict_self().map_err(refused())?;
    if status.ruleset == RulesetStatus::NotEnforced {
        log::warn!("this host's kernel has no Landlock: the process can open any file");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use landlock::{CompatLevel, Compatible as _};

    use super::*;
    use crate::{
        devices::virtio::testing::child_test_command,
        vm::snapshot::{SnapshotDirectory, testing::small_state},
    };

    const CHILD_VARIABLE: &str = "GRANULE_TEST_LANDLOCK";

    fn has_landlock() -> bool {
        let required = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
        required.handle_access(AccessFs::from_all(ABI::V1)).is_ok()
    }

    /// Applies the rules in a child process, because they cannot be removed.
    #[test]
    fn only_the_socket_and_snapshots_can_be_changed() {
        if let Some(folder) = std::env::var_os(CHILD_VARIABLE) {
            let folder = PathBuf::from(folder);
            let saved = folder.join("saved");
            let snapshots = SnapshotDirectory::open(&saved).unwrap();
            restrict_file_access(Some(&folder), Some(&saved)).unwrap();
            for _ in 0..2 {
                let (name, file) = snapshots.create_memory().unwrap();
                let committed = snapshots.commit(&file, &small_state(name)).unwrap();
                snapshots.remove_earlier(&committed);
            }
            let proc = fs::read("/proc/self/status").map(drop);
            let removed = fs::remove_file(folder.join("socket"));
            let created = fs::write(folder.join("other"), "").map_err(|error| error.kind());
            let other = fs::read("/etc/hostname").map(drop).map_err(|error| error.kind());
            println!("RESULT {proc:?} {removed:?} {created:?} {other:?}");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        fs::write(&socket, "").unwrap();
        let test = "vm::sandbox::tests::only_the_socket_and_snapshots_can_be_changed";
        let output = child_test_command(test).env(CHILD_VARIABLE, folder.path()).output().unwrap();

        let output_text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{output_text}");
        assert!(!socket.exists());
        // The second snapshot has replaced the first.
        let saved = fs::read_dir(folder.path().join("saved")).unwrap();
        let saved = saved.map(|file| file.unwrap().file_name().into_string().unwrap());
        assert_eq!(saved.filter(|name| name.starts_with("memory-")).count(), 1);
        if !has_landlock() && output_text.contains("RESULT Ok(()) Ok(()) Ok(()) Ok(())") {
            return granule_types::testing::skip("this host has no Landlock");
        }
        let denied = "Err(PermissionDenied)";
        let expected = format!("RESULT Ok(()) Ok(()) {denied} {denied}");
        assert!(output_text.contains(&expected), "{output_text}");
    }
}
