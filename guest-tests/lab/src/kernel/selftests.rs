// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lists the kernel's KVM selftests, with arguments that limit each to a minute of emulation, and
//! builds them as static arm64 programs in the cache.
//!
//! The page-table test of Linux 6.1 runs on every base, so that figures are comparable: 6.1 is the
//! first Debian version whose tests cover this path, and its tests run on 5.10. The other tests are
//! those of 6.1, or of a newer base.

use std::path::{Path, PathBuf};

use crate::{
    LabError,
    command::CommandError,
    kernel::{
        git::Checkout,
        toolchain::{Toolchain, parallel_jobs},
    },
    shell::{Shell, partial_path},
    values::LinuxVersion,
};

pub const PAGE_TABLE_TEST: &str = "kvm_page_table_test";

#[derive(Debug)]
pub struct SelftestSuite {
    pub version: LinuxVersion,
    /// Number of the guest mode P48V48_4K, which replaces `MODE` in arguments.
    guest_mode: &'static str,
    /// Tests in `tools/testing/selftests/kvm` in addition to [`COMMON_TESTS`], with arguments.
    additional_tests: &'static str,
}

/// Path of a program relative to its suite's directory, and its arguments.
pub type Invocation = (PathBuf, Vec<String>);

impl SelftestSuite {
    fn tests(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let tests = COMMON_TESTS.split(',').chain(self.additional_tests.split(','));
        tests.map(|test| test.trim().split_once(' ').unwrap_or((test.trim(), "")))
    }

    /// Returns the invocations of the named tests, or of all tests. Arguments after a name
    /// (`dirty_log_test -m 2`) replace the arguments in the list.
    pub fn invocations(&self, named: &[String]) -> Result<Vec<Invocation>, LabError> {
        let invocation = |name: &str, arguments: &str| {
            let arguments = arguments.replace("MODE", self.guest_mode);
            let arguments = arguments.split_ascii_whitespace().map(str::to_owned);
            (PathBuf::from(name), arguments.collect())
        };
        if named.is_empty() {
            return Ok(self.tests().map(|(name, arguments)| invocation(name, arguments)).collect());
        }
        let requested = |text: &String| {
            let (name, arguments) = text.split_once(' ').unwrap_or((text, ""));
            let Some((_, listed)) = self.tests().find(|(listed, _)| *listed == name) else {
                let known: Vec<_> = self.tests().map(|(name, _)| name).collect();
                return Err(LabError::Unusable(format!(
                    "unknown selftest '{name}' of Linux {}; expected one of: {}",
                    self.version,
                    known.join(", ")
                )));
            };
            Ok(invocation(name, if arguments.is_empty() { listed } else { arguments }))
        };
        named.iter().map(requested).collect()
    }

    /// Builds the tests of a tree, unless they are in the cache, and returns their directory.
    pub fn build(
        &self,
        shell: Shell,
        cache: &Path,
        tree: &Checkout,
    ) -> Result<PathBuf, CommandError> {
        let directory = cache.join("selftests").join(tree.tree.to_string());
        // A directory that was built from an older list may lack tests.
        if self.tests().all(|(name, _)| directory.join(name).is_file()) {
            return Ok(directory);
        }
        let partial = partial_path(&directory);
        let log = partial.join("build.log");
        let headers = partial.join("headers");
        let shim = partial.join("shim");
        // By default, tests write generated headers to the tree.
        let generated = partial.join("generated");
        shell.remove_dir(&partial)?;
        for directory in [&headers, &shim.join("linux"), &generated.join("tools")] {
            shell.create_dir(directory)?;
        }
        let toolchain = Toolchain::new(shell, &[])?;
        let install = toolchain
            .make("installing the kernel headers", &tree.path)
            .arg(format!("O={}", headers.display()))
            .arg("headers")
            .log(&log);
        shell.run(&install)?;
        let include = headers.join("usr/include");
        let source = tree.path.join("tools/testing/selftests/kvm");
        let mut tests = toolchain
            .make("building the kernel's selftests", &source)
            .arg(format!("OUTPUT={}", partial.display()))
            .arg(format!("abs_objdir={}", generated.display()))
            .arg(format!("KHDR_INCLUDES=-isystem {}", include.display()))
            .arg("LDFLAGS=-static")
            .arg(format!("-j{}", parallel_jobs()));
        if self.version == LINUX_6_1.version {
            // Backports in 6.1.y require a kernel header and TEST_ASSERT_EQ, ASSERT_EQ in 6.1.
            let header = "linux/bitfield.h";
            shell.copy(&tree.path.join("include").join(header), &shim.join(header))?;
            let programs: Vec<&str> = self.tests().map(|(name, _)| name).collect();
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
}

pub fn suite_for_base(base: Option<LinuxVersion>) -> &'static SelftestSuite {
    [&LINUX_6_12, &LINUX_7_3]
        .into_iter()
        .find(|suite| Some(suite.version) == base)
        .unwrap_or(&LINUX_6_1)
}

const COMMON_TESTS: &str = "kvm_page_table_test -m MODE -v 4 -b 16M -s anonymous, \
    dirty_log_test -m MODE -i 3 -I 10, dirty_log_perf_test -m MODE -v 2 -b 16M -i 2, \
    demand_paging_test -m MODE -v 2 -b 16M, memslot_perf_test -l 1 -s 100, \
    access_tracking_perf_test -m MODE -v 2 -b 16M, \
    memslot_modification_stress_test -m MODE -v 2 -b 16M -i 10, set_memory_region_test, \
    kvm_create_max_vcpus, kvm_binary_stats_test, rseq_test, steal_time";

/// Suite of the page-table test, and of bases without a suite.
pub const LINUX_6_1: SelftestSuite = SelftestSuite {
    version: LinuxVersion { major: 6, minor: 1 },
    guest_mode: "2",
    additional_tests: "aarch64/aarch32_id_regs, aarch64/arch_timer -n 2 -i 2, \
          aarch64/debug-exceptions -i 100, aarch64/get-reg-list, aarch64/hypercalls, \
          aarch64/psci_test, aarch64/vcpu_width_config, aarch64/vgic_init, aarch64/vgic_irq",
};

const LINUX_6_12: SelftestSuite = SelftestSuite {
    version: LinuxVersion { major: 6, minor: 12 },
    guest_mode: "3",
    additional_tests: "arch_timer -n 2 -i 2, coalesced_io_test, get-reg-list, guest_print_test, \
          aarch64/aarch32_id_regs, aarch64/arch_timer_edge_cases -i 1, \
          aarch64/debug-exceptions -i 100, aarch64/hypercalls, aarch64/no-vgic-v3, \
          aarch64/page_fault_test, aarch64/psci_test, aarch64/set_id_regs, aarch64/smccc_filter, \
          aarch64/vcpu_width_config, aarch64/vgic_init, aarch64/vgic_irq, aarch64/vgic_lpi_stress, \
          aarch64/vpmu_counter_access",
};

const LINUX_7_3: SelftestSuite = SelftestSuite {
    version: LinuxVersion { major: 7, minor: 3 },
    guest_mode: "3",
    additional_tests: "arch_timer -n 2 -i 2, coalesced_io_test, get-reg-list, guest_memfd_test, \
          guest_print_test, irqfd_test, mmu_stress_test -m 1 -s 1 -c 2, vm_types_test, \
          arm64/aarch32_id_regs, arm64/arch_timer_edge_cases -i 1, arm64/at, \
          arm64/debug-exceptions, arm64/external_aborts, arm64/hello_el2, arm64/hidden_features, \
          arm64/host_sve, arm64/hypercalls, arm64/idreg-idst, arm64/kvm-uuid, arm64/mmio_sign_ext, \
          arm64/no-vgic, arm64/page_fault_test, arm64/psci_test, arm64/sea_to_user, \
          arm64/set_id_regs, arm64/smccc_filter, arm64/stage2_block_transitions, \
          arm64/vcpu_width_config, arm64/vgic_init, arm64/vgic_irq, arm64/vgic_its_save, \
          arm64/vgic_lpi_stress, arm64/vgic_v5, arm64/vpmu_counter_access",
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn given_arguments_replace_those_of_the_list() {
        let named = ["rseq_test", "kvm_page_table_test", "dirty_log_test -m 2 -i 9"];

        let all = LINUX_6_1.invocations(&[]).unwrap();
        let some = LINUX_6_1.invocations(&named.map(str::to_owned)).unwrap();

        assert_eq!(all.len(), 21);
        assert!(some[0].1.is_empty());
        assert_eq!(some[1].1.join(" "), "-m 2 -v 4 -b 16M -s anonymous");
        assert_eq!(some[2].0, Path::new("dirty_log_test"));
        assert_eq!(some[2].1, ["-m", "2", "-i", "9"]);
    }

    #[test]
    fn a_new_base_has_its_own_tests() {
        let error = suite_for_base(None).invocations(&["arm64/at".to_owned()]);

        assert!(suite_for_base("7.3".parse().ok()).tests().any(|(name, _)| name == "arm64/at"));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("Linux 6.1; expected one of: kvm_page"), "{error}");
    }
}
