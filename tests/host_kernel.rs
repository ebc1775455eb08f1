// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `scripts/host-kernel` up to where it would build: what it refuses, and what it would do.

#![allow(clippy::unwrap_used)] // A test may panic; clippy knows only #[test] functions for tests.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

const CONFIG: &str = "CONFIG_ARM64=y\nCONFIG_KVM=y\n";

fn host_kernel(arguments: &[&str]) -> Output {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/host-kernel");
    Command::new(script)
        .arg("--dry-run")
        .args(arguments)
        .output()
        .unwrap()
}

/// A file or a tree with so much in it as the script looks at.
fn write(path: &Path, text: &str) -> String {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn tree(folder: &Path, patch_level: u32) -> String {
    write(
        &folder.join("Makefile"),
        &format!("VERSION = 5\nPATCHLEVEL = {patch_level}\n"),
    );
    fs::create_dir_all(folder.join("arch/arm64")).unwrap();
    folder.to_str().unwrap().to_owned()
}

#[test]
fn what_cannot_be_done_is_refused_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let config = write(&folder.path().join("config"), CONFIG);
    let foreign = write(
        &folder.path().join("x86"),
        "CONFIG_X86_64=y\nCONFIG_KVM=m\n",
    );
    let bare = write(&folder.path().join("bare"), "CONFIG_ARM64=y\n");
    let other = tree(&folder.path().join("5.11"), 11);
    let built = tree(&folder.path().join("built"), 10);
    write(&folder.path().join("built/vmlinux"), "");
    let empty = folder.path().to_str().unwrap();
    for (arguments, words) in [
        (&["--jobs", "many"][..], "--jobs takes a number, not 'many'"),
        (&["--jobs", "0"], "--jobs takes a number, not '0'"),
        (&["--jobs"], "--jobs takes a value"),
        (
            &["--only", "both"],
            "--only takes plain or series, not 'both'",
        ),
        (
            &["--everything"],
            "unknown option '--everything'; --help tells all",
        ),
        (
            &["--series", "none"],
            "there is no series 'none' for 5.10: see ",
        ),
        (
            &["--base", "4.9"],
            "there is no series 'stage2-fault-path' for 4.9",
        ),
        (
            &["--config", "/nowhere"],
            "cannot read the configuration /nowhere",
        ),
        (&["--config", &foreign], "is no arm64 configuration"),
        (&["--config", &bare], "has no KVM"),
        (
            &["--config", &config, "--source", empty],
            "is no Linux source tree",
        ),
        (
            &["--config", &config, "--source", &other],
            "is Linux 5.11, and the series is for 5.10",
        ),
        (
            &["--config", &config, "--source", &built],
            "has been built in: give a clean tree",
        ),
    ] {
        let output = host_kernel(arguments);
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {told}");
        assert!(
            told.starts_with("host-kernel: ") && told.contains(words),
            "{told}"
        );
        assert_eq!(told.lines().count(), 1, "{told}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
#[cfg_attr(
    target_arch = "aarch64",
    ignore = "an arm64 server has a configuration of its own"
)]
fn another_architecture_needs_a_configuration() {
    let output = host_kernel(&[]);
    let told = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        told.contains("name an arm64 server's configuration with --config"),
        "{told}"
    );
}

#[test]
fn both_kernels_differ_in_the_series_alone() {
    let folder = tempfile::tempdir().unwrap();
    let config = write(&folder.path().join("config"), CONFIG);
    let source = tree(&folder.path().join("linux"), 10);
    let out = folder.path().join("out");
    let common = [
        "--config",
        &config,
        "--source",
        &source,
        "--out",
        out.to_str().unwrap(),
    ];
    let planned = |more: &[&str]| {
        let output = host_kernel(&[&common, more].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };

    let both = planned(&[]);
    let plain = planned(&["--only", "plain", "--jobs", "3"]);
    let series = planned(&["--only", "series"]);

    let count = |text: &str, words: &str| text.lines().filter(|line| line.contains(words)).count();
    let list = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/stage2/linux/5.10/stage2-fault-path/series"
    );
    let list = fs::read_to_string(list).unwrap();
    let patches = list.lines().filter(|line| line.ends_with(".patch")).count();
    assert!(patches > 0);
    assert_eq!(count(&both, "bindeb-pkg"), 2);
    assert_eq!(count(&both, "--strip=1"), patches);
    assert_eq!(
        (count(&plain, "--strip=1"), count(&plain, "-j3 bindeb-pkg")),
        (0, 1),
        "{plain}"
    );
    assert_eq!(count(&series, "--strip=1"), patches);
    let (_, series) = series.split_once('\n').unwrap(); // The folder of both is made once.
    assert_eq!(both, plain.replace("-j3", &jobs_of(&both)) + series);
    assert!(!out.exists(), "a dry run makes nothing");
}

/// `-j16`, as it stands in what would be done.
fn jobs_of(text: &str) -> String {
    let jobs = text.split_whitespace().find(|word| word.starts_with("-j"));
    jobs.unwrap().to_owned()
}

#[test]
fn help_tells_every_option() {
    let output = host_kernel(&["--help"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    for option in [
        "--base",
        "--series",
        "--source",
        "--config",
        "--out",
        "--jobs",
        "--only",
        "--dry-run",
    ] {
        assert!(text.contains(option), "{option}\n{text}");
    }
}
