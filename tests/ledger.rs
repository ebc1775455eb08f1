// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The ledger of the documents, and files that `granule ledger` refuses.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs")
}

fn ledger(arguments: &[&Path]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_granule")).arg("ledger").args(arguments).output().unwrap()
}

#[test]
fn the_page_of_the_documents_is_the_page_of_their_ledger() {
    let directory = tempfile::tempdir().unwrap();
    let page = directory.path().join("ledger.md");
    fs::copy(docs().join("ledger.md"), &page).unwrap();

    let output = ledger(&[&docs().join("ledger.jsonl"), Path::new("--page"), &page]);

    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for name in ["ledger.md", "ledger.svg"] {
        let [made, kept] =
            [directory.path(), &docs()].map(|at| fs::read_to_string(at.join(name)).unwrap());
        assert_eq!(made, kept, "{name}: granule ledger docs/ledger.jsonl --page docs/ledger.md");
    }
}

#[test]
fn a_page_of_a_ledger_without_kernels_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::write(path("empty.jsonl"), "").unwrap();
    for file in ["empty.jsonl", "missing.jsonl"] {
        let output = ledger(&[&path(file), Path::new("--page"), &path("page.md")]);

        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains("has no kernels for --page"), "{error}");
        assert!(!path("page.md").exists() && !path("missing.jsonl").exists());
    }
}

#[test]
fn a_page_given_as_the_ledger_is_refused_and_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::copy(docs().join("ledger.md"), path("page.md")).unwrap();
    fs::copy(docs().join("ledger.jsonl"), path("ledger.jsonl")).unwrap();
    let text = fs::read_to_string(path("ledger.jsonl")).unwrap();
    fs::write(path("cut.jsonl"), &text[..text.len() - 40]).unwrap();
    let last = format!("line {}: ", text.lines().count());
    for (file, page, reason) in [
        ("page.md", "new.md", "line 1: the file is no ledger"),
        ("cut.jsonl", "new.md", last.as_str()),
        ("ledger.jsonl", "ledger.jsonl", "ends with .md or .html"),
        ("ledger.jsonl", "ledger.html", ""),
    ] {
        let before = fs::read(path(file)).unwrap();

        let output = ledger(&[&path(file), Path::new("--page"), &path(page)]);

        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        let expected = if reason.is_empty() { Some(0) } else { Some(2) };
        assert_eq!(output.status.code(), expected, "{error}");
        assert!(error.contains(reason), "{error}");
        assert_eq!(fs::read(path(file)).unwrap(), before);
    }
    assert!(!path("new.md").exists() && path("ledger.html").exists());
}

#[test]
fn a_command_without_work_names_the_options() {
    let output = ledger(&[&docs().join("ledger.jsonl")]);

    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--base"));
}
