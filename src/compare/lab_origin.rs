// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The origin of results in runs of the lab: names and titles of kernels, and the commands of the
//! runs.

use std::{
    fs,
    path::{Path, PathBuf},
};

use granule_report::command_line;
use serde_json::Value;

/// Origin of both sides of a comparison; empty for other results.
#[derive(Debug, Default)]
pub struct LabOrigin {
    /// Names of kernels, and the subjects of their last patches.
    pub titles: Vec<(String, String)>,
    /// Command lines of the runs, each once.
    runs: Vec<String>,
}

impl LabOrigin {
    /// Reads the origin of two sides. The labels are the names of the kernels if both are known and
    /// differ.
    pub fn read(sides: [&Path; 2]) -> (Option<[String; 2]>, Self) {
        let folders = sides.map(kernel_folder);
        let kernels = folders.each_ref().map(|folder| read_json(&folder.join("kernel.json")));
        let text = |value: &Value, key: &str| value[key].as_str().map(str::to_owned);
        let mut origin = Self::default();
        for folder in &folders {
            let plan = folder.parent().map(|run| read_json(&run.join("plan.json")));
            let command = plan.and_then(|plan| text(&plan, "command"));
            origin.runs.extend(command.filter(|command| !origin.runs.contains(command)));
        }
        let names = match kernels.each_ref().map(|kernel| text(kernel, "name")) {
            [Some(before), Some(after)] if before != after => [before, after],
            _ => return (None, origin),
        };
        let title =
            |(name, kernel): (&String, &Value)| Some((name.clone(), text(kernel, "title")?));
        origin.titles = names.iter().zip(&kernels).filter_map(title).collect();
        (Some(names), origin)
    }

    /// Returns the commands that reproduce a comparison: those of the runs, and of this process.
    pub fn commands(&self) -> Vec<String> {
        self.runs.iter().cloned().chain([command_line()]).collect()
    }
}

/// Returns the folder of a kernel in a run directory, which may be given by its results.
fn kernel_folder(path: &Path) -> PathBuf {
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    match path.is_dir() {
        true => path,
        false => path.parent().unwrap_or(&path).to_owned(),
    }
}

/// Returns the value of a file of JSON; null if it cannot be read.
fn read_json(path: &Path) -> Value {
    let text = fs::read(path).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_and_commands_of_a_run_are_read() {
        let run = tempfile::tempdir().unwrap();
        let path = |name: &str| run.path().join(name);
        for (name, title) in [("before", "Linux 6.12"), ("after", "KVM: x")] {
            fs::create_dir(path(name)).unwrap();
            let kernel = format!(r#"{{"name": "{name}", "title": "{title}"}}"#);
            fs::write(path(name).join("kernel.json"), kernel).unwrap();
            fs::write(path(name).join("results.jsonl"), "").unwrap();
        }
        fs::write(path("plan.json"), r#"{"command": "granule lab --git linux a..b"}"#).unwrap();
        let before = path("before");
        let read = |after: &str| LabOrigin::read([&before, &path(after)]);

        let (labels, origin) = read("after/results.jsonl");
        let (same, _) = read("before");

        assert_eq!(labels, Some(["before", "after"].map(str::to_owned)));
        assert_eq!(same, None);
        assert_eq!(origin.titles[1], ("after".to_owned(), "KVM: x".to_owned()));
        assert_eq!(origin.runs, ["granule lab --git linux a..b"]);
    }
}
