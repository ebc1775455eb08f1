// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel tree's own KVM tests, built static for arm64 and kept in the cache.
//!
//! What measures comes from Linux 6.1 whatever the base, so that figures compare: it is the first
//! version of Debian's whose tests cover this path, and one whose tests still run on 5.10. Verdicts
//! come from the base's own tests where it is newer.

use std::path::{Path, PathBuf};

use thiserror::Error;

use super::{
    build::{jobs, make},
    sources::Tree,
    step::{Shell, StepError, partial},
};

/// The test that measures.
pub const PAGE_TABLE_TEST: &str = "kvm_page_table_test";

/// One of the kernel's tests and the arguments that keep it within a minute of emulation.
#[derive(Debug, Clone, Copy)]
pub struct Selftest {
    /// Its path below `tools/testing/selftests/kvm`.
    pub program: &'static str,
    /// Its arguments; `MODE` stands for the number of the guest mode with 48 bits and 4K pages.
    pub arguments: &'static str,
}

const fn selftest(program: &'static str, arguments: &'static str) -> Selftest {
    Selftest { program, arguments }
}

/// A version's tests.
#[derive(Debug)]
pub struct Suite {
    /// The version they are taken from.
    pub version: &'static str,
    mode: &'static str,
    common: &'static [Selftest],
    own: &'static [Selftest],
}

impl Suite {
    /// All of them.
    pub fn tests(&self) -> impl Iterator<Item = &'static Selftest> {
        self.common.iter().chain(self.own)
    }
}

/// The tests whose verdicts are held against each other, for a base version.
pub fn suite(base: &str) -> &'static Suite {
    let newer = [&LINUX_6_12, &LINUX_7_3];
    newer
        .into_iter()
        .find(|suite| suite.version == base)
        .unwrap_or(&LINUX_6_1)
}

/// The tests that measure, and those of bases that have too few of their own.
pub const LINUX_6_1: Suite = Suite {
    version: "6.1",
    mode: "2",
    common: &COMMON,
    own: &[
        selftest("aarch64/aarch32_id_regs", ""),
        selftest("aarch64/arch_timer", "-n 2 -i 2"),
        selftest("aarch64/debug-exceptions", "-i 100"),
        selftest("aarch64/get-reg-list", ""),
        selftest("aarch64/hypercalls", ""),
        selftest("aarch64/psci_test", ""),
        selftest("aarch64/vcpu_width_config", ""),
        selftest("aarch64/vgic_init", ""),
        selftest("aarch64/vgic_irq", ""),
    ],
};

const LINUX_6_12: Suite = Suite {
    version: "6.12",
    mode: "3",
    common: &COMMON,
    own: &[
        selftest("arch_timer", "-n 2 -i 2"),
        selftest("coalesced_io_test", ""),
        selftest("get-reg-list", ""),
        selftest("guest_print_test", ""),
        selftest("aarch64/aarch32_id_regs", ""),
        selftest("aarch64/arch_timer_edge_cases", "-i 1"),
        selftest("aarch64/debug-exceptions", "-i 100"),
        selftest("aarch64/hypercalls", ""),
        selftest("aarch64/no-vgic-v3", ""),
        selftest("aarch64/page_fault_test", ""),
        selftest("aarch64/psci_test", ""),
        selftest("aarch64/set_id_regs", ""),
        selftest("aarch64/smccc_filter", ""),
        selftest("aarch64/vcpu_width_config", ""),
        selftest("aarch64/vgic_init", ""),
        selftest("aarch64/vgic_irq", ""),
        selftest("aarch64/vgic_lpi_stress", ""),
        selftest("aarch64/vpmu_counter_access", ""),
    ],
};

const LINUX_7_3: Suite = Suite {
    version: "7.3",
    mode: "3",
    common: &COMMON,
    own: &[
        selftest("arch_timer", "-n 2 -i 2"),
        selftest("coalesced_io_test", ""),
        selftest("get-reg-list", ""),
        selftest("guest_memfd_test", ""),
        selftest("guest_print_test", ""),
        selftest("irqfd_test", ""),
        selftest("mmu_stress_test", "-m 1 -s 1 -c 2"),
        selftest("vm_types_test", ""),
        selftest("arm64/aarch32_id_regs", ""),
        selftest("arm64/arch_timer_edge_cases", "-i 1"),
        selftest("arm64/at", ""),
        selftest("arm64/debug-exceptions", ""),
        selftest("arm64/external_aborts", ""),
        selftest("arm64/hello_el2", ""),
        selftest("arm64/hidden_features", ""),
        selftest("arm64/host_sve", ""),
        selftest("arm64/hypercalls", ""),
        selftest("arm64/idreg-idst", ""),
        selftest("arm64/kvm-uuid", ""),
        selftest("arm64/mmio_sign_ext", ""),
        selftest("arm64/no-vgic", ""),
        selftest("arm64/page_fault_test", ""),
        selftest("arm64/psci_test", ""),
        selftest("arm64/sea_to_user", ""),
        selftest("arm64/set_id_regs", ""),
        selftest("arm64/smccc_filter", ""),
        selftest("arm64/stage2_block_transitions", ""),
        selftest("arm64/vcpu_width_config", ""),
        selftest("arm64/vgic_init", ""),
        selftest("arm64/vgic_irq", ""),
        selftest("arm64/vgic_its_save", ""),
        selftest("arm64/vgic_lpi_stress", ""),
        selftest("arm64/vgic_v5", ""),
        selftest("arm64/vpmu_counter_access", ""),
    ],
};

/// In every version.
const COMMON: [Selftest; 12] = [
    selftest("kvm_page_table_test", "-m MODE -v 4 -b 16M -s anonymous"),
    selftest("dirty_log_test", "-m MODE -i 3 -I 10"),
    selftest("dirty_log_perf_test", "-m MODE -v 2 -b 16M -i 2"),
    selftest("demand_paging_test", "-m MODE -v 2 -b 16M"),
    selftest("memslot_perf_test", "-l 1 -s 100"),
    selftest("access_tracking_perf_test", "-m MODE -v 2 -b 16M"),
    selftest(
        "memslot_modification_stress_test",
        "-m MODE -v 2 -b 16M -i 10",
    ),
    selftest("set_memory_region_test", ""),
    selftest("kvm_create_max_vcpus", ""),
    selftest("kvm_binary_stats_test", ""),
    selftest("rseq_test", ""),
    selftest("steal_time", ""),
];

/// Builds all tests in a tree, unless that is done, and gives the folder they are in.
///
/// # Errors
/// The headers or the tests cannot be built.
pub fn build(shell: Shell, cache: &Path, tree: &Tree, suite: &Suite) -> Result<PathBuf, StepError> {
    let folder = cache.join("selftests").join(&tree.id);
    // A folder of an earlier list may lack what has come to it since.
    if suite
        .tests()
        .all(|test| folder.join(test.program).is_file())
    {
        return Ok(folder);
    }
    let partial = partial(&folder);
    let log = partial.join("build.log");
    let headers = partial.join("headers");
    let shim = partial.join("shim");
    // Newer tests generate headers, which would otherwise go into the tree.
    let generated = partial.join("generated");
    shell.remove_dir(&partial)?;
    for folder in [&headers, &shim.join("linux"), &generated.join("tools")] {
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
    let include = headers.join("usr/include");
    let source = tree.path.join("tools/testing/selftests/kvm");
    let mut tests = make("building the kernel's tests", &source)
        .arg(format!("OUTPUT={}", partial.display()))
        .arg(format!("abs_objdir={}", generated.display()))
        .arg(format!("KHDR_INCLUDES=-isystem {}", include.display()))
        .arg("LDFLAGS=-static")
        .arg(format!("-j{}", jobs()));
    if suite.version == LINUX_6_1.version {
        shell.copy(&tree.path.join("include").join(header), &shim.join(header))?;
        let programs: Vec<&str> = suite.tests().map(|test| test.program).collect();
        let flags = format!("-DTEST_ASSERT_EQ=ASSERT_EQ -I{}", shim.display());
        tests = tests
            .arg(format!("TEST_GEN_PROGS_aarch64={}", programs.join(" ")))
            .arg(format!("EXTRA_CFLAGS={flags}"));
    }
    let tests = tests.log(&log);
    shell.run(&tests)?;
    shell.remove_dir(&headers)?;
    shell.remove_dir(&folder)?;
    shell.rename(&partial, &folder)?;
    Ok(folder)
}

/// A program, here below its suite's folder, and its arguments.
pub type Invocation = (PathBuf, Vec<String>);

/// What to run of a suite: all of it, or the tests named. A name with arguments behind it
/// (`dirty_log_test -m 2`) has these instead of the list's.
///
/// # Errors
/// A name that the suite has not; all that it has.
pub fn invocations(suite: &Suite, named: &[String]) -> Result<Vec<Invocation>, UnknownTest> {
    let invocation = |name: &str, arguments: &str| {
        let arguments = arguments.replace("MODE", suite.mode);
        let arguments = arguments.split_ascii_whitespace().map(str::to_owned);
        (PathBuf::from(name), arguments.collect())
    };
    if named.is_empty() {
        let all = suite.tests();
        return Ok(all
            .map(|test| invocation(test.program, test.arguments))
            .collect());
    }
    named
        .iter()
        .map(|text| {
            let (name, arguments) = text.split_once(' ').unwrap_or((text, ""));
            let listed = suite.tests().find(|test| test.program == name);
            let listed = listed.ok_or_else(|| UnknownTest {
                name: name.to_owned(),
                version: suite.version,
                known: suite.tests().map(|test| test.program).collect(),
            })?;
            Ok(match arguments {
                "" => invocation(name, listed.arguments),
                given => invocation(name, given),
            })
        })
        .collect()
}

/// A test is asked for that there is not.
#[derive(Debug, Error)]
#[error("--selftest {name}: of Linux {version} there are {}", known.join(", "))]
pub struct UnknownTest {
    name: String,
    version: &'static str,
    known: Vec<&'static str>,
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

        let all = invocations(&LINUX_6_1, &[]).unwrap();
        let some = invocations(&LINUX_6_1, &named.map(str::to_owned)).unwrap();

        assert_eq!(all.len(), 21);
        assert!(some[0].1.is_empty());
        assert_eq!(some[1].1.join(" "), "-m 2 -v 4 -b 16M -s anonymous");
        assert_eq!(some[2].0, Path::new("dirty_log_test"));
        assert_eq!(some[2].1, ["-m", "2", "-i", "9"]);
    }
    #[test]
    fn a_base_has_its_own_tests_where_it_is_new_enough() {
        let error = invocations(suite("5.10"), &["arm64/at".to_owned()]);

        assert!(suite("7.3").tests().any(|t| t.program == "arm64/at"));
        let said = error.unwrap_err().to_string();
        assert!(said.contains("of Linux 6.1 there are kvm_page"), "{said}");
    }
}
