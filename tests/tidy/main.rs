// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks the rules of this repository: crates and modules form no cycles, files and commit
//! subjects are short, and comments, messages and documents use the terms of the field.

mod modules;
mod prose;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use modules::Modules;
use prose::{contains_phrase, prose};

/// Dependencies and root of a workspace crate.
#[derive(Debug)]
struct Crate {
    /// Names of its dependencies in the workspace, except those of tests.
    uses: Vec<String>,
    /// Root source file of its library or program.
    root: PathBuf,
}

const REPOSITORY: &str = env!("CARGO_MANIFEST_DIR");

/// Runs a program in the repository and returns its output.
fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).current_dir(REPOSITORY).output();
    let output = output.expect("the program starts");
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).expect("output in UTF-8")
}

/// Returns the crates of the workspace by name.
fn crates() -> BTreeMap<String, Crate> {
    let text = output(env!("CARGO"), &["metadata", "--format-version=1", "--no-deps", "--offline"]);
    let metadata: Value = serde_json::from_str(&text).expect("cargo prints JSON");
    let list = |value: &Value| value.as_array().expect("a list").clone();
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let packages = list(&metadata["packages"]);
    let names: Vec<String> = packages.iter().map(|package| text(&package["name"])).collect();
    let read = |package: &Value| {
        let dependencies = list(&package["dependencies"]).into_iter();
        let uses = dependencies
            .filter(|dependency| dependency["kind"].is_null())
            .map(|dependency| text(&dependency["name"]))
            .filter(|used| names.contains(used))
            .collect();
        let root = list(&package["targets"])
            .iter()
            .map(|target| PathBuf::from(text(&target["src_path"])))
            .find(|path| path.ends_with("src/lib.rs") || path.ends_with("src/main.rs"));
        Crate { uses, root: root.expect("a library or a program") }
    };
    packages.iter().map(|package| (text(&package["name"]), read(package))).collect()
}

/// Returns the tracked files whose names end with one of `endings`, relative to the repository.
fn tracked_files(endings: &[&str]) -> Vec<PathBuf> {
    output("git", &["ls-files", "-z"])
        .split_terminator('\0')
        .filter(|path| endings.iter().any(|ending| path.ends_with(ending)))
        .map(PathBuf::from)
        .filter(|path| Path::new(REPOSITORY).join(path).is_file())
        .collect()
}

fn read_text(path: &Path) -> String {
    std::fs::read_to_string(Path::new(REPOSITORY).join(path))
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Maximum number of lines of a source file.
const MAX_LINES: usize = 500;

/// Returns the nodes of a graph that are part of a cycle.
fn names_in_cycles<'a>(edges: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<&'a str> {
    let edges: BTreeSet<_> = edges.into_iter().filter(|(user, used)| user != used).collect();
    let mut reached = edges.clone();
    let mut last = edges;
    while !last.is_empty() {
        let further = last.iter().flat_map(|(start, end)| {
            let next = reached.iter().filter(move |(user, _)| user == end);
            next.map(move |(_, used)| (*start, *used))
        });
        last = further.filter(|pair| !reached.contains(pair)).collect();
        reached.extend(&last);
    }
    reached.iter().filter(|(user, used)| user == used).map(|(name, _)| *name).collect()
}

#[test]
fn names_in_a_cycle_are_found() {
    assert!(names_in_cycles([("a", "b"), ("b", "c"), ("a", "c"), ("c", "c")]).is_empty());
    assert_eq!(names_in_cycles([("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")]), ["a", "b", "c"]);
}

#[test]
fn crate_dependencies_have_no_cycle() {
    let crates = crates();
    let edges = crates
        .iter()
        .flat_map(|(name, one)| one.uses.iter().map(|used| (name.as_str(), used.as_str())));

    assert!(names_in_cycles(edges).is_empty());
    let uses = |user: &str, used: &str| crates[user].uses.iter().any(|name| name == used);
    for test in ["granule-pgtable-test", "granule-report", "granule-lab"] {
        assert!(!uses("granule-vmm", test), "the VMM uses {test}");
    }
    assert!(crates["granule-types"].uses.is_empty());
    assert!(crates["granule-stage2"].uses.is_empty());
}

#[test]
fn module_dependencies_have_no_cycle() {
    let mut found = Vec::new();
    for (name, one) in crates() {
        let edges = Modules::read(&one.root).sibling_uses();
        let mut parents: Vec<_> = edges.iter().map(|(parent, ..)| parent).collect();
        parents.dedup();
        for parent in parents {
            let here = edges.iter().filter(|(other, ..)| other == parent);
            let names = names_in_cycles(here.map(|(_, user, used)| (user.as_str(), used.as_str())));
            if !names.is_empty() {
                found.push(format!("{name}::{}: {}", parent.join("::"), names.join(", ")));
            }
        }
    }

    assert!(found.is_empty(), "modules that use each other:\n{}", found.join("\n"));
}

#[test]
fn commit_subjects_have_at_most_72_characters() {
    let arguments = ["log", "--format=%s", "0d8c400.."];
    let log = Command::new("git").args(arguments).current_dir(REPOSITORY).output();
    let Some(log) = log.ok().filter(|log| log.status.success()) else {
        return granule_types::testing::skip("git has no history since 0d8c400");
    };
    let log = String::from_utf8_lossy(&log.stdout);
    assert_eq!(log.lines().filter(|line| line.chars().count() > 72).collect::<Vec<_>>(), [""; 0]);
}

#[test]
fn no_source_file_is_longer_than_500_lines() {
    let long: Vec<String> = tracked_files(&[".rs", ".sh", ".S"])
        .iter()
        .map(|path| (read_text(path).lines().count(), path))
        .filter(|(lines, _)| *lines > MAX_LINES)
        .map(|(lines, path)| format!("{}: {lines} lines", path.display()))
        .collect();

    assert!(long.is_empty(), "split:\n{}", long.join("\n"));
}

/// Words that hide the subject or paraphrase a term of the field, and their replacements.
const BANNED_WORDS: &[(&str, &str)] = &[
    ("tell", "report, show, print"),
    ("tells", "reports, shows, prints"),
    ("told", "reported, shown"),
    ("whoever", "the caller, the thread, …"),
    ("somebody", "another vCPU, another process, …"),
    ("nobody", "no vCPU, no process, …"),
    ("ours", "`granule bench`"),
    ("theirs", "`kvm_page_table_test`"),
    ("in vain", "spurious, without effect"),
    ("made ready", "cleaned to PoC"),
    ("put back", "restore, recover"),
    ("puts back", "restores, recovers"),
    ("is to be had", "is available"),
    ("had anew", "allocated again"),
    ("gives", "returns, states, produces"),
    ("life", "reboot, boot count"),
    ("anybody", "any caller, any thread, …"),
    ("everybody", "all vCPUs, all threads, …"),
    ("widen", "relax permissions"),
    ("widens", "relaxes permissions"),
    ("widened", "relaxed permissions"),
    ("guest's fault", "stage-2 abort"),
    ("guest's faults", "stage-2 aborts"),
    ("fault on nothing", "translation fault"),
    ("faults again", "refaults"),
    ("make ready", "clean to PoC"),
    ("makes ready", "cleans to PoC"),
    ("put together", "coalesce"),
    ("come back", "are recovered"),
    ("comes back", "is recovered"),
    ("split ahead", "eager page splitting"),
    ("take away", "break"),
    ("takes away", "breaks"),
    ("taken away", "broken"),
    ("put in place", "make"),
    ("promised", "reserved"),
    ("worse", "regression"),
    ("how figures are made", "methodology"),
    ("older form", "no history"),
    ("last form", "no history"),
    ("muster", "arm, release"),
    ("crew", "vCPU threads"),
    ("toy", "fake machine"),
];

/// Files without a check of their words. Their contents are part of every kernel's cache key, so an
/// edit of a comment causes a rebuild of all kernels.
const UNCHECKED_FILES: &[&str] = &["stage2/linux/config/lab.config"];

/// Words that must not open a doc comment or heading: use a noun or a third-person verb.
const BANNED_OPENINGS: &[&str] = &[
    "All", "How", "Its", "Many", "None", "Nothing", "That", "There", "What", "Where", "Whether",
    "Which", "Who", "Whoever", "Whom", "Why",
];

/// Returns the text of a line that is a doc comment or, in Markdown, a heading.
fn prose_opening<'a>(path: &Path, line: &'a str) -> Option<&'a str> {
    if path.extension().is_some_and(|kind| kind == "md") {
        return line.strip_prefix("##").map(|text| text.trim_start_matches('#'));
    }
    let text = line.trim_start();
    text.strip_prefix("///").or_else(|| text.strip_prefix("//!"))
}

#[test]
fn comments_messages_and_pages_use_the_terms_of_the_field() {
    let mut found = Vec::new();
    for path in tracked_files(&[""]) {
        let name = path.display().to_string();
        if name.starts_with("tests/tidy/") || UNCHECKED_FILES.contains(&name.as_str()) {
            continue;
        }
        let Some(lines) = prose(&name, || read_text(&path)) else { continue };
        for (number, line) in lines {
            let banned = BANNED_WORDS.iter().filter(|(word, _)| contains_phrase(&line, word));
            for (word, instead) in banned {
                found.push(format!("{name}:{number}: '{word}': write {instead}"));
            }
        }
    }

    assert!(found.is_empty(), "{} places:\n{}", found.len(), found.join("\n"));
}

#[test]
fn a_doc_comment_or_heading_opens_with_a_noun_or_a_verb() {
    let mut found = Vec::new();
    for path in tracked_files(&[".rs", ".md"]) {
        let text = read_text(&path);
        let mut is_continuation = false;
        for (number, line) in (1..).zip(text.lines()) {
            let opening = prose_opening(&path, line);
            let words = opening.filter(|_| !is_continuation).unwrap_or_default();
            let word = words.trim_start().split(|c: char| !c.is_alphanumeric()).next();
            if word.is_some_and(|word| BANNED_OPENINGS.contains(&word)) {
                found.push(format!("{}:{number}: {}", path.display(), line.trim()));
            }
            is_continuation = opening.is_some();
        }
    }

    assert!(found.is_empty(), "{} places:\n{}", found.len(), found.join("\n"));
}
