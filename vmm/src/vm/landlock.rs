// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Landlock rules: the files that the process can open after its start.

use std::{
    io,
    path::{Path, PathBuf},
};

use landlock::{
    ABI, Access, AccessFs, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus,
};

use super::{sandbox::SandboxError, stats::STAT_REFRESH};

/// Restricts the process to reading the files that memory and counters are read from, and to removing
/// files from `socket_folder`.
///
/// # Errors
/// Landlock refuses the rules, or the folder does not exist.
pub fn restrict_files(socket_folder: Option<&Path>) -> Result<(), SandboxError> {
    let abi = ABI::V3;
    let (read, all) = (AccessFs::from_read(abi), AccessFs::from_all(abi));
    let mut rules = Ruleset::default().handle_access(all)?.create()?;
    for (path, access) in [
        ("/dev/urandom", read),
        ("/proc", read),
        (STAT_REFRESH, all & AccessFs::from_file(abi)),
        ("/sys/kernel", read),
        ("/sys/devices/system", read),
    ] {
        // A missing file needs no rule.
        if let Ok(file) = PathFd::new(path) {
            rules = rules.add_rule(PathBeneath::new(file, access))?;
        }
    }
    if let Some(path) = socket_folder {
        let folder = PathFd::new(path).map_err(|_| SandboxError::Path {
            path: PathBuf::from(path),
            source: io::Error::last_os_error(),
        })?;
        rules = rules.add_rule(PathBeneath::new(folder, AccessFs::RemoveFile))?;
    }
    let status = rules.restrict_self()?;
    if status.ruleset == RulesetStatus::NotEnforced {
        log::warn!("this host's kernel has no Landlock: the process can open any file");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{fs, process::Command};

    use super::*;

    const CHILD: &str = "GRANULE_TEST_LANDLOCK";

    /// Runs in a child process, because the rules stay in force.
    #[test]
    fn other_files_cannot_be_opened_and_the_socket_can_be_removed() {
        if let Some(folder) = std::env::var_os(CHILD) {
            let folder = PathBuf::from(folder);
            restrict_files(Some(&folder)).unwrap();
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
        let output = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "vm::landlock::tests::other_files_cannot_be_opened_and_the_socket_can_be_removed",
            ])
            .arg("--nocapture")
            .env(CHILD, folder.path())
            .output()
            .unwrap();

        let output_text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{output_text}");
        assert!(!socket.exists());
        let has_landlock = Path::new("/sys/kernel/security/landlock").exists();
        if !has_landlock && output_text.contains("RESULT Ok(()) Ok(()) Ok(()) Ok(())") {
            return granule_types::testing::skip("this host has no Landlock");
        }
        let denied = "Err(PermissionDenied)";
        let expected = format!("RESULT Ok(()) Ok(()) {denied} {denied}");
        assert!(output_text.contains(&expected), "{output_text}");
    }
}
