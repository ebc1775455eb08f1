// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `guest-tests/lab/guest/build-kernel`, the part of `scripts/guest` that builds a guest's kernel, up to
//! the build itself, with a cache that contains a guest and a small package of a kernel source.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::{fs, path::PathBuf, process::Command};

use tempfile::TempDir;

const TOP: &str = env!("CARGO_MANIFEST_DIR");

/// Cache with a guest of this version of Debian's kernel.
struct Cache {
    directory: TempDir,
    version: &'static str,
}

impl Cache {
    fn new(version: &'static str) -> Self {
        let cache = Self { directory: tempfile::tempdir().unwrap(), version };
        fs::create_dir_all(cache.guest()).unwrap();
        fs::write(cache.guest().join("kernel"), format!("{version}-arm64 {version}\n")).unwrap();
        fs::write(cache.guest().join("config"), "CONFIG_ARM64=y\n").unwrap();
        cache
    }

    fn guest(&self) -> PathBuf {
        self.directory.path().join("guest/bookworm-recipe")
    }

    /// Adds the package of the kernel source, a tree without files.
    fn add_source(&self) {
        let base = self.version.split('.').take(2).collect::<Vec<_>>().join(".");
        let script = format!(
            "set -e; mkdir -p packages package/DEBIAN package/usr/src linux-source-{base}; \
             tar -cJf package/usr/src/linux-source-{base}.tar.xz linux-source-{base}; \
             printf 'Package: linux-source-{base}\\nVersion: {version}\\nArchitecture: all\\n\
             Maintainer: Test <test@example.org>\\nDescription: test\\n' >package/DEBIAN/control; \
             dpkg-deb -b package packages/linux-source-{base}_{version}_all.deb",
            version = self.version
        );
        let mut build = Command::new("bash");
        build.args(["-c", &script]).current_dir(&self.directory);
        assert!(build.output().unwrap().status.success());
    }

    /// Builds the kernel with series. Returns the exit code, and the output with the errors.
    fn build(&self, series: &[&str]) -> (Option<i32>, String) {
        let output = Command::new(format!("{TOP}/guest-tests/lab/guest/build-kernel"))
            .args(series)
            .env("guest", self.guest())
            .env("apt", self.directory.path().join("apt"))
            .env("again", "no")
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&text).into_owned())
    }
}

/// Returns whether the script finds its programs; if not, skips the test.
fn has_programs() -> bool {
    let compiler = if cfg!(target_arch = "aarch64") { "gcc" } else { "aarch64-linux-gnu-gcc" };
    for program in [compiler, "dpkg-deb", "patch", "xz", "flock"] {
        if Command::new(program).arg("--version").output().is_err() {
            granule_types::testing::skip(format!("{program} is missing"));
            return false;
        }
    }
    true
}

#[test]
fn a_series_of_another_version_is_refused() {
    let cache = Cache::new("6.12.117-1");

    let (code, text) = cache.build(&["linux-map", "linear-map"]);

    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("--series linux-map: Linux 6.12, the kernel of this guest"), "{text}");
}

#[test]
fn a_series_that_does_not_apply_names_the_patch() {
    if !has_programs() {
        return;
    }
    let cache = Cache::new("6.1.192-2");
    cache.add_source();

    let (code, text) = cache.build(&["linear-map"]);

    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("linear-map/0001-arm64-mm-"), "{text}");
    assert!(text.contains("does not apply to 6.1.192-2: see "), "{text}");
    assert!(!cache.directory.path().join("guest/kernel-build").exists(), "the tree is left");
}

#[test]
fn a_source_that_cannot_be_fetched_names_the_package() {
    if !has_programs() {
        return;
    }
    let cache = Cache::new("6.1.1-1");

    let (code, text) = cache.build(&[]);

    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("linux-source-6.1 6.1.1-1, the source of the guest's kernel"), "{text}");
    assert!(text.contains("scripts/guest --again"), "{text}");
}

#[test]
fn a_built_kernel_is_not_built_again() {
    if !has_programs() {
        return;
    }
    let cache = Cache::new("6.1.192-2");
    cache.add_source();
    // A failed build leaves the name of its directory.
    cache.build(&["linear-map", "zap-batch"]);
    let entries = fs::read_dir(cache.guest().parent().unwrap()).unwrap();
    let partial = entries.map(|entry| entry.unwrap().path());
    let partial = partial.filter(|path| path.extension().is_some_and(|end| end == "partial"));
    let partial: Vec<PathBuf> = partial.collect();
    let made = partial[0].with_extension("");
    fs::rename(&partial[0], &made).unwrap();
    fs::write(made.join("vmlinuz"), "").unwrap();

    let (code, text) = cache.build(&["linear-map", "zap-batch"]);

    assert_eq!((code, text), (Some(0), format!("{}\n", made.display())));
    assert!(made.display().to_string().contains("-linux-6.1.192-2-linear-map+zap-batch-"));
}
