// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One observed machine: everything that the checker has to know in addition to the events.

use std::collections::{BTreeMap, BTreeSet};

use granule_stage2::{
    BbmLevel, PhysAddr,
    check::{
        MAX_CPUS, Rule,
        machine::{Hypervisor as ObservedHypervisor, LockType, LockedEntry, Machine, Role},
    },
    geometry::Granule,
};
use granule_types::units::Bytes;
use serde::{Deserialize, Deserializer, Serialize, de};

use super::hypervisor::{Hypervisor, Use};
use crate::values::{LinuxVersion, PageSize};

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
    /// `None` for an image without Linux.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linux: Option<LinuxVersion>,
    pub cpu: String,
    #[serde(deserialize_with = "supported_cpus")]
    pub cpus: u8,
    memory: Bytes,
    /// Page size of the kernel; 4K in a trace that does not say so.
    #[serde(default, skip_serializing_if = "PageSize::is_default")]
    page_size: PageSize,
    lock: Lock,
    /// Mask and value of a locked entry.
    locked_entry: Option<(u64, u64)>,
    /// Level of FEAT_BBM, unless it is that of the identification register.
    #[serde(default, deserialize_with = "known_level", skip_serializing_if = "Option::is_none")]
    bbm: Option<u8>,
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

/// Reads a number of CPUs that the checker supports.
fn supported_cpus<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u8, D::Error> {
    let cpus = u8::deserialize(deserializer)?;
    let refused =
        || de::Error::custom(format!("{cpus} CPUs: the checker supports 1 to {MAX_CPUS}"));
    if (1..=MAX_CPUS).contains(&cpus) { Ok(cpus) } else { Err(refused()) }
}

fn known_level<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u8>, D::Error> {
    let level = Option::<u8>::deserialize(deserializer)?;
    match level.filter(|number| BbmLevel::new(*number).is_none()) {
        Some(number) => Err(de::Error::custom(format!("bbm {number}: expected 0 to 3"))),
        None => Ok(level),
    }
}

/// Returns the number of observed CPUs; the trace of a machine with more is refused.
fn observed_cpus(cpus: u32) -> u8 {
    u8::try_from(cpus).map_or(MAX_CPUS, |cpus| cpus.min(MAX_CPUS))
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
    GetTableReferences,
    PutTable,
    PutTableReferences,
    FreePage,
    ChangeKernel,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct FunctionRole(#[serde(with = "RoleText")] Role);

/// A function of an image without Linux that is observed.
#[derive(Debug, Clone)]
pub struct ObservedSymbol {
    /// Number in the trace.
    pub number: u16,
    pub name: String,
    pub start: u64,
    pub end: u64,
    pub used_for: Use,
}

impl ObservedSymbol {
    /// Returns the arguments of the plugin that report this function, each after a comma.
    pub fn plugin_arguments(&self) -> String {
        let Self { number, start, end, used_for, .. } = self;
        match used_for {
            Use::Role(_) | Use::Memory { .. } => format!(",function={number}:{start:x}:{end:x}"),
            Use::Lock(offset) => {
                format!(",function={number}:{start:x}:{start:x},lock={number}:{offset:x}")
            }
            Use::Free(offset) => format!(",free={start:x}:{offset:x}"),
        }
    }
}

/// A rule that is not applied.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Unapplied {
    pub rule: String,
    pub reason: String,
}

impl Setup {
    /// Returns the setup of a job. The number of CPUs is limited to that of the checker.
    pub fn new(
        linux: LinuxVersion,
        page_size: PageSize,
        hypervisor: &Hypervisor,
        hardware: Hardware<'_>,
    ) -> Self {
        let functions = hypervisor.functions.iter().filter_map(|function| {
            let role = match function.used_for {
                Use::Role(role) | Use::Memory { role, .. } => Some(FunctionRole(role)),
                Use::Lock(_) => None,
                Use::Free(_) => return None,
            };
            Some((function.number, Function { name: function.name.to_owned(), role }))
        });
        let locked_entry = hypervisor.generation.locked_entry;
        let mut setup = Self {
            linux: Some(linux),
            cpu: hardware.cpu.to_owned(),
            cpus: observed_cpus(hardware.cpus),
            memory: hardware.memory,
            page_size,
            lock: match hypervisor.generation.lock {
                LockType::Spinlock => Lock::Spinlock,
                LockType::ReaderWriter => Lock::ReaderWriter,
            },
            locked_entry: locked_entry.map(|locked| (locked.mask, locked.value)),
            bbm: hypervisor.checked.bbm,
            functions: functions.collect(),
            missing: hypervisor.missing.iter().map(|name| (*name).to_owned()).collect(),
            unapplied: Vec::new(),
        };
        setup.unapplied = setup.unapplied();
        setup
    }

    /// Returns the setup of an image without Linux.
    pub fn of_image(functions: &[ObservedSymbol], hardware: Hardware<'_>) -> Self {
        let functions = functions.iter().map(|function| {
            let role = match function.used_for {
                Use::Role(role) | Use::Memory { role, .. } => Some(FunctionRole(role)),
                Use::Lock(_) | Use::Free(_) => None,
            };
            (function.number, Function { name: function.name.clone(), role })
        });
        let mut setup = Self {
            linux: None,
            cpu: hardware.cpu.to_owned(),
            cpus: observed_cpus(hardware.cpus),
            memory: hardware.memory,
            // Until the registers of a guest show it.
            page_size: PageSize::default(),
            lock: Lock::Spinlock,
            locked_entry: None,
            bbm: None,
            functions: functions.collect(),
            missing: Vec::new(),
            unapplied: Vec::new(),
        };
        setup.unapplied = setup.unapplied();
        setup
    }

    /// Returns the rules that cannot be applied, sorted.
    fn unapplied(&self) -> Vec<Unapplied> {
        let mut unapplied = self.hypervisor().unchecked_rules();
        let has = |role| self.functions.values().any(|function| function.role == role);
        // A lock shows when a mapping must be removed, a call also when a permission must be.
        if !has(Some(FunctionRole(Role::Call))) && !has(None) {
            unapplied.push((Rule::ReductionNotComplete, "no end of an operation is known"));
        }
        if !has(None) {
            let rules = [
                Rule::LockDiscipline,
                Rule::SharedStore,
                Rule::VmidNotRestored,
                Rule::SplitRelaxed,
                // Violations that are seen at the end of an operation.
                Rule::ContiguousRun,
                Rule::ReturnedUnclean,
                Rule::TableRemovalSpan,
            ];
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
            locked_entry: self.locked_entry.map(|(mask, value)| LockedEntry { mask, value }),
            granule: match self.page_size {
                PageSize::Kib4 => Granule::K4,
                PageSize::Kib16 => Granule::K16,
                PageSize::Kib64 => Granule::K64,
            },
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
            bbm: self.bbm.and_then(BbmLevel::new),
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
        super::{code::Code, hypervisor::KernelCheck, symbols::SymbolTable},
        *,
    };

    /// Returns the setup of two CPUs and 1G.
    pub fn setup() -> Setup {
        let map = "ffff800010001000 t kvm_vm_ioctl\nffff800010002000 t kvm_init_stage2_mmu\n\
                   ffff800010003000 t kvm_pgtable_stage2_destroy\n";
        let linux: LinuxVersion = "5.10".parse().unwrap();
        let symbols = SymbolTable::parse(map);
        let hypervisor =
            Hypervisor::new(linux, Code { symbols: &symbols, image: &[] }, KernelCheck::default());
        let hardware = Hardware { cpu: "neoverse-n1", cpus: 2, memory: Bytes::gib(1) };
        Setup::new(linux, PageSize::Kib64, &hypervisor, hardware)
    }

    #[test]
    fn an_image_is_checked_by_the_rules_that_its_functions_show() {
        let hardware = Hardware { cpu: "max", cpus: 2, memory: Bytes::mib(64) };
        let observed = |number, used_for| {
            let (name, start, end) = ("f".to_owned(), 0x4020_0000, 0x4020_0040);
            ObservedSymbol { number, name, start, end, used_for }
        };
        let functions = [observed(1, Use::Lock(8)), observed(2, Use::Role(Role::Call))];
        let unapplied = |functions| {
            let disabled = Setup::of_image(functions, hardware).machine().disabled_rules;
            let rules = [Rule::TableRemovalSpan, Rule::ReductionNotComplete, Rule::BreakBeforeMake];
            rules.map(|rule| disabled.contains(&rule))
        };

        assert_eq!(unapplied(&[]), [true, true, false]);
        assert_eq!(unapplied(&functions[..1]), [false, false, false]);
        assert_eq!(unapplied(&functions), [false, false, false]);
        let arguments: String = functions.iter().map(ObservedSymbol::plugin_arguments).collect();
        let expected = ",function=1:40200000:40200000,lock=1:8,function=2:40200000:40200040";
        assert_eq!(arguments, expected);
    }

    #[test]
    fn more_cpus_than_the_checker_supports_are_refused() {
        let text = serde_json::to_string(&setup()).unwrap();
        for cpus in ["0", "65", "255"] {
            let other = text.replace("\"cpus\":2", &format!("\"cpus\":{cpus}"));
            assert_ne!(other, text);

            let error = serde_json::from_str::<Setup>(&other).unwrap_err().to_string();

            assert!(
                error.contains(&format!("{cpus} CPUs: the checker supports 1 to 64")),
                "{error}"
            );
        }
        let most = text.replace("\"cpus\":2", "\"cpus\":64");
        assert_eq!(serde_json::from_str::<Setup>(&most).unwrap().machine().cpus, 64);
    }

    #[test]
    fn the_text_of_a_setup_restores_the_machine() {
        let setup = setup();

        let text = serde_json::to_string(&setup).unwrap();
        let restored: Setup = serde_json::from_str(&text).unwrap();

        assert_eq!(restored, setup);
        let machine = restored.machine();
        assert_eq!(machine.memory, (PhysAddr(0x4000_0000), 1 << 30));
        assert_eq!(machine.hypervisor.granule, Granule::K64);
        assert_eq!(machine.hypervisor.functions, BTreeMap::from([(1, Role::Call)]));
        assert!(machine.disabled_rules.contains(&Rule::OutsideSlot));
        assert!(!machine.disabled_rules.contains(&Rule::BreakBeforeMake));
        assert_eq!(restored.function(2), Some("kvm_init_stage2_mmu"));
    }
}
