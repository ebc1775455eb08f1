// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel tree's own KVM tests, built static for arm64 and kept in the cache.
//!
//! They come from Linux 6.1: the first version of Debian's whose tests cover this path, and one
//! whose tests still run on 5.10.

use std::path::{Path, PathBuf};

use super::{
    build::{jobs, make},
    sources::Tree,
    step::{Shell, StepError, partial},
};

/// The version the tests are taken from.
pub const VERSION: &str = "6.1";

/// The test that measures.
pub const PAGE_TABLE_TEST: &str = "kvm_page_table_test";

/// One of the kernel's tests and the arguments that keep it within a minute of emulation.
#[derive(Debug, Clone, Copy)]
pub struct Selftest {
    /// Its path below `tools/testing/selftests/kvm`.
    pub program: &'static str,
    /// Its arguments.
    pub arguments: &'static str,
}

const fn selftest(program: &'static str, arguments: &'static str) -> Selftest {
    Selftest { program, arguments }
}

/// The tests whose verdicts are held against each other.
pub const SELFTESTS: [Selftest; 19] = [
    selftest("kvm_page_table_test", "-m 2 -v 4 -b 16M -s anonymous"),
    selftest("dirty_log_test", "-m 2 -i 3 -I 10"),
    selftest("dirty_log_perf_test", "-m 2 -v 2 -b 16M -i 2"),
    selftest("demand_paging_test", "-m 2 -v 2 -b 16M"),
    selftest("memslot_perf_test", "-l 1 -s 100"),
    selftest("access_tracking_perf_test", "-m 2 -v 2 -b 16M"),
    selftest("memslot_modification_stress_test", "-m 2 -v 2 -b 16M -i 10"),
    selftest("set_memory_region_test", ""),
    selftest("kvm_create_max_vcpus", ""),
    selftest("kvm_binary_stats_test", ""),
    selftest("rseq_test", ""),
    selftest("steal_time", ""),
    selftest("aarch64/arch_timer", "-n 2 -i 2"),
    selftest("aarch64/debug-exceptions", ""),
    selftest("aarch64/hypercalls", ""),
    selftest("aarch64/psci_test", ""),
    selftest("aarch64/vcpu_width_config", ""),
    selftest("aarch64/vgic_init", ""),
    selftest("aarch64/vgic_irq", ""),
];

/// Builds all tests in a tree, unless that is done, and gives the folder they are in.
///
/// # Errors
/// The headers or the tests cannot be built.
pub fn build(shell: Shell, cache: &Path, tree: &Tree) -> Result<PathBuf, StepError> {
    let folder = cache.join("selftests").join(&tree.id);
    if folder.join(PAGE_TABLE_TEST).is_file() {
        return Ok(folder);
    }
    let partial = partial(&folder);
    let log = partial.join("build.log");
    let headers = partial.join("headers");
    let shim = partial.join("shim");
    shell.remove_dir(&partial)?;
    for folder in [&headers, &shim.join("linux")] {
        shell.make_dir(folder)?;
    }
    let install = make("installing the kernel's headers", &tree.path)
        .arg(format!("O={}", headers.display()))
        .arg("headers")
        .log(&log);
    shell.run(&install)?;
    // Two fixes that came to 6.1.y from later versions without what they need: a header of the
    // kernel's own, and an assertion that 6.1 calls otherwise.
    let header = "linux/bitfield.h";
    shell.copy(&tree.path.join("include").join(header), &shim.join(header))?;
    let flags = format!("-DTEST_ASSERT_EQ=ASSERT_EQ -I{}", shim.display());
    let programs: Vec<&str> = SELFTESTS.iter().map(|test| test.program).collect();
    let include = headers.join("usr/include");
    let source = tree.path.join("tools/testing/selftests/kvm");
    let tests = make("building the kernel's tests", &source)
        .arg(format!("OUTPUT={}", partial.display()))
        .arg(format!("TEST_GEN_PROGS_aarch64={}", programs.join(" ")))
        .arg(format!("KHDR_INCLUDES=-isystem {}", include.display()))
        .arg(format!("EXTRA_CFLAGS={flags}"))
        .arg("LDFLAGS=-static")
        .arg(format!("-j{}", jobs()))
        .log(&log);
    shell.run(&tests)?;
    shell.remove_dir(&headers)?;
    shell.remove_dir(&folder)?;
    shell.rename(&partial, &folder)?;
    Ok(folder)
}

/// A program and its arguments.
pub type Invocation = (PathBuf, Vec<String>);

/// What to run of the folder that the tests were built into: all of [`SELFTESTS`], or those named.
/// A name with arguments behind it (`dirty_log_test -m 2`) has these instead of the list's.
pub fn invocations(folder: &Path, named: &[String]) -> Vec<Invocation> {
    let invocation = |name: &str, arguments: &str| {
        let arguments = arguments.split_ascii_whitespace().map(str::to_owned);
        (folder.join(name), arguments.collect())
    };
    let listed = |name: &str| SELFTESTS.iter().find(|test| test.program == name);
    if named.is_empty() {
        return SELFTESTS
            .iter()
            .map(|test| invocation(test.program, test.arguments))
            .collect();
    }
    named
        .iter()
        .map(|text| match text.split_once(' ') {
            Some((name, arguments)) => invocation(name, arguments),
            None => invocation(text, listed(text).map_or("", |test| test.arguments)),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_the_lists_unless_given() {
        let named = [
            "rseq_test",
            "kvm_page_table_test",
            "dirty_log_test -m 2 -i 9",
        ];

        let all = invocations(Path::new("/t"), &[]);
        let some = invocations(Path::new("/t"), &named.map(str::to_owned));

        assert_eq!(all.len(), SELFTESTS.len());
        assert!(some[0].1.is_empty());
        assert_eq!(some[1].1.join(" "), SELFTESTS[0].arguments);
        assert_eq!(some[2].0, Path::new("/t/dirty_log_test"));
        assert_eq!(some[2].1, ["-m", "2", "-i", "9"]);
    }
}
