// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lists of the kernel's KVM selftests, with arguments that keep each within a minute of emulation.
//!
//! The page-table test comes from Linux 6.1 for every base, so that figures compare: 6.1 is the
//! first Debian version whose tests cover this path, and its tests still run on 5.10. Other tests
//! come from the base itself where it is newer.

use std::path::PathBuf;

use thiserror::Error;

/// The page-table test.
pub const PAGE_TABLE_TEST: &str = "kvm_page_table_test";

/// A selftest and its arguments.
#[derive(Debug, Clone, Copy)]
pub struct Selftest {
    /// Path below `tools/testing/selftests/kvm`.
    pub program: &'static str,
    /// Arguments; `MODE` stands for the number of the guest mode P48V48_4K.
    arguments: &'static str,
}

const fn selftest(program: &'static str, arguments: &'static str) -> Selftest {
    Selftest { program, arguments }
}

/// The selftests of a version.
#[derive(Debug)]
pub struct Suite {
    pub version: &'static str,
    mode: &'static str,
    own: &'static [Selftest],
}

/// A program, as a path below the directory of its suite, and its arguments.
pub type Invocation = (PathBuf, Vec<String>);

/// Error returned when `--selftest` names an unknown test.
#[derive(Debug, Error)]
#[error("unknown selftest '{name}' of Linux {version}; expected one of: {}", known.join(", "))]
pub struct UnknownSelftest {
    name: String,
    version: &'static str,
    known: Vec<&'static str>,
}

impl Suite {
    /// Returns all selftests.
    pub fn tests(&self) -> impl Iterator<Item = &'static Selftest> {
        COMMON.iter().chain(self.own)
    }

    /// Returns the invocations of the named tests, or of all. Arguments after a name
    /// (`dirty_log_test -m 2`) replace those of the list.
    pub fn invocations(&self, named: &[String]) -> Result<Vec<Invocation>, UnknownSelftest> {
        let invocation = |name: &str, arguments: &str| {
            let arguments = arguments.replace("MODE", self.mode);
            let arguments = arguments.split_ascii_whitespace().map(str::to_owned);
            (PathBuf::from(name), arguments.collect())
        };
        if named.is_empty() {
            let all = self.tests();
            return Ok(all.map(|test| invocation(test.program, test.arguments)).collect());
        }
        named
            .iter()
            .map(|text| {
                let (name, arguments) = text.split_once(' ').unwrap_or((text, ""));
                let listed = self.tests().find(|test| test.program == name);
                let listed = listed.ok_or_else(|| UnknownSelftest {
                    name: name.to_owned(),
                    version: self.version,
                    known: self.tests().map(|test| test.program).collect(),
                })?;
                Ok(match arguments {
                    "" => invocation(name, listed.arguments),
                    given => invocation(name, given),
                })
            })
            .collect()
    }
}

/// Returns the suite of a base.
pub fn suite(base: &str) -> &'static Suite {
    [&LINUX_6_12, &LINUX_7_3].into_iter().find(|suite| suite.version == base).unwrap_or(&LINUX_6_1)
}

/// The suite of the page-table test, and of bases whose own tests are too few.
pub const LINUX_6_1: Suite = Suite {
    version: "6.1",
    mode: "2",
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

/// Tests of every version.
const COMMON: [Selftest; 12] = [
    selftest("kvm_page_table_test", "-m MODE -v 4 -b 16M -s anonymous"),
    selftest("dirty_log_test", "-m MODE -i 3 -I 10"),
    selftest("dirty_log_perf_test", "-m MODE -v 2 -b 16M -i 2"),
    selftest("demand_paging_test", "-m MODE -v 2 -b 16M"),
    selftest("memslot_perf_test", "-l 1 -s 100"),
    selftest("access_tracking_perf_test", "-m MODE -v 2 -b 16M"),
    selftest("memslot_modification_stress_test", "-m MODE -v 2 -b 16M -i 10"),
    selftest("set_memory_region_test", ""),
    selftest("kvm_create_max_vcpus", ""),
    selftest("kvm_binary_stats_test", ""),
    selftest("rseq_test", ""),
    selftest("steal_time", ""),
];

#[cfg(test)]
mod tests {
    use std::path::Path;

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
        let error = suite("5.10").invocations(&["arm64/at".to_owned()]);

        assert!(suite("7.3").tests().any(|t| t.program == "arm64/at"));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("Linux 6.1; expected one of: kvm_page"), "{error}");
    }
}
