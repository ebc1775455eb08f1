// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule compare` as a program: exit codes, and what goes to which output.

#![allow(clippy::unwrap_used)] // A test may panic; clippy knows only #[test] functions for tests.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// A log of the kernel's test with these times, in nanoseconds.
fn log(folder: &Path, name: &str, times: [u64; 3]) -> PathBuf {
    let path = folder.join(name);
    let [create, update, rebuild] = times;
    let text = format!(
        "Testing guest mode: PA-bits:48,  VA-bits:48,  4K pages\n\
         Testing memory backing src type: anonymous\n\
         Testing memory size(aligned): 0x4000000\n\
         Number of testing vCPUs: 4\n\
         KVM_CREATE_MAPPINGS: total execution time: 0.{create:09}s\n\n\
         KVM_UPDATE_MAPPINGS: total execution time: 0.{update:09}s\n\n\
         KVM_ADJUST_MAPPINGS: total execution time: 0.{rebuild:09}s\n\n"
    );
    fs::write(&path, text).unwrap();
    path
}

fn compare(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_granule"));
    command.arg("compare").args(arguments).output().unwrap()
}

#[test]
fn faster_is_0_slower_is_1_and_the_least_effect_decides() {
    let folder = tempfile::tempdir().unwrap();
    let before = log(folder.path(), "before", [1000, 2000, 3000]);
    let after = log(folder.path(), "after", [500, 2100, 3000]);
    let (before, after) = (before.to_str().unwrap(), after.to_str().unwrap());

    let slower = compare(&[before, after]);
    let tolerated = compare(&[before, after, "--min-effect", "6%"]);

    assert_eq!(slower.status.code(), Some(1));
    assert_eq!(tolerated.status.code(), Some(0));
    let text = String::from_utf8(slower.stdout).unwrap();
    assert!(text.contains("create") && text.contains("0.500"), "{text}");
    assert!(slower.stderr.is_empty());
}

#[test]
fn every_format_is_printed() {
    let folder = tempfile::tempdir().unwrap();
    let log = log(folder.path(), "log", [1000, 2000, 3000]);
    let log = log.to_str().unwrap();

    let markdown = compare(&[log, log, "--format", "markdown"]).stdout;
    let json = compare(&[log, log, "--format", "json"]).stdout;

    assert!(
        String::from_utf8(markdown)
            .unwrap()
            .contains("| **create** |")
    );
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["schema"], "granule.comparison/1");
    assert_eq!(json["configurations"][0]["phases"][0]["time"]["ratio"], 1.0);
}

#[test]
fn what_cannot_be_compared_is_2_and_says_so_on_standard_error() {
    let folder = tempfile::tempdir().unwrap();
    let whole = log(folder.path(), "whole", [1, 2, 3]);
    let whole = whole.to_str().unwrap();
    let foreign = folder.path().join("foreign");
    fs::write(&foreign, "hello\n").unwrap();
    let absent = folder.path().join("absent");
    for side in [foreign.as_path(), &absent, folder.path()] {
        let output = compare(&[whole, side.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(2), "{}", side.display());
        assert!(output.stdout.is_empty());
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.starts_with("granule: "), "{text}");
        assert!(text.contains(side.to_str().unwrap()), "{text}");
    }
}
