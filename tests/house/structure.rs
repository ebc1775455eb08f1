// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Crates and modules form no circles, and no file is too long to read.

use petgraph::{algo::tarjan_scc, graphmap::DiGraphMap};

use super::{
    modules::Modules,
    sources::{crates, files, text},
};

/// The most lines that a source file may have.
const LONGEST_FILE: usize = 500;

/// Returns the groups of names that reach each other.
fn circles<'a>(edges: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<Vec<&'a str>> {
    let graph: DiGraphMap<&str, ()> = edges.into_iter().filter(|(a, b)| a != b).collect();
    tarjan_scc(&graph).into_iter().filter(|group| group.len() > 1).collect()
}

#[test]
fn a_circle_is_found() {
    assert!(circles([("a", "b"), ("b", "c")]).is_empty());
    assert_eq!(circles([("a", "b"), ("b", "a"), ("c", "a")]), [["b", "a"]]);
}

#[test]
fn crates_depend_on_each_other_one_way() {
    let crates = crates();
    let edges = crates
        .values()
        .flat_map(|one| one.uses.iter().map(|used| (one.name.as_str(), used.as_str())));

    assert!(circles(edges).is_empty());
    let uses = |user: &str, used: &str| crates[user].uses.iter().any(|name| name == used);
    for test in ["granule-pgtable-test", "granule-report", "granule-lab"] {
        assert!(!uses("granule-vmm", test), "the VMM uses {test}");
    }
    assert!(crates["granule-types"].uses.is_empty());
    assert!(crates["granule-stage2"].uses.is_empty());
}

#[test]
fn modules_use_each_other_one_way() {
    let mut found = Vec::new();
    for one in crates().values() {
        let edges = Modules::read(&one.root).between_siblings();
        let mut holders: Vec<_> = edges.iter().map(|(holder, ..)| holder).collect();
        holders.dedup();
        for holder in holders {
            let here = edges.iter().filter(|(other, ..)| other == holder);
            for circle in circles(here.map(|(_, user, used)| (user.as_str(), used.as_str()))) {
                found.push(format!("{}::{}: {}", one.name, holder.join("::"), circle.join(", ")));
            }
        }
    }

    assert!(found.is_empty(), "modules that use each other:\n{}", found.join("\n"));
}

#[test]
fn no_source_file_is_longer_than_500_lines() {
    let long: Vec<String> = files(&[".rs", ".sh", ".S"])
        .iter()
        .map(|path| (text(path).lines().count(), path))
        .filter(|(lines, _)| *lines > LONGEST_FILE)
        .map(|(lines, path)| format!("{}: {lines} lines", path.display()))
        .collect();

    assert!(long.is_empty(), "split:\n{}", long.join("\n"));
}
