// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Output and exit code of `granule doctor` on this machine, whatever it lacks.

use std::process::Command;

use serde_json::Value;

/// Runs `granule doctor` and returns its exit code and output.
fn doctor(arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_granule"));
    let output = command.arg("doctor").args(arguments).output().expect("granule starts");
    (output.status.code(), String::from_utf8(output.stdout).expect("output in UTF-8"))
}

#[test]
fn the_exit_code_says_whether_a_task_lacks_nothing() {
    for group in ["kvm", "lab"] {
        let (code, output) = doctor(&[group, "--json"]);

        let report: Value = serde_json::from_str(&output).expect("JSON");
        let checks = report["checks"].as_array().expect("a list of checks");
        let is_missing = checks.iter().any(|check| check["status"] == "missing");
        assert!(checks.len() > 2 || is_missing, "{output}");
        assert!(checks.iter().all(|check| check["group"] == group), "{output}");
        assert_eq!(code, Some(i32::from(is_missing)), "{output}");
    }
}

#[test]
fn the_text_has_a_section_for_each_task_and_a_line_for_each_check() {
    let (_, text) = doctor(&[]);
    let (_, json) = doctor(&["--json"]);

    let report: Value = serde_json::from_str(&json).expect("JSON");
    let checks = report["checks"].as_array().expect("a list of checks").len();
    assert!(text.contains("granule run and bench (KVM): "), "{text}");
    assert!(text.contains("granule lab (emulation): "), "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("  ")).count(), checks, "{text}");
}
