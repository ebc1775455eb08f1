// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Facts about KVM that the checker requires: the properties of its tables in each version of Linux, and
//! the functions whose calls it observes.
//!
//! To support another version, add a row to [`GENERATIONS`]; to observe another function, add a row
//! to [`HOOKS`]. If a kernel lacks the function of a row, the rules of this row are not applied, and
//! the report names both.

use granule_stage2::check::{
    Rule,
    machine::{LockType, Role},
};

use super::symbols::SymbolTable;
use crate::values::LinuxVersion;

/// Properties of stage-2 tables from a version on.
#[derive(Debug)]
pub struct Generation {
    /// First version, as (major, minor). Of a range of versions whose sources were not compared, the
    /// row of the older one applies.
    since: (u32, u32),
    /// Type of mmu_lock.
    pub lock: LockType,
    /// Mask and value of an invalid entry that a shared walker has locked.
    pub locked_entry: Option<(u64, u64)>,
}

/// Generations, the newest last.
const GENERATIONS: [Generation; 4] = [
    Generation { since: (5, 10), lock: LockType::Spinlock, locked_entry: None },
    // KVM_HAVE_MMU_RWLOCK; walks are exclusive.
    Generation { since: (5, 18), lock: LockType::ReaderWriter, locked_entry: None },
    // KVM_INVALID_PTE_LOCKED is bit 10.
    Generation {
        since: (6, 2),
        lock: LockType::ReaderWriter,
        locked_entry: Some((u64::MAX, 1 << 10)),
    },
    // KVM_INVALID_PTE_TYPE_MASK is bits 63 to 60, KVM_INVALID_PTE_TYPE_LOCKED is 1.
    Generation {
        since: (7, 2),
        lock: LockType::ReaderWriter,
        locked_entry: Some((0xf << 60 | 1, 1 << 60)),
    },
];

/// Use of an observed function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Events with this role: its calls.
    Role(Role),
    /// Address of mmu_lock: its first argument plus these bytes.
    Lock(u64),
    /// Frees the tables whose root is named by the pointer at its first argument plus these bytes.
    Free(u64),
}

/// A function whose calls are observed.
#[derive(Debug)]
pub struct Hook {
    /// Names in different versions. The first one that the kernel has is observed.
    symbols: &'static [&'static str],
    used_for: Use,
    /// Rules that are not applied without the function.
    rules: &'static [Rule],
}

/// Observed functions, numbered from 1 in this order.
const HOOKS: [Hook; 3] = [
    Hook {
        symbols: &["kvm_vm_ioctl"],
        used_for: Use::Role(Role::Call),
        rules: &[Rule::ReductionNotComplete],
    },
    // Its first argument is struct kvm, which begins with mmu_lock.
    Hook {
        symbols: &["kvm_init_stage2_mmu"],
        used_for: Use::Lock(0),
        rules: &[Rule::LockDiscipline, Rule::SharedStore, Rule::VmidNotRestored],
    },
    // Its first argument is struct kvm_pgtable, whose second word is the root.
    Hook {
        symbols: &["kvm_pgtable_stage2_destroy_range", "kvm_pgtable_stage2_destroy"],
        used_for: Use::Free(8),
        rules: &[],
    },
];

/// Rules about events that no hook observes, and the reason.
const UNOBSERVED: [(&[Rule], &str); 4] = [
    (&[Rule::OutsideSlot, Rule::DeviceCmo], "memslots are not observed"),
    (
        &[Rule::NotMarkedDirty, Rule::LogReadTooEarly],
        "marks and reads of the dirty bitmap are not observed",
    ),
    (
        &[Rule::StaleLookUp, Rule::ReusedWhileReachable],
        "page lookups and mmu_notifier calls are not observed",
    ),
    (
        &[
            Rule::FreedWhileWalked,
            Rule::FreedInGracePeriod,
            Rule::WrongReferences,
            Rule::SleepUnderLock,
            Rule::EmptyMemcache,
            Rule::NoProgress,
        ],
        "allocations, page counts, shared walks and aborts are not observed",
    ),
];

/// An observed function of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedFunction {
    /// Number in the trace.
    pub number: u16,
    pub name: &'static str,
    pub start: u64,
    pub end: u64,
    pub used_for: Use,
}

/// A rule that is not applied to a kernel, and the reason.
pub type UnappliedRule = (Rule, String);

/// KVM of one kernel.
#[derive(Debug)]
pub struct Hypervisor {
    pub generation: &'static Generation,
    pub functions: Vec<ObservedFunction>,
    /// In the order of the rules.
    pub unapplied: Vec<UnappliedRule>,
}

impl Hypervisor {
    /// Returns KVM of a kernel with this version and these symbols.
    pub fn new(version: LinuxVersion, symbols: &SymbolTable) -> Self {
        let LinuxVersion { major, minor } = version;
        let mut rows = GENERATIONS.iter().rev();
        let generation = rows.find(|row| row.since <= (major, minor)).unwrap_or(&GENERATIONS[0]);
        let mut functions = Vec::new();
        let mut unapplied: Vec<UnappliedRule> = Vec::new();
        for (number, hook) in (1..).zip(&HOOKS) {
            let found = hook.symbols.iter().find_map(|name| Some((*name, symbols.range(name)?)));
            match found {
                Some((name, range)) => functions.push(ObservedFunction {
                    number,
                    name,
                    start: range.start,
                    end: range.end,
                    used_for: hook.used_for,
                }),
                None => {
                    let reason = format!("the kernel lacks {}", hook.symbols.join(" and "));
                    unapplied.extend(hook.rules.iter().map(|rule| (*rule, reason.clone())));
                }
            }
        }
        for (rules, reason) in UNOBSERVED {
            unapplied.extend(rules.iter().map(|rule| (*rule, reason.to_owned())));
        }
        unapplied.sort();
        Self { generation, functions, unapplied }
    }

    /// Returns the arguments of the plugin that report these functions, each after a comma.
    pub fn plugin_arguments(&self) -> String {
        let mut arguments = String::new();
        for ObservedFunction { number, start, end, used_for, .. } in &self.functions {
            let function = format!(",function={number}:{start:x}:{end:x}");
            arguments += &match used_for {
                Use::Role(_) => function,
                Use::Lock(offset) => format!("{function},lock={number}:{offset:x}"),
                Use::Free(offset) => format!(",free={start:x}:{offset:x}"),
            };
        }
        arguments
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "ffff8000100234b0 t kvm_vm_ioctl\nffff800010024000 t next\n\
                       ffff80001002e150 T kvm_init_stage2_mmu\nffff80001002e200 t next\n\
                       ffff800010053f30 T kvm_pgtable_stage2_destroy\n";

    fn version(text: &str) -> LinuxVersion {
        text.parse().unwrap()
    }

    #[test]
    fn a_version_between_two_rows_is_described_by_the_older_one() {
        let symbols = SymbolTable::parse(MAP);
        let locked = |text| Hypervisor::new(version(text), &symbols).generation.locked_entry;

        assert_eq!(["5.10", "6.1"].map(locked), [None, None]);
        assert_eq!(["6.2", "6.12", "7.0"].map(locked), [Some((u64::MAX, 1 << 10)); 3]);
        assert_eq!(locked("7.3"), Some((0xf000_0000_0000_0001, 1 << 60)));
    }

    #[test]
    fn functions_become_arguments_of_the_plugin() {
        let hypervisor = Hypervisor::new(version("5.10"), &SymbolTable::parse(MAP));

        let arguments = hypervisor.plugin_arguments();

        let expected = ",function=1:ffff8000100234b0:ffff800010024000\
                        ,function=2:ffff80001002e150:ffff80001002e200,lock=2:0\
                        ,free=ffff800010053f30:8";
        assert_eq!(arguments, expected);
    }

    #[test]
    fn the_rules_of_a_missing_function_are_not_applied() {
        let map = MAP.replace("kvm_init_stage2_mmu", "inlined");

        let hypervisor = Hypervisor::new(version("5.10"), &SymbolTable::parse(&map));

        let reason = |rule| hypervisor.unapplied.iter().find(|(other, _)| *other == rule);
        let (_, of_lock) = reason(Rule::LockDiscipline).unwrap();
        assert_eq!(of_lock, "the kernel lacks kvm_init_stage2_mmu");
        assert!(reason(Rule::OutsideSlot).is_some());
        assert!(reason(Rule::BreakBeforeMake).is_none());
    }

    #[test]
    fn no_rule_is_both_of_a_hook_and_unobserved() {
        let unobserved = UNOBSERVED.iter().flat_map(|(rules, _)| rules.iter());
        let unobserved: Vec<_> = unobserved.collect();

        let both = HOOKS.iter().flat_map(|hook| hook.rules).find(|rule| unobserved.contains(rule));

        assert_eq!(both, None);
    }
}
