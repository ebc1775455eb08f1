// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages of compiler, kernel-doc and sparse in the output of a kernel build, by object.
//!
//! `make` prints a line such as `  CC      arch/arm64/kvm/mmu.o` before the messages of an object,
//! and `  CHECK   …/mmu.c` before those of sparse. Line numbers are removed, so that a message of
//! code that only moved equals that of the base.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// Origin of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Tool {
    /// The compiler, or kernel-doc.
    Compiler,
    Sparse,
}

/// A message without line numbers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Message {
    pub tool: Tool,
    pub text: String,
}

/// Messages of the last compilation of each object. The key is the path without extension.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warnings(pub BTreeMap<String, Vec<Message>>);

impl Warnings {
    /// Reads the messages of the objects that a build of the files in `tree` compiled.
    pub fn of_log(log: &str, tree: &str) -> Self {
        let mut warnings = Self::default();
        let prefix = format!("{}/", tree.trim_end_matches('/'));
        let mut current = None;
        for line in log.lines() {
            if let Some((tool, path)) = compiled_object(line) {
                let path = path.strip_prefix(&prefix).unwrap_or(path);
                let object = object_name(path).to_owned();
                // CHECK follows CC of the same object, and has no messages of its own so far.
                warnings.0.entry(object.clone()).or_default();
                current = Some((tool, object));
            } else if let Some((mut tool, object)) = current.clone()
                && let Some((text, has_column)) = message(&line.replace(&prefix, ""))
            {
                if !has_column {
                    tool = Tool::Compiler; // kernel-doc, after sparse
                }
                warnings.0.entry(object).or_default().push(Message { tool, text });
            }
        }
        warnings
    }

    /// Replaces the messages of the objects that were compiled again.
    pub fn update(&mut self, newer: Self) {
        self.0.extend(newer.0);
    }

    /// Returns the messages of the objects of `targets` that `is_included` accepts.
    pub fn of_targets(
        &self,
        targets: &BTreeSet<String>,
        is_included: impl Fn(&str) -> bool,
    ) -> Self {
        let is_of_target = |(object, _): &(&String, &Vec<Message>)| {
            targets.iter().any(|target| contains(target, object)) && is_included(object)
        };
        let objects = self.0.iter().filter(is_of_target);
        Self(objects.map(|(object, messages)| (object.clone(), messages.clone())).collect())
    }

    /// Returns the messages of the objects of `targets` that `base` lacks.
    pub fn new_since(&self, base: &Self, targets: &BTreeSet<String>) -> BTreeSet<Message> {
        let mut new = BTreeSet::new();
        for (object, messages) in &self.0 {
            if !targets.iter().any(|target| contains(target, object)) {
                continue;
            }
            let mut known = base.0.get(object).cloned().unwrap_or_default();
            for message in messages {
                match known.iter().position(|one| one == message) {
                    Some(index) => drop(known.swap_remove(index)),
                    None => drop(new.insert(message.clone())),
                }
            }
        }
        new
    }
}

/// Reports whether a target of `make`, a directory or an object, builds an object.
fn contains(target: &str, object: &str) -> bool {
    match target.strip_suffix('/') {
        Some(_) => object.starts_with(target),
        None => object_name(target) == object,
    }
}

/// Parses `  CC      PATH` and similar lines.
fn compiled_object(line: &str) -> Option<(Tool, &str)> {
    let mut words = line.strip_prefix("  ")?.split_ascii_whitespace();
    let action = words.next()?;
    if action.len() > 8 || !action.bytes().all(|byte| byte.is_ascii_uppercase()) {
        return None;
    }
    let path = words.next_back()?;
    let is_path = words.next().is_none_or(|word| word == "[M]") && path.contains('.');
    let tool = if action == "CHECK" { Tool::Sparse } else { Tool::Compiler };
    is_path.then_some((tool, path))
}

/// Removes the extension of an object, source or assembler file (`asm-offsets.s`, which each build makes
/// first), and `.nvhe` of objects for EL2.
fn object_name(path: &str) -> &str {
    let extensions = [".o", ".c", ".s"].iter();
    let name = extensions.filter_map(|end| path.strip_suffix(end)).next().unwrap_or(path);
    name.strip_suffix(".nvhe").unwrap_or(name)
}

/// Returns a message without its line and column, and whether it had a column.
fn message(line: &str) -> Option<(String, bool)> {
    let (place, text) = [": warning: ", ": error: "]
        .iter()
        .find_map(|kind| line.split_once(kind).map(|(place, _)| (place, &line[place.len()..])))?;
    let is_number = |part: &&str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let numbers = place.split(':').filter(is_number).count();
    let file = place.split(':').next().unwrap_or_default();
    Some((format!("{file}{text}"), numbers > 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "  GEN     Makefile
  CALL    /src/scripts/checksyscalls.sh
  CC      arch/arm64/kvm/mmu.o
/src/arch/arm64/kvm/mmu.c:10:5: warning: unused variable 'x' [-Wunused-variable]
   10 |     int x;
  CHECK   /src/arch/arm64/kvm/mmu.c
/src/arch/arm64/kvm/mmu.c:20:6: warning: symbol 'f' was not declared. Should it be static?
/src/arch/arm64/kvm/mmu.c:30: warning: Function parameter or member 'p' not described in 'g'
  CC [M]  arch/arm64/kvm/hyp/nvhe/../pgtable.nvhe.o
";

    fn message(tool: Tool, text: &str) -> Message {
        Message { tool, text: text.to_owned() }
    }

    #[test]
    fn messages_belong_to_the_object_before_them() {
        let warnings = Warnings::of_log(LOG, "/src");

        let mmu = &warnings.0["arch/arm64/kvm/mmu"];
        assert_eq!(mmu.len(), 3);
        assert_eq!(
            mmu[0].text,
            "arch/arm64/kvm/mmu.c: warning: unused variable 'x' [-Wunused-variable]"
        );
        let tools: Vec<Tool> = mmu.iter().map(|message| message.tool).collect();
        assert_eq!(tools, [Tool::Compiler, Tool::Sparse, Tool::Compiler]);
        assert!(warnings.0["arch/arm64/kvm/hyp/nvhe/../pgtable"].is_empty());
    }

    #[test]
    fn an_assembler_file_has_the_name_of_its_source() {
        let log =
            "  CC      arch/arm64/kernel/asm-offsets.s\n/src/include/a.h:1:5: warning: unused\n";

        let warnings = Warnings::of_log(log, "/src");

        let kept = warnings.of_targets(&["arch/arm64/kernel/".to_owned()].into(), |object| {
            object == "arch/arm64/kernel/asm-offsets"
        });
        assert_eq!(kept, warnings);
    }

    #[test]
    fn only_messages_that_the_base_lacks_are_new() {
        let base = Warnings::of_log(LOG, "/src");
        let moved = LOG.replace("mmu.c:10:5", "mmu.c:99:5");
        let text =
            "/src/arch/arm64/kvm/mmu.c:9:1: warning: unused variable 'x' [-Wunused-variable]\n";
        let twice = moved.replace("  CHECK", &format!("{text}  CHECK"));
        let new = |log: &str, target: &str| {
            let mut warnings = base.clone();
            warnings.update(Warnings::of_log(log, "/src/"));
            warnings.new_since(&base, &[target.to_owned()].into())
        };

        assert!(new(&moved, "arch/arm64/kvm/").is_empty());
        assert!(new(&twice, "arch/arm64/kvm/hyp/").is_empty());
        let expected = "arch/arm64/kvm/mmu.c: warning: unused variable 'x' [-Wunused-variable]";
        assert_eq!(new(&twice, "arch/arm64/kvm/mmu.o"), [message(Tool::Compiler, expected)].into());
    }
}
