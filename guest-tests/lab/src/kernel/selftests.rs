// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Builds a tree's KVM selftests as static arm64 programs in the cache, and chooses arguments that
//! limit each to a minute of emulation.
//!
//! The page-table test of Debian's Linux 6.1 runs on every base, so that figures are comparable: 6.1
//! is the first Debian version that has it. Where the package is not available, it is that of the
//! last kernel's tree. Selftests are those of the last kernel's tree, or of the version that
//! `--tests-of` names; an image has no tree, so its tests are those of Linux 6.1.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    command::{Command, CommandError},
    error::LabError,
    in_use,
    kernel::{
        git::{Repository, TreeId},
        sources::Source,
        toolchain::{Toolchain, is_of_sources, parallel_jobs},
    },
    shell::{Shell, partial_path, read, sha256},
    values::{LinuxVersion, MakeVariable},
};

pub const PAGE_TABLE_TEST: &str = "kvm_page_table_test";

/// Version of the page-table test, and of the selftests of images.
pub const PAGE_TABLE_TEST_VERSION: LinuxVersion = LinuxVersion { major: 6, minor: 1 };

/// Log of the build in a suite's directory.
const BUILD_LOG: &str = "build.log";

/// Directory of the tests in a kernel tree.
const SOURCE: &str = "tools/testing/selftests/kvm";

/// File of a suite's directory that is written last: [`TestList`] as JSON.
const LIST_FILE: &str = "tests.json";

/// Arguments by the name of a test without its directory. `MODE` is the number of the guest mode
/// P48V48_4K, which depends on the version. Other tests run without arguments.
const ARGUMENTS: [(&str, &str); 11] = [
    (PAGE_TABLE_TEST, "-m MODE -v 4 -b 16M -s anonymous"),
    ("access_tracking_perf_test", "-m MODE -v 2 -b 16M"),
    ("arch_timer", "-n 2 -i 2"),
    ("arch_timer_edge_cases", "-i 1"),
    ("debug-exceptions", "-i 100"),
    ("demand_paging_test", "-m MODE -v 2 -b 16M"),
    ("dirty_log_perf_test", "-m MODE -v 2 -b 16M -i 2"),
    ("dirty_log_test", "-m MODE -i 3 -I 10"),
    ("memslot_modification_stress_test", "-m MODE -v 2 -b 16M -i 10"),
    ("memslot_perf_test", "-l 1 -s 100"),
    ("mmu_stress_test", "-m 1 -s 1 -c 2"),
];

/// Path of a program, and its arguments.
pub type Invocation = (PathBuf, Vec<String>);

/// The tests of a tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct TestList {
    /// Number of the guest mode P48V48_4K.
    guest_mode: usize,
    /// Paths relative to the suite's directory.
    programs: Vec<String>,
    /// Programs of the tree's list that could not be built.
    failed: Vec<String>,
}

/// Reports whether a tree has the page-table test, or may have it in a dry run.
pub fn has_test(source: &Source, tree: &TreeId) -> bool {
    let path = format!("{SOURCE}/{PAGE_TABLE_TEST}.c");
    tree.is_placeholder() || source.repository.has_entry(tree, &path)
}

/// Built tests of a tree.
#[derive(Debug)]
pub struct SelftestSuite {
    directory: PathBuf,
    list: TestList,
    /// Indicates that `list` is the tree's.
    is_built: bool,
}

impl SelftestSuite {
    /// Builds the tests of a tree, unless they are in the cache, whose lock the caller holds until the jobs
    /// that run them are marked as users.
    pub fn build(
        shell: Shell,
        cache: &Path,
        (repository, tree): (&Repository, &TreeId),
        variables: &[MakeVariable],
    ) -> Result<Self, LabError> {
        let toolchain = Toolchain::new(shell, variables)?;
        let mut inputs = format!("{tree}\n{}", toolchain.version);
        variables.iter().for_each(|variable| inputs += &format!("\n{variable:?}"));
        let key = sha256(inputs.as_bytes());
        let directory = cache.join("selftests").join(&key[..16]);
        if let Ok(text) = fs::read_to_string(directory.join(LIST_FILE))
            && let Ok(list) = serde_json::from_str(&text)
        {
            in_use::touch(&directory);
            return Ok(Self { directory, list, is_built: true });
        }
        let tree = repository.switch_to(tree)?;
        let partial = partial_path(&directory);
        shell.remove_dir(&partial)?;
        let built = compile(shell, &toolchain, &tree.path, &partial);
        if shell.is_dry_run() {
            built?;
            // The tree may not exist, so its list is unknown.
            let programs = ARGUMENTS.map(|(name, _)| name.to_owned()).into();
            let list = TestList { guest_mode: 0, programs, failed: Vec::new() };
            return Ok(Self { directory, list, is_built: false });
        }
        let source = tree.path.join(SOURCE);
        let names = listed_programs(&toolchain, &source)?;
        let (programs, failed): (Vec<_>, Vec<_>) =
            names.into_iter().partition(|name| partial.join(name).is_file());
        if let Err(error) = built
            && (programs.is_empty() || !is_of_sources(&error, &partial.join(BUILD_LOG)))
        {
            return Err(error.into());
        }
        let list = TestList { guest_mode: guest_mode_number(&source)?, programs, failed };
        shell.write(&partial.join(LIST_FILE), serde_json::to_string(&list)?)?;
        shell.remove_dir(&directory)?;
        shell.rename(&partial, &directory)?;
        Ok(Self { directory, list, is_built: true })
    }

    /// Returns a message about the tests that could not be built, or that are not known.
    pub fn remark(&self) -> Option<String> {
        if !self.is_built {
            return Some(
                "the tests of this tree are known after their build: only those with arguments in \
                 the lab's table are shown"
                    .to_owned(),
            );
        }
        let failed = self.list.failed.join(", ");
        let log = self.directory.join(BUILD_LOG);
        (!failed.is_empty())
            .then(|| format!("tests that could not be built ({}): {failed}", log.display()))
    }

    /// Returns the path of a program of this suite.
    pub fn program(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Returns the invocations of the named tests, with or without their folders, or of all tests.
    /// Arguments after a name (`dirty_log_test -m 2`) replace those of [`ARGUMENTS`].
    pub fn invocations(&self, named: &[String]) -> Result<Vec<Invocation>, LabError> {
        let invocation = |name: &str, arguments: Option<&str>| {
            let default = || {
                let last = name.rsplit('/').next();
                ARGUMENTS.iter().find(|(test, _)| Some(*test) == last).map_or("", |(_, text)| text)
            };
            let mode = self.list.guest_mode.to_string();
            let arguments = arguments.unwrap_or_else(default).split_ascii_whitespace();
            let arguments =
                arguments.map(|word| if word == "MODE" { mode.clone() } else { word.to_owned() });
            (self.directory.join(name), arguments.collect())
        };
        let programs = &self.list.programs;
        if named.is_empty() {
            return Ok(programs.iter().map(|name| invocation(name, None)).collect());
        }
        let requested = |text: &String| {
            let (name, arguments) = match text.split_once(' ') {
                Some((name, arguments)) => (name, Some(arguments)),
                None => (text.as_str(), None),
            };
            // The folder's name depends on the version: aarch64 or arm64.
            let is_meant = |program: &&String| {
                *program == name || program.rsplit_once('/').is_some_and(|(_, last)| last == name)
            };
            let Some(name) = programs.iter().find(is_meant) else {
                return Err(LabError::Unusable(format!(
                    "unknown selftest '{name}'; expected one of: {}",
                    programs.join(", ")
                )));
            };
            Ok(invocation(name, arguments))
        };
        named.iter().map(requested).collect()
    }
}

/// Builds all tests of a tree that can be built into `output`.
fn compile(
    shell: Shell,
    toolchain: &Toolchain,
    tree: &Path,
    output: &Path,
) -> Result<(), CommandError> {
    let log = output.join(BUILD_LOG);
    let headers = output.join("headers");
    let shim = output.join("shim");
    // By default, tests write generated headers to the tree.
    let generated = output.join("generated");
    for directory in [&headers, &shim.join("linux"), &generated.join("tools")] {
        shell.create_dir(directory)?;
    }
    let install = toolchain
        .make("installing the kernel headers", tree)
        .arg(format!("O={}", headers.display()))
        .arg("headers")
        .log(&log);
    shell.run(&install)?;
    let source = tree.join(SOURCE);
    // Backports in 6.1.y use TEST_ASSERT_EQ, which is ASSERT_EQ in 6.1, and a header of the kernel
    // that the tools lack.
    let mut flags = format!("-I{}", shim.display());
    let utilities = fs::read_to_string(source.join("include/test_util.h")).unwrap_or_default();
    if utilities.contains("ASSERT_EQ") && !utilities.contains("TEST_ASSERT_EQ") {
        flags.push_str(" -DTEST_ASSERT_EQ=ASSERT_EQ");
    }
    let header = "linux/bitfield.h";
    if tree.join("include").join(header).is_file()
        && !tree.join("tools/include").join(header).is_file()
    {
        shell.copy(&tree.join("include").join(header), &shim.join(header))?;
    }
    let tests = tests_command(toolchain, "building the kernel's selftests", &source, output)
        .arg(format!("abs_objdir={}", generated.display()))
        .arg(format!("KHDR_INCLUDES=-isystem {}", headers.join("usr/include").display()))
        .arg("LDFLAGS=-static")
        .arg(format!("EXTRA_CFLAGS={flags}"))
        .arg(format!("-kj{}", parallel_jobs()))
        .log(&log);
    let built = shell.run(&tests);
    shell.remove_dir(&headers)?;
    built
}

fn tests_command(toolchain: &Toolchain, task: &str, source: &Path, output: &Path) -> Command {
    toolchain
        .make(task, source)
        .args(&toolchain.program_compiler)
        .arg(format!("OUTPUT={}", output.display()))
}

/// Returns the programs that the tree's own Makefile builds for arm64, sorted.
fn listed_programs(toolchain: &Toolchain, source: &Path) -> Result<Vec<String>, LabError> {
    // The Makefile creates the directories of its output.
    let output = tempfile::tempdir()?;
    let text = tests_command(toolchain, "listing the kernel's selftests", source, output.path())
        .args(["--eval", "granule-list: ; @echo $(TEST_GEN_PROGS)", "granule-list"])
        .query()?;
    let mut names: Vec<String> = text
        .split_ascii_whitespace()
        .filter_map(|path| Path::new(path).strip_prefix(output.path()).ok())
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    names.sort();
    Ok(names)
}

/// Returns the number of the guest mode P48V48_4K in the headers of a tree's tests.
fn guest_mode_number(source: &Path) -> Result<usize, LabError> {
    for name in ["kvm_util.h", "kvm_util_base.h"] {
        let path = source.join("include").join(name);
        if path.is_file()
            && let Some(number) = parse_guest_mode(&String::from_utf8_lossy(&read(&path)?))
        {
            return Ok(number);
        }
    }
    Err(LabError::Unusable(format!(
        "the headers in {} have no VM_MODE_P48V48_4K: the lab cannot run these tests",
        source.join("include").display()
    )))
}

fn parse_guest_mode(header: &str) -> Option<usize> {
    let (_, list) = header.split_once("enum vm_guest_mode {")?;
    let (list, _) = list.split_once('}')?;
    let names = list.lines().map(str::trim).filter(|line| line.starts_with("VM_MODE_"));
    names.into_iter().position(|name| name.starts_with("VM_MODE_P48V48_4K,"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suite() -> SelftestSuite {
        let programs = ["aarch64/arch_timer", "dirty_log_test", "rseq_test"].map(str::to_owned);
        let list = TestList { guest_mode: 3, programs: programs.into(), failed: Vec::new() };
        SelftestSuite { directory: "/x".into(), list, is_built: true }
    }

    fn line((program, arguments): &Invocation) -> String {
        format!("{} {}", program.display(), arguments.join(" "))
    }

    #[test]
    fn given_arguments_replace_those_of_the_table() {
        let named = ["rseq_test", "dirty_log_test", "dirty_log_test -m 2 -i 9", "arch_timer"];

        let all = suite().invocations(&[]).unwrap();
        let some = suite().invocations(&named.map(str::to_owned)).unwrap();

        assert_eq!(line(&all[0]), "/x/aarch64/arch_timer -n 2 -i 2");
        assert_eq!(all.len(), 3);
        let some: Vec<String> = some.iter().map(line).collect();
        assert_eq!(
            some,
            [
                "/x/rseq_test ",
                "/x/dirty_log_test -m 3 -i 3 -I 10",
                "/x/dirty_log_test -m 2 -i 9",
                "/x/aarch64/arch_timer -n 2 -i 2",
            ]
        );
    }

    #[test]
    fn an_unknown_test_is_refused_with_the_list() {
        let error = suite().invocations(&["arm64/at".to_owned()]).unwrap_err().to_string();

        assert!(error.contains("'arm64/at'; expected one of: aarch64/arch_timer"), "{error}");
    }

    #[test]
    fn the_number_of_the_guest_mode_is_its_place_in_the_header() {
        let modes = |between: &str| {
            format!(
                "enum vm_guest_mode {{\n\tVM_MODE_P52V48_4K,\n{between}\tVM_MODE_P52V48_64K,\n\
                     \n\tVM_MODE_P48V48_4K,\n\tNUM_VM_MODES,\n}};\n"
            )
        };

        assert_eq!(parse_guest_mode(&modes("")), Some(2));
        assert_eq!(parse_guest_mode(&modes("\tVM_MODE_P52V48_16K, /* LPA2 */\n")), Some(3));
        assert_eq!(parse_guest_mode("enum vm_guest_mode;\n"), None);
    }
}
