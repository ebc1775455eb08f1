// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Files that a series changes, and targets of `make` that check them.
//!
//! Each patch is checked by the objects of all files that the series changes, so a patch that changes
//! a declaration before its users is found. The directories of these files and of the headers' users
//! are compiled only for the complete series.

use std::collections::BTreeSet;

use crate::kernel::series::Patch;

/// Code for EL2, whose files are also compiled by the Makefile of [`NVHE`].
const HYP: &str = "arch/arm64/kvm/hyp/";
const NVHE: &str = "arch/arm64/kvm/hyp/nvhe/";

/// Returns the part of a patch that changes files, without message and diffstat.
pub fn diff(patch: &Patch) -> &[u8] {
    let is_start = |window: &[u8]| window == b"\ndiff --git ";
    let start = patch.content.windows(12).position(is_start).unwrap_or_default();
    &patch.content[start..]
}

/// Returns the paths of the files that patches change, create or remove.
pub fn changed_files(patches: &[Patch]) -> BTreeSet<String> {
    let mut files = BTreeSet::new();
    for patch in patches {
        let text = String::from_utf8_lossy(diff(patch)).into_owned();
        for line in text.lines() {
            let path = line.strip_prefix("--- a/").or_else(|| line.strip_prefix("+++ b/"));
            files.extend(path.map(|path| path.split('\t').next().unwrap_or(path).to_owned()));
        }
    }
    files
}

/// Reports whether patches change the configuration's symbols.
pub fn change_kconfig(patches: &[Patch]) -> bool {
    let is_kconfig = |path: &String| path.rsplit('/').any(|name| name.starts_with("Kconfig"));
    changed_files(patches).iter().any(is_kconfig)
}

/// Returns the objects of changed files of a tree in which `exists` finds files, and the directories
/// of files without an object of their own.
pub fn objects(files: &BTreeSet<String>, exists: impl Fn(&str) -> bool) -> BTreeSet<String> {
    let mut targets = BTreeSet::new();
    for path in files.iter().filter(|path| is_compiled(path) && exists(path)) {
        if path.starts_with(HYP) {
            targets.insert(NVHE.to_owned());
        }
        let object = path.strip_suffix(".c").or_else(|| path.strip_suffix(".S"));
        match object {
            _ if path.starts_with(NVHE) => {}
            // The directory is small, and its Makefile chooses the files by configuration.
            _ if path.starts_with("arch/arm64/mm/") => drop(targets.insert(directory(path))),
            Some(object) => drop(targets.insert(format!("{object}.o"))),
            None => {}
        }
    }
    targets
}

/// Returns the directories that a complete series can affect.
pub fn directories(files: &BTreeSet<String>) -> BTreeSet<String> {
    let mut targets = BTreeSet::new();
    let mut add = |names: &[&str]| targets.extend(names.iter().map(|name| (*name).to_owned()));
    for path in files {
        let header = path.rsplit('/').next().unwrap_or_default();
        match path.as_str() {
            path if path.starts_with("arch/arm64/kvm/") => add(&["arch/arm64/kvm/"]),
            path if path.starts_with("arch/arm64/include/") && header.starts_with("kvm") => {
                add(&["arch/arm64/kvm/"]);
            }
            path if path.starts_with("arch/arm64/include/") => {
                add(&["arch/arm64/mm/", "arch/arm64/kernel/", "arch/arm64/kvm/"]);
            }
            path if path.starts_with("include/") => add(&["arch/arm64/mm/", "mm/"]),
            path if path.starts_with("arch/arm64/mm/") => add(&["arch/arm64/mm/"]),
            _ => {}
        }
    }
    targets
}

fn is_compiled(path: &str) -> bool {
    let is_code = [".c", ".S", ".h"].iter().any(|extension| path.ends_with(extension));
    is_code
        && !["tools/", "scripts/", "Documentation/", "samples/"].iter().any(|p| path.starts_with(p))
}

fn directory(path: &str) -> String {
    path.rsplit_once('/').map_or_else(String::new, |(directory, _)| format!("{directory}/"))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn patch(files: &[&str]) -> Patch {
        let diff =
            |path: &&str| format!("diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n");
        let diffs: String = files.iter().map(diff).collect();
        let content = format!("Subject: x\n\n--- a/of/the/message\n---\n stat\n\n{diffs}");
        Patch { path: PathBuf::new(), content: content.into_bytes() }
    }

    fn names(targets: BTreeSet<String>) -> String {
        targets.into_iter().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn targets_are_the_objects_of_the_changed_files() {
        for (files, objects_of_patch, directories_of_series) in [
            (
                &["arch/arm64/kvm/mmu.c", "arch/arm64/include/asm/kvm_pgtable.h"][..],
                "arch/arm64/kvm/mmu.o",
                "arch/arm64/kvm/",
            ),
            (
                &["arch/arm64/kvm/hyp/pgtable.c"],
                "arch/arm64/kvm/hyp/nvhe/ arch/arm64/kvm/hyp/pgtable.o",
                "arch/arm64/kvm/",
            ),
            (&["arch/arm64/kvm/hyp/nvhe/tlb.c"], "arch/arm64/kvm/hyp/nvhe/", "arch/arm64/kvm/"),
            (&["mm/rmap.c", "include/linux/rmap.h"], "mm/rmap.o", "arch/arm64/mm/ mm/"),
            (&["arch/arm64/mm/mmu.c"], "arch/arm64/mm/", "arch/arm64/mm/"),
            (&["tools/testing/selftests/kvm/x.c", "arch/arm64/Kconfig", "mm/new.c"], "", ""),
        ] {
            let files = changed_files(&[patch(files)]);

            assert_eq!(names(objects(&files, |path| path != "mm/new.c")), objects_of_patch);
            assert_eq!(names(directories(&files)), directories_of_series);
        }
    }

    #[test]
    fn changes_of_the_configuration_are_found() {
        assert!(change_kconfig(&[patch(&["f.c"]), patch(&["arch/arm64/Kconfig.debug"])]));
        assert!(!change_kconfig(&[patch(&["Documentation/kconfig.txt"])]));
    }
}
