// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Refused arguments and the printed build of `granule lab host-kernel --dry-run`.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const CONFIG: &str = "CONFIG_ARM64=y\nCONFIG_KVM=y\n";

fn host_kernel(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_granule"))
        .args(["lab", "host-kernel", "--dry-run", "--root", ROOT])
        .args(arguments)
        .output()
        .unwrap()
}

fn write_file(path: &Path, text: &str) -> String {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Creates a kernel tree with the files that the command reads; returns its path.
fn create_tree(directory: &Path, patch_level: u32) -> String {
    write_file(&directory.join("Makefile"), &format!("VERSION = 5\nPATCHLEVEL = {patch_level}\n"));
    fs::create_dir_all(directory.join("arch/arm64")).unwrap();
    directory.to_str().unwrap().to_owned()
}

/// Asserts that the arguments are refused with this message; returns all of standard error.
fn assert_refused(arguments: &[&str], message: &str) -> String {
    let output = host_kernel(arguments);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
    assert!(error.contains(message), "{error}");
    error
}

#[test]
fn unusable_inputs_are_refused_in_one_line() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let config = write_file(&path("config"), CONFIG);
    let foreign = write_file(&path("x86"), "CONFIG_X86_64=y\nCONFIG_KVM=m\n");
    let no_kvm = write_file(&path("no-kvm"), "CONFIG_ARM64=y\n");
    let other = create_tree(&path("5.11"), 11);
    let built = create_tree(&path("built"), 10);
    write_file(&path("built/vmlinux"), "");
    let empty = directory.path().to_str().unwrap();
    for (arguments, message) in [
        (&["--series", "none"][..], "unknown series 'none' for Linux 5.10; expected one of: "),
        (&["--base", "4.9"], "unknown series 'stage2-fault-path' for Linux 4.9"),
        (&["--config", &foreign], "is not an arm64 configuration"),
        (&["--config", &no_kvm], "has no CONFIG_KVM=y"),
        (&["--config", &config, "--source", empty], "is not a Linux source"),
        (&["--config", &config, "--source", &other], "is Linux 5.11, --base is 5.10"),
        (
            &["--config", &config, "--source", &built],
            "contains build results: set a clean tree with --source",
        ),
    ] {
        let error = assert_refused(arguments, message);
        assert!(error.starts_with("granule: "), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    assert_refused(&["--jobs", "0"], "invalid value '0' for '--jobs <N>'");
    assert_refused(&["--config", "/nowhere"], "cannot read the configuration /nowhere");
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "this machine has an arm64 configuration")]
fn another_architecture_requires_a_configuration() {
    assert_refused(&[], "set the configuration of an arm64 server with --config");
}

#[test]
fn both_kernels_differ_only_in_the_series() {
    let directory = tempfile::tempdir().unwrap();
    let config = write_file(&directory.path().join("config"), CONFIG);
    let source = create_tree(&directory.path().join("linux"), 10);
    let out = directory.path().join("out");
    let common = ["--config", &config, "--source", &source, "--out", out.to_str().unwrap()];
    let planned = |more: &[&str]| {
        let output = host_kernel(&[&common, more].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };

    let both = planned(&[]);
    let plain = planned(&["--only", "plain", "--jobs", "3"]);
    let series = planned(&["--only", "series"]);

    let count = |text: &str, words: &str| text.lines().filter(|line| line.contains(words)).count();
    let series_directory = Path::new(ROOT).join("stage2/linux/5.10/stage2-fault-path");
    let list = fs::read_to_string(series_directory.join("series")).unwrap();
    let patches = list.lines().filter(|line| line.ends_with(".patch")).count();
    assert!(patches > 0);
    assert_eq!(count(&both, "bindeb-pkg"), 2);
    assert_eq!(count(&both, "apply --cached"), patches);
    assert_eq!(
        (count(&plain, "apply --cached"), count(&plain, "-j3 bindeb-pkg")),
        (0, 1),
        "{plain}"
    );
    assert_eq!(count(&series, "apply --cached"), patches);
    // A build of both kernels opens the source and creates the output directory once.
    let (_, series) = series.split_once(&format!("mkdir -p {}\n", out.display())).unwrap();
    let jobs = both.split_whitespace().find(|word| word.starts_with("-j")).unwrap();
    assert_eq!(both, plain.replace("-j3", jobs) + series);
    assert!(!out.exists(), "a dry run creates nothing");
}
