// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The emulator that can be observed: QEMU whose plugins read registers and memory.
//!
//! Debian 12 has QEMU 7.2, whose plugins cannot. Its backports have a newer one, which is unpacked
//! to the cache and uses the libraries of the installed one:
//!
//! ```text
//! CACHE/tools/qemu-VERSION/usr/bin/qemu-system-aarch64
//! ```

use std::path::{Path, PathBuf};

use crate::{
    command::Command,
    error::LabError,
    host::emulator,
    kernel::{
        lock_cache,
        source_package::{Apt, download_packages, newest_package},
    },
    shell::{Shell, partial_path, sorted_entries},
};

/// Oldest version of QEMU with the functions that the trace of the plugin needs.
const OLDEST_MAJOR: u32 = 10;

const PACKAGES: [&str; 3] = ["qemu-system-arm", "qemu-system-common", "qemu-system-data"];

/// Path of the program in its packages.
const PROGRAM: &str = "usr/bin/qemu-system-aarch64";

const REMEDY: &str = "set --qemu to QEMU 10 or newer";

/// Returns `qemu` if it can be observed, or else a newer one of the cache, which is downloaded if
/// necessary.
///
/// # Errors
/// There is no such QEMU, and this machine cannot download it from Debian's backports.
pub fn find_observing_emulator(
    shell: Shell,
    cache: &Path,
    qemu: &Path,
) -> Result<PathBuf, LabError> {
    let version = emulator::version(qemu);
    if version.is_ok_and(|version| major_version(&version) >= Some(OLDEST_MAJOR)) {
        return Ok(qemu.to_owned());
    }
    let tools = cache.join("tools");
    if let Some(program) = newest_unpacked(&tools) {
        return Ok(program);
    }
    // Another run may have downloaded it while this one waited.
    let _lock = lock_cache(shell, cache)?;
    match newest_unpacked(&tools) {
        Some(program) => Ok(program),
        None => download(shell, cache, &tools),
    }
}

/// Returns the first number of `QEMU emulator version 10.0.2 (Debian …)`.
fn major_version(text: &str) -> Option<u32> {
    let (_, version) = text.split_once("version ")?;
    version.split('.').next()?.parse().ok()
}

/// Returns the program of the newest version that is unpacked.
fn newest_unpacked(tools: &Path) -> Option<PathBuf> {
    let versions = sorted_entries(tools).into_iter().filter(|name| !name.ends_with(".partial"));
    let versions = versions.filter_map(|name| {
        let major = name.strip_prefix("qemu-")?.split('.').next()?.parse::<u32>().ok()?;
        Some((major, tools.join(name).join(PROGRAM)))
    });
    versions.filter(|(_, program)| program.is_file()).max().map(|(_, program)| program)
}

/// Downloads the packages from the backports of this machine's release, and unpacks them.
fn download(shell: Shell, cache: &Path, tools: &Path) -> Result<PathBuf, LabError> {
    let codename = Apt::default().codename().unwrap_or_default();
    let suite = format!("{codename}-backports");
    let incoming = download_packages(shell, cache, &suite, &PACKAGES, REMEDY)?;
    let packages = PACKAGES.map(|name| newest_package(&incoming, name));
    let version = packages[0].as_deref().and_then(version_of_package);
    let root = tools.join(format!("qemu-{}", version.as_deref().unwrap_or("VERSION")));
    let partial = partial_path(&root);
    shell.remove_dir(&partial)?;
    shell.create_dir(&partial)?;
    for (name, package) in PACKAGES.iter().zip(packages) {
        let package = package.unwrap_or_else(|| incoming.join(format!("{name}_VERSION.deb")));
        let extract = Command::new(format!("unpacking {name}"), "dpkg-deb");
        shell.run(&extract.arg("--extract").arg(&package).arg(&partial))?;
    }
    shell.rename(&partial, &root)?;
    shell.remove_dir(&incoming)?;
    Ok(root.join(PROGRAM))
}

/// Returns the upstream version of a package file: apt writes the colon behind the epoch as `%3a`.
fn version_of_package(package: &Path) -> Option<String> {
    let name = package.file_name()?.to_str()?;
    let version = name.split('_').nth(1)?;
    let version = version.split_once("%3a").map_or(version, |(_, version)| version);
    version.split(['+', '-']).next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn versions_are_read_from_the_program_and_the_package() {
        let text = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2+deb13u1~bpo12+1)";
        assert_eq!(major_version(text), Some(10));
        assert_eq!(major_version("QEMU"), None);

        let file = "/x/qemu-system-arm_1%3a10.0.2+ds-2+deb13u1~bpo12+1_amd64.deb";
        assert_eq!(version_of_package(Path::new(file)).as_deref(), Some("10.0.2"));
        assert_eq!(version_of_package(Path::new("/x/q_9.2-1_all.deb")).as_deref(), Some("9.2"));
    }

    #[test]
    fn the_newest_unpacked_version_is_used() {
        let cache = tempfile::tempdir().unwrap();
        let program = |version: &str| cache.path().join("tools").join(version).join(PROGRAM);
        for version in ["qemu-10.0.2", "qemu-9.2.0", "qemu-11.0.0.partial", "bin"] {
            fs::create_dir_all(program(version).parent().unwrap()).unwrap();
        }
        for version in ["qemu-10.0.2", "qemu-9.2.0", "qemu-11.0.0.partial"] {
            fs::write(program(version), "").unwrap();
        }

        let found = find_observing_emulator(Shell::silent(), cache.path(), Path::new("/no/qemu"));

        assert_eq!(found.unwrap(), program("qemu-10.0.2"));
    }

    #[test]
    #[ignore = "downloads packages"]
    fn debian_has_an_emulator_that_can_be_observed() {
        let cache = tempfile::tempdir().unwrap();
        if Apt::default().codename().is_none() {
            return granule_types::testing::skip("this machine does not run Debian");
        }

        let program =
            find_observing_emulator(Shell::new(false), cache.path(), Path::new("/no/qemu"))
                .unwrap();

        let version = emulator::version(&program).unwrap();
        assert!(major_version(&version) >= Some(OLDEST_MAJOR), "{version}");
        assert_eq!(newest_unpacked(&cache.path().join("tools")), Some(program));
    }
}
