// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule compare` as a program: exit codes and outputs.

#![allow(clippy::unwrap_used)] // A test may panic; clippy knows only #[test] functions for tests.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// Writes a log of the kernel's test with these times in nanoseconds.
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

/// Writes a log of several runs whose times differ a little.
fn logs(folder: &Path, name: &str, times: [u64; 3], runs: u64) -> PathBuf {
    let run = |at| log(folder, name, times.map(|ns| ns + ns / 1000 * (at * 7 % 5)));
    let runs: String = (0..runs).map(|at| fs::read_to_string(run(at)).unwrap()).collect();
    let path = folder.join(name);
    fs::write(&path, runs).unwrap();
    path
}

fn compare(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_granule"));
    command.arg("compare").args(arguments).output().unwrap()
}

#[test]
fn exit_code_is_1_for_a_regression_beyond_the_minimum_effect() {
    let folder = tempfile::tempdir().unwrap();
    let before = logs(folder.path(), "before", [100_000, 200_000, 300_000], 8);
    let after = logs(folder.path(), "after", [50_000, 210_000, 300_000], 8);
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
fn bisect_exit_code_is_125_for_an_inconclusive_result() {
    let folder = tempfile::tempdir().unwrap();
    let one = log(folder.path(), "one", [100_000, 200_000, 300_000]);
    let slow = log(folder.path(), "slow", [900_000, 200_000, 300_000]);
    let same = logs(folder.path(), "same", [100_000, 200_000, 300_000], 20);
    let path = |path: &PathBuf| path.to_str().unwrap().to_owned();
    let code = |arguments: &[&str]| compare(arguments).status.code();

    assert_eq!(code(&[&path(&one), &path(&slow)]), Some(0));
    assert_eq!(code(&["--bisect", &path(&one), &path(&slow)]), Some(125));
    assert_eq!(code(&["--bisect", &path(&same), &path(&same)]), Some(0));
    assert_eq!(code(&[&path(&one), "/nowhere"]), Some(2));
    assert_eq!(code(&["--bisect", &path(&one), "/nowhere"]), Some(128));
}

#[test]
fn a_report_is_not_written_over_an_input() {
    let folder = tempfile::tempdir().unwrap();
    let before = log(folder.path(), "before", [100_000, 200_000, 300_000]);
    let after = log(folder.path(), "after", [100_000, 200_000, 300_000]);
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&after, &link).unwrap();
    let [before, after, link] = [&before, &after, &link].map(|path| path.to_str().unwrap());
    let whole = fs::read_to_string(after).unwrap();

    let refused = compare(&[before, after, "-o", link]);
    let beside = compare(&[before, after, "-o", folder.path().join("out").to_str().unwrap()]);

    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("is an input of the comparison"));
    assert_eq!(fs::read_to_string(after).unwrap(), whole);
    assert_eq!(beside.status.code(), Some(0));
}

#[test]
fn a_file_that_is_cut_off_is_refused_as_a_whole() {
    let folder = tempfile::tempdir().unwrap();
    let whole = logs(folder.path(), "whole", [100_000, 200_000, 300_000], 3);
    let text = fs::read_to_string(&whole).unwrap();
    let cut = folder.path().join("cut");
    fs::write(&cut, &text[..text.rfind("KVM_UPDATE").unwrap()]).unwrap();
    let (whole, cut) = (whole.to_str().unwrap(), cut.to_str().unwrap());

    let refused = compare(&[whole, cut]);
    let bisected = compare(&["--bisect", cut, whole]);

    assert_eq!(refused.status.code(), Some(2));
    assert_eq!(bisected.status.code(), Some(128));
    for output in [refused, bisected] {
        assert!(output.stdout.is_empty());
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(message.contains(cut) && message.contains("line 21"), "{message}");
        assert!(message.contains("KVM_UPDATE_MAPPINGS"), "{message}");
    }
}

#[test]
fn several_files_form_one_side() {
    let folder = tempfile::tempdir().unwrap();
    let files = |name: &str, ns: u64| -> Vec<String> {
        let file = |at: u64| log(folder.path(), &format!("{name}{at}"), [ns + at * 10, 1000, 1000]);
        (0..6).map(|at| file(at).to_str().unwrap().to_owned()).collect()
    };
    let (before, after) = (files("before", 100_000), files("after", 120_000));
    let mut arguments: Vec<&str> = before.iter().map(String::as_str).collect();
    arguments.push("--");
    arguments.extend(after.iter().map(String::as_str));
    let output = folder.path().join("out.txt");

    let printed = compare(&arguments);
    arguments.splice(0..0, ["-o", output.to_str().unwrap(), "--paired"]);
    let written = compare(&arguments);

    assert_eq!(printed.status.code(), Some(1));
    let text = String::from_utf8(printed.stdout).unwrap();
    assert!(text.contains("6 runs a side"), "{text}");
    // Six pairs are too few for three phases.
    assert_eq!(written.status.code(), Some(0));
    assert!(written.stdout.is_empty());
    assert!(fs::read_to_string(&output).unwrap().contains("6 runs a side"));
    assert_eq!(compare(&arguments[3..9]).status.code(), Some(2), "no two sides");
}

#[test]
fn every_format_is_printed() {
    let folder = tempfile::tempdir().unwrap();
    let log = log(folder.path(), "log", [1000, 2000, 3000]);
    let log = log.to_str().unwrap();

    let markdown = compare(&[log, log, "--format", "markdown"]).stdout;
    let json = compare(&[log, log, "--format", "json"]).stdout;

    assert!(String::from_utf8(markdown).unwrap().contains("| **create** ? |"));
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["schema"], "granule.comparison/2");
    assert_eq!(json["configurations"][0]["phases"][0]["time"]["ratio"], 1.0);
}

#[test]
fn exit_code_is_2_with_a_message_for_an_unusable_input() {
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

/// Runs `git bisect` in a repository whose commits are results of kernels.
#[test]
fn git_bisect_finds_the_patch_that_removes_most_cache_maintenance() {
    // The medians of DC CIVAC from base to patch 7, as in the README of the 5.10 series.
    let counts = [
        40_371_808, 40_373_024, 39_562_784, 40_173_792, 3_677_824, 3_677_824, 3_677_824, 3_677_824,
    ];
    let folder = tempfile::tempdir().unwrap();
    let git = |arguments: &[&str]| {
        let output = Command::new("git")
            .args(["-c", "user.name=test", "-c", "user.email=test@localhost"])
            .args(arguments)
            .current_dir(folder.path())
            .output()
            .unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    git(&["init", "--quiet"]);
    for (patch, count) in counts.into_iter().enumerate() {
        let line = format!(
            r#"{{"schema":"granule.result/1","host":{{"arch":"aarch64","kernel":"5.10.262","cpu":"n1","page_size":4096,"emulator":"QEMU"}},"engine":"kvm","config":{{"mode":"4K","backing":"anonymous","memory":67108864,"vcpus":16,"seed":0,"iteration":0}},"phase":"whole","ns":1000000,"counters":{{"DC CIVAC":{count}}}}}"#
        );
        fs::write(folder.path().join("results.jsonl"), line + "\n").unwrap();
        git(&["add", "results.jsonl"]);
        git(&["commit", "--quiet", "--allow-empty", "-m", &format!("patch {patch}")]);
    }
    let base = git(&["show", "HEAD~7:results.jsonl"]);
    let outside = tempfile::tempdir().unwrap();
    let base_path = outside.path().join("base.jsonl");
    fs::write(&base_path, base).unwrap();

    git(&["bisect", "start", "--term-old=many", "--term-new=few", "HEAD", "HEAD~7"]);
    let found = git(&[
        "bisect",
        "run",
        env!("CARGO_BIN_EXE_granule"),
        "compare",
        "--bisect",
        "--metric=DC CIVAC",
        "--min-effect=100",
        "results.jsonl",
        base_path.to_str().unwrap(),
    ]);

    assert!(found.contains("is the first few commit"), "{found}");
    let found = git(&["show", "--no-patch", "--format=%s", "refs/bisect/few"]);
    assert_eq!(found.trim(), "patch 4");
}

#[test]
fn a_sweep_beyond_the_limits_is_refused_before_it_starts() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sweep.jsonl");
    for (sweep, wanted) in
        [("size=1M,2T", "2T is too large"), ("vcpus=1,99999999", "99999999 is too large")]
    {
        let output = Command::new(env!("CARGO_BIN_EXE_granule"))
            .args(["bench", "--engine", "model", "--sweep", sweep, "--json"])
            .arg(&file)
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(wanted), "{error}");
        assert!(!file.exists());
    }
}
