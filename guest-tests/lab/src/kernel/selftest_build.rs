// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Builds the kernel's KVM selftests, static for arm64, into the cache.

use std::path::{Path, PathBuf};

use crate::{
    command::CommandError,
    kernel::{
        build::{jobs, make},
        selftests::{LINUX_6_1, Suite},
        sources::Tree,
    },
    shell::{Shell, partial},
};

/// Builds the tests of a tree, unless they are in the cache, and returns their directory.
pub fn build(
    shell: Shell,
    cache: &Path,
    tree: &Tree,
    suite: &Suite,
) -> Result<PathBuf, CommandError> {
    let directory = cache.join("selftests").join(&tree.id);
    // A directory that an older list built lacks tests.
    if suite.tests().all(|test| directory.join(test.program).is_file()) {
        return Ok(directory);
    }
    let partial = partial(&directory);
    let log = partial.join("build.log");
    let headers = partial.join("headers");
    let shim = partial.join("shim");
    // Newer tests generate headers, by default in the tree.
    let generated = partial.join("generated");
    shell.remove_dir(&partial)?;
    for directory in [&headers, &shim.join("linux"), &generated.join("tools")] {
        shell.create_dir(directory)?;
    }
    let install = make("installing the kernel headers", &tree.path)
        .arg(format!("O={}", headers.display()))
        .arg("headers")
        .log(&log);
    shell.run(&install)?;
    let include = headers.join("usr/include");
    let source = tree.path.join("tools/testing/selftests/kvm");
    let mut tests = make("building the kernel's selftests", &source)
        .arg(format!("OUTPUT={}", partial.display()))
        .arg(format!("abs_objdir={}", generated.display()))
        .arg(format!("KHDR_INCLUDES=-isystem {}", include.display()))
        .arg("LDFLAGS=-static")
        .arg(format!("-j{}", jobs()));
    if suite.version == LINUX_6_1.version {
        // Two backports in 6.1.y lack what they need: a kernel header, and TEST_ASSERT_EQ, which
        // 6.1 calls ASSERT_EQ.
        let header = "linux/bitfield.h";
        shell.copy(&tree.path.join("include").join(header), &shim.join(header))?;
        let programs: Vec<&str> = suite.tests().map(|test| test.program).collect();
        let flags = format!("-DTEST_ASSERT_EQ=ASSERT_EQ -I{}", shim.display());
        tests = tests
            .arg(format!("TEST_GEN_PROGS_aarch64={}", programs.join(" ")))
            .arg(format!("EXTRA_CFLAGS={flags}"));
    }
    shell.run(&tests.log(&log))?;
    shell.remove_dir(&headers)?;
    shell.remove_dir(&directory)?;
    shell.rename(&partial, &directory)?;
    Ok(directory)
}
