// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One observed machine: everything that the checker has to know in addition to the events.

use std::collections::{BTreeMap, BTreeSet};

use granule_stage2::{
    PhysAddr,
    check::{
        Rule,
        machine::{Hypervisor as ObservedHypervisor, LockType, Machine, Role},
    },
};
use granule_types::units::Bytes;
use serde::{Deserialize, Serialize};

use super::hypervisor::{Hypervisor, Use};
use crate::values::LinuxVersion;

/// First address of the memory of QEMU's `virt` machine.
const MEMORY_START: u64 = 0x4000_0000;

/// Emulated hardware of a job.
#[derive(Debug, Clone, Copy)]
pub struct Hardware<'a> {
    /// CPU model, as QEMU names it.
    pub cpu: &'a str,
    pub cpus: u32,
    pub memory: Bytes,
}

/// An observed machine. It is a line of a kept trace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setup {
    pub linux: LinuxVersion,
    pub cpu: String,
    cpus: u8,
    memory: Bytes,
    lock: Lock,
    /// Mask and value of a locked entry.
    locked_entry: Option<(u64, u64)>,
    /// Functions by their numbers in the trace.
    functions: BTreeMap<u16, Function>,
    /// Observed functions that the kernel lacks.
    pub missing: Vec<String>,
    pub unapplied: Vec<Unapplied>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Lock {
    Spinlock,
    ReaderWriter,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Function {
    name: String,
    role: Option<FunctionRole>,
}

/// Text form of a [`Role`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", remote = "Role")]
enum RoleText {
    Call,
    Abort,
    PrepareMemory,
    CommitMemory,
    MarkDirty { argument: u8 },
    LookUp,
    ReadSequence,
    ChangeSequence,
    Allocate { has_size: bool },
    GetTable,
    PutTable,
    FreePage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct FunctionRole(#[serde(with = "RoleText")] Role);

/// A rule that is not applied.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Unapplied {
    pub rule: String,
    pub reason: String,
}

impl Setup {
    /// Returns the setup of a job. The number of CPUs is limited to that of the checker.
    pub fn new(linux: LinuxVersion, hypervisor: &Hypervisor, hardware: Hardware<'_>) -> Self {
        let functions = hypervisor.functions.iter().filter_map(|function| {
            let role = match function.used_for {
                Use::Role(role) | Use::Memory { role, .. } => Some(FunctionRole(role)),
                Use::Lock(_) => None,
                Use::Free(_) => return None,
            };
            Some((function.number, Function { name: function.name.to_owned(), role }))
        });
        let mut setup = Self {
            linux,
            cpu: hardware.cpu.to_owned(),
            cpus: u8::try_from(hardware.cpus).unwrap_or(u8::MAX),
            memory: hardware.memory,
            lock: match hypervisor.generation.lock {
                LockType::Spinlock => Lock::Spinlock,
                LockType::ReaderWriter => Lock::ReaderWriter,
            },
            locked_entry: hypervisor.generation.locked_entry,
            functions: functions.collect(),
            missing: hypervisor.missing.iter().map(|name| (*name).to_owned()).collect(),
            unapplied: Vec::new(),
        };
        setup.unapplied = setup.unapplied(hypervisor);
        setup
    }

    /// Returns the rules that cannot be applied, sorted.
    fn unapplied(&self, hypervisor: &Hypervisor) -> Vec<Unapplied> {
        let has = |test: fn(&Use) -> bool| {
            hypervisor.functions.iter().any(|function| test(&function.used_for))
        };
        let mut unapplied = self.hypervisor().unchecked_rules();
        if !has(|used_for| matches!(used_for, Use::Role(Role::Call))) {
            unapplied.push((Rule::ReductionNotComplete, "no call by user space is known"));
        }
        if !has(|used_for| matches!(used_for, Use::Lock(_))) {
            let rules = [Rule::LockDiscipline, Rule::SharedStore, Rule::VmidNotRestored];
            unapplied.extend(rules.map(|rule| (rule, "no function that has the lock is known")));
        }
        let text = |(rule, reason): (Rule, &str)| Unapplied {
            rule: rule.to_string(),
            reason: reason.to_owned(),
        };
        let mut unapplied: Vec<_> = unapplied.into_iter().map(text).collect();
        unapplied.sort();
        unapplied
    }

    /// Returns the hypervisor of the checker.
    fn hypervisor(&self) -> ObservedHypervisor {
        let roles = self.functions.iter().filter_map(|(number, function)| {
            function.role.map(|FunctionRole(role)| (*number, role))
        });
        ObservedHypervisor {
            lock: match self.lock {
                Lock::Spinlock => LockType::Spinlock,
                Lock::ReaderWriter => LockType::ReaderWriter,
            },
            locked_entry: self.locked_entry,
            functions: roles.collect(),
        }
    }

    /// Returns the configuration of the checker.
    pub fn machine(&self) -> Machine {
        let is_disabled =
            |rule: &&Rule| self.unapplied.iter().any(|unapplied| unapplied.rule == rule.name());
        Machine {
            cpus: self.cpus,
            memory: (PhysAddr(MEMORY_START), self.memory.0),
            hypervisor: self.hypervisor(),
            disabled_rules: Rule::ALL.iter().filter(is_disabled).copied().collect::<BTreeSet<_>>(),
        }
    }

    /// Returns the name of a function by its number.
    pub fn function(&self, number: u16) -> Option<&str> {
        self.functions.get(&number).map(|function| function.name.as_str())
    }
}

#[cfg(test)]
pub mod tests {
    use super::{
        super::{code::Code, symbols::SymbolTable},
        *,
    };

    /// Returns the setup of two CPUs and 1G.
    pub fn setup() -> Setup {
        let map = "ffff800010001000 t kvm_vm_ioctl\nffff800010002000 t kvm_init_stage2_mmu\n\
                   ffff800010003000 t kvm_pgtable_stage2_destroy\n";
        let linux: LinuxVersion = "5.10".parse().unwrap();
        let symbols = SymbolTable::parse(map);
        let hypervisor = Hypervisor::new(linux, Code { symbols: &symbols, image: &[] });
        let hardware = Hardware { cpu: "neoverse-n1", cpus: 2, memory: Bytes::gib(1) };
        Setup::new(linux, &hypervisor, hardware)
    }

    #[test]
    fn the_text_of_a_setup_restores_the_machine() {
        let setup = setup();

        let text = serde_json::to_string(&setup).unwrap();
        let restored: Setup = serde_json::from_str(&text).unwrap();

        assert_eq!(restored, setup);
        let machine = restored.machine();
        assert_eq!(machine.memory, (PhysAddr(0x4000_0000), 1 << 30));
        assert_eq!(machine.hypervisor.functions, BTreeMap::from([(1, Role::Call)]));
        assert!(machine.disabled_rules.contains(&Rule::OutsideSlot));
        assert!(!machine.disabled_rules.contains(&Rule::BreakBeforeMake));
        assert_eq!(restored.function(2), Some("kvm_init_stage2_mmu"));
    }
}
