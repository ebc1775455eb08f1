// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Exit codes and output of `granule compare`.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::{fs, process::Command};

use tempfile::TempDir;

/// Directory with the inputs of a test.
struct InputDirectory(TempDir);

impl InputDirectory {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn write(&self, name: &str, text: &str) -> String {
        fs::write(self.path(name), text).unwrap();
        self.path(name)
    }

    /// Writes a log of runs of `kvm_page_table_test` with times (ns) slightly above `times`.
    fn write_log(&self, name: &str, times: [u64; 3], runs: u64) -> String {
        let run = |index: u64| {
            let [create, update, rebuild] = times.map(|ns| ns + ns / 1000 * (index * 7 % 5));
            format!(
                "Testing guest mode: PA-bits:48,  VA-bits:48,  4K pages\n\
                 Testing memory backing src type: anonymous\n\
                 Testing memory size(aligned): 0x4000000\n\
                 Number of testing vCPUs: 4\n\
                 KVM_CREATE_MAPPINGS: total execution time: 0.{create:09}s\n\n\
                 KVM_UPDATE_MAPPINGS: total execution time: 0.{update:09}s\n\n\
                 KVM_ADJUST_MAPPINGS: total execution time: 0.{rebuild:09}s\n\n"
            )
        };
        self.write(name, &(0..runs).map(run).collect::<String>())
    }
}

/// Exit code, standard output and standard error.
type ProgramOutput = (Option<i32>, String, String);

fn granule(arguments: &[&str]) -> ProgramOutput {
    let output = Command::new(env!("CARGO_BIN_EXE_granule")).args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn compare(arguments: &[&str]) -> ProgramOutput {
    granule(&[&["compare"], arguments].concat())
}

const PHASE_TIMES: [u64; 3] = [100_000, 200_000, 300_000];

#[test]
fn exit_code_is_1_for_a_regression_beyond_the_minimum_effect() {
    let inputs = InputDirectory::new();
    let before = inputs.write_log("before", PHASE_TIMES, 8);
    let after = inputs.write_log("after", [50_000, 210_000, 300_000], 8);

    let (slower, text, errors) = compare(&[&before, &after]);
    let (tolerated, ..) = compare(&[&before, &after, "--min-effect", "6%"]);

    assert_eq!((slower, tolerated), (Some(1), Some(0)));
    assert!(text.contains("create") && text.contains("0.500"), "{text}");
    assert!(errors.is_empty());
}

#[test]
fn exit_code_is_1_for_the_verdicts_of_fail_on() {
    let inputs = InputDirectory::new();
    let before = inputs.write_log("before", PHASE_TIMES, 8);
    let slower = inputs.write_log("slower", [100_000, 210_000, 300_000], 8);
    for (sides, fail_on, code) in [
        ([&before, &slower], "regression", 1),
        ([&slower, &before], "regression", 0),
        ([&slower, &before], "difference", 1),
        ([&before, &slower], "never", 0),
    ] {
        let (found, ..) = compare(&[sides[0], sides[1], "--fail-on", fail_on]);
        assert_eq!(found, Some(code), "{sides:?} {fail_on}");
    }
    assert_eq!(compare(&[&before, &inputs.path("absent"), "--fail-on", "never"]).0, Some(2));
}

#[test]
fn bisect_exit_code_is_125_for_an_inconclusive_result() {
    let inputs = InputDirectory::new();
    let one = inputs.write_log("one", PHASE_TIMES, 1);
    let slow = inputs.write_log("slow", [900_000, 200_000, 300_000], 1);
    let same = inputs.write_log("same", PHASE_TIMES, 20);
    let [one, slow, same] = [&one, &slow, &same].map(String::as_str);
    for (arguments, code) in
        [(&[one, slow][..], 0), (&["--bisect", one, slow], 125), (&["--bisect", same, same], 0)]
    {
        assert_eq!(compare(arguments).0, Some(code), "{arguments:?}");
    }
}

#[test]
fn a_usage_error_ends_a_bisection() {
    for (arguments, code) in [
        (&["--bisect", "one", "two", "--phases", "create"][..], 128),
        (&["--bisect"], 128),
        (&["--bisect", "--by", "backing", "one"], 128),
        (&["one", "two", "--phases", "create"], 2),
        (&["--bisect", "--help"], 0),
    ] {
        assert_eq!(compare(arguments).0, Some(code), "{arguments:?}");
    }
}

#[test]
fn a_report_is_not_written_over_an_input() {
    let inputs = InputDirectory::new();
    let [before, after] = ["before", "after"].map(|name| inputs.write_log(name, PHASE_TIMES, 1));
    let (link, out) = (inputs.path("link"), inputs.path("out"));
    std::os::unix::fs::symlink(&after, &link).unwrap();
    let whole = fs::read_to_string(&after).unwrap();

    let (refused, _, errors) = compare(&[&before, &after, "-o", &link]);
    let (beside, ..) = compare(&[&before, &after, "-o", &out]);

    assert_eq!((refused, beside), (Some(2), Some(0)));
    assert!(errors.contains("is an input of the comparison"));
    assert_eq!(fs::read_to_string(&after).unwrap(), whole);
}

#[test]
fn an_unusable_input_is_refused_with_its_name() {
    let inputs = InputDirectory::new();
    let whole = inputs.write_log("whole", PHASE_TIMES, 3);
    let text = fs::read_to_string(&whole).unwrap();
    let cut = inputs.write("cut", &text[..text.rfind("KVM_UPDATE").unwrap()]);
    for (side, expected) in [
        (&cut, "line 21: the run that begins here has no 'KVM_UPDATE_MAPPINGS'"),
        (&inputs.write("foreign", "hello\n"), ""),
        (&inputs.path("absent"), ""),
        (&inputs.path(""), ""),
    ] {
        for (arguments, code) in [(&[&whole[..], side][..], 2), (&["--bisect", side, &whole], 128)]
        {
            let (refused, output, message) = compare(arguments);

            assert_eq!(refused, Some(code), "{side}");
            assert!(output.is_empty());
            assert!(message.starts_with("granule: ") && message.contains(side), "{message}");
            assert!(message.contains(expected), "{message}");
        }
    }
}

#[test]
fn several_files_form_one_side() {
    let inputs = InputDirectory::new();
    let files = |name: &str, ns: u64| -> Vec<String> {
        let file = |i: u64| inputs.write_log(&format!("{name}{i}"), [ns + i * 10, 1000, 1000], 1);
        (0..6).map(file).collect()
    };
    let (before, after) = (files("before", 100_000), files("after", 120_000));
    let mut arguments: Vec<&str> = before.iter().map(String::as_str).collect();
    arguments.push("--");
    arguments.extend(after.iter().map(String::as_str));
    let out = inputs.path("out.txt");

    let (printed, text, _) = compare(&arguments);
    arguments.splice(0..0, ["-o", &out, "--paired"]);
    let (written, nothing, _) = compare(&arguments);

    // Six pairs are too few for a significant result in three phases.
    assert_eq!((printed, written), (Some(1), Some(0)));
    assert!(text.contains("6 runs a side"), "{text}");
    assert!(nothing.is_empty());
    assert!(fs::read_to_string(&out).unwrap().contains("6 runs a side"));
    assert_eq!(compare(&arguments[3..9]).0, Some(2), "no two sides");
}

#[test]
fn markdown_and_json_are_printed() {
    let inputs = InputDirectory::new();
    let log = &inputs.write_log("log", [1000, 2000, 3000], 1);

    let (_, markdown, _) = compare(&[log, log, "--format", "markdown"]);
    let (_, json, _) = compare(&[log, log, "--format", "json"]);

    assert!(markdown.contains("| **create** ? |"));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["schema"], "granule.comparison/2");
    assert_eq!(json["configurations"][0]["phases"][0]["time"]["ratio"], 1.0);
}

#[test]
fn the_text_for_a_cover_letter_ends_with_its_command() {
    let inputs = InputDirectory::new();
    let before = inputs.write_log("before", PHASE_TIMES, 8);
    let after = inputs.write_log("after", [50_000, 210_000, 300_000], 8);

    let (code, text, _) = compare(&[&before, &after, "--format", "cover"]);

    assert_eq!(code, Some(1));
    assert!(text.lines().all(|line| line.len() <= 72 && line.is_ascii()), "{text}");
    assert!(text.contains("\nRegression: update. Improvement: create.\n"), "{text}");
    let (_, command) = text.split_once("To reproduce:\n").unwrap();
    let output = Command::new("sh")
        .args(["-c", &command.replacen("granule", env!("CARGO_BIN_EXE_granule"), 1)])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), text, "{command}");
}

#[test]
fn the_backings_of_one_kernel_are_compared() {
    let inputs = InputDirectory::new();
    let small = inputs.write_log("small", PHASE_TIMES, 8);
    let log = fs::read_to_string(&small).unwrap();
    let huge = log.replace("anonymous", "anonymous_thp").replace("0.000200", "0.000300");
    let both = inputs.write("both", &(log + &huge));

    let (slower, text, _) = compare(&["--by", "backing", &both]);
    let (printed, ..) = compare(&["--by", "backing", &both, "--fail-on", "never"]);
    let (_, from_files, _) = compare(&["--by", "backing", &small, &inputs.write("huge", &huge)]);
    let (refused, output, error) = compare(&["--by", "backing", &both, "--format", "ktap"]);

    assert_eq!((slower, printed, refused), (Some(1), Some(0), Some(2)));
    assert!(text.contains("before    anonymous\nafter     anonymous_thp\n"), "{text}");
    assert_eq!(from_files, text);
    assert!(output.is_empty() && error.contains("--format ktap conflicts with --by"), "{error}");
}

/// Runs `git bisect` in a repository in which each commit contains the result of one kernel.
#[test]
fn git_bisect_finds_the_patch_that_removes_most_cache_maintenance() {
    // The medians of DC CIVAC from base to patch 7, as in the README of the 5.10 series.
    let counts = [
        41_637_088, 41_637_792, 41_796_800, 41_635_232, 3_670_144, 3_670_144, 3_670_144, 3_670_144,
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
    let outside = InputDirectory::new();
    let base = outside.write("base.jsonl", &git(&["show", "HEAD~7:results.jsonl"]));

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
        &base,
    ]);

    assert!(found.contains("is the first few commit"), "{found}");
    let found = git(&["show", "--no-patch", "--format=%s", "refs/bisect/few"]);
    assert_eq!(found.trim(), "patch 4");
}

#[test]
fn a_sweep_beyond_the_limits_is_refused_before_it_starts() {
    let inputs = InputDirectory::new();
    let file = inputs.path("sweep.jsonl");
    for (sweep, expected) in
        [("size=1M,2T", "2T is too large"), ("vcpus=1,99999999", "99999999 is too large")]
    {
        let arguments = ["bench", "--engine", "software", "--sweep", sweep, "--json", &file];
        let (code, _, error) = granule(&arguments);
        assert_eq!(code, Some(2), "{error}");
        assert!(error.contains(expected), "{error}");
        assert!(!fs::exists(&file).unwrap());
    }
}
