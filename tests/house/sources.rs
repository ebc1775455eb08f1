// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lists the workspace's crates and the repository's files.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

/// A crate of the workspace.
#[derive(Debug)]
pub struct Crate {
    /// The package's name.
    pub name: String,
    /// The names of the workspace's crates that it uses outside tests.
    pub uses: Vec<String>,
    /// The root file of its library or program.
    pub root: PathBuf,
}

/// Returns the repository's folder.
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the crates of the workspace by name.
pub fn crates() -> BTreeMap<String, Crate> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(repository())
        .output()
        .expect("cargo metadata starts");
    assert!(output.status.success(), "cargo metadata: {output:?}");
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let packages = metadata["packages"].as_array().expect("a list of packages");
    let names: Vec<&str> = packages.iter().filter_map(|p| p["name"].as_str()).collect();
    packages
        .iter()
        .map(|package| {
            let name = package["name"].as_str().expect("a name").to_owned();
            let uses = package["dependencies"]
                .as_array()
                .expect("a list of dependencies")
                .iter()
                .filter(|dependency| dependency["kind"].is_null())
                .filter_map(|dependency| dependency["name"].as_str())
                .filter(|used| names.contains(used))
                .map(str::to_owned)
                .collect();
            let root = package["targets"]
                .as_array()
                .expect("a list of targets")
                .iter()
                .filter_map(|target| target["src_path"].as_str())
                .find(|path| path.ends_with("src/lib.rs") || path.ends_with("src/main.rs"))
                .expect("a library or a program");
            let root = PathBuf::from(root);
            (name.clone(), Crate { name, uses, root })
        })
        .collect()
}

/// Returns the files that git tracks, relative to the repository, whose names end with one of
/// `endings`.
pub fn files(endings: &[&str]) -> Vec<PathBuf> {
    let output = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(repository())
        .output()
        .expect("git starts");
    assert!(output.status.success(), "git ls-files: {output:?}");
    String::from_utf8(output.stdout)
        .expect("paths in UTF-8")
        .split_terminator('\0')
        .filter(|path| endings.iter().any(|ending| path.ends_with(ending)))
        .map(PathBuf::from)
        .filter(|path| repository().join(path).is_file())
        .collect()
}

/// Returns a file's text.
pub fn text(path: &Path) -> String {
    std::fs::read_to_string(repository().join(path))
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
