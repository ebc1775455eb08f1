// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Facts about KVM that the checker requires: the properties of its tables in each version of Linux, and
//! the functions whose calls it observes.
//!
//! To support another version, add a row to [`GENERATIONS`]; to observe another function, add a row
//! to [`HOOKS`]. If a kernel lacks the functions that a rule needs, the rule is not applied, and the
//! report names both.

use std::ops::Range;

use granule_stage2::check::machine::{LockType, LockedEntry, Role};

use super::code::Code;
use crate::values::LinuxVersion;

/// Properties of stage-2 tables from a version on.
#[derive(Debug)]
pub struct Generation {
    /// First version, as (major, minor). Of a range of versions whose sources were not compared, the
    /// row of the older one applies.
    since: (u32, u32),
    /// Type of mmu_lock.
    pub lock: LockType,
    /// The invalid entries that a shared walker has locked.
    pub locked_entry: Option<LockedEntry>,
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
        locked_entry: Some(LockedEntry { mask: u64::MAX, value: 1 << 10 }),
    },
    // KVM_INVALID_PTE_TYPE_MASK is bits 63 to 60, KVM_INVALID_PTE_TYPE_LOCKED is 1.
    Generation {
        since: (7, 2),
        lock: LockType::ReaderWriter,
        locked_entry: Some(LockedEntry { mask: 0xf << 60 | 1, value: 1 << 60 }),
    },
];

/// Use of an observed function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Events with this role.
    Role(Role),
    /// Events with this role, about the memslot at the argument `slot`, counted from 0, whose number
    /// of the first page is at `first_page`.
    Memory { role: Role, slot: u8, first_page: u64 },
    /// Address of mmu_lock: its first argument plus these bytes.
    Lock(u64),
    /// Frees the tables whose root is named by the pointer at its first argument plus these bytes.
    Free(u64),
}

/// Observed part of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Calls and returns.
    Calls,
    /// Calls alone.
    Entries,
    /// The increment of the invalidation sequence.
    SequenceIncrement,
    /// Loads of the invalidation sequence.
    SequenceLoads,
}

/// A function that is observed.
#[derive(Debug)]
struct Hook {
    /// First version with this row, and first version without it.
    versions: ((u32, u32), (u32, u32)),
    symbol: &'static str,
    part: Part,
    used_for: Use,
}

const ALL: ((u32, u32), (u32, u32)) = ((0, 0), (u32::MAX, 0));
const BEFORE_5_13: ((u32, u32), (u32, u32)) = ((0, 0), (5, 13));
const SINCE_5_13: ((u32, u32), (u32, u32)) = ((5, 13), (u32::MAX, 0));
const BEFORE_5_17: ((u32, u32), (u32, u32)) = ((0, 0), (5, 17));
const SINCE_5_17: ((u32, u32), (u32, u32)) = ((5, 17), (u32::MAX, 0));

const fn hook(symbol: &'static str, part: Part, used_for: Use) -> Hook {
    Hook { versions: ALL, symbol, part, used_for }
}

const fn role(symbol: &'static str, part: Part, role: Role) -> Hook {
    hook(symbol, part, Use::Role(role))
}

/// Bytes from the number of a memslot's first page to its number of pages, and to its flags.
const SLOT_WORDS: [u64; 2] = [8, 32];

/// A function that changes a memslot, until the nodes of its trees precede the other fields.
const fn old_memory(symbol: &'static str, role: Role, slot: u8) -> Hook {
    let used_for = Use::Memory { role, slot, first_page: 0 };
    Hook { versions: BEFORE_5_17, ..hook(symbol, Part::Entries, used_for) }
}

/// A function that changes a memslot.
const fn memory(symbol: &'static str, role: Role, slot: u8) -> Hook {
    let used_for = Use::Memory { role, slot, first_page: 176 };
    Hook { versions: SINCE_5_17, ..hook(symbol, Part::Entries, used_for) }
}

const PREPARE: &str = "kvm_arch_prepare_memory_region";
const COMMIT: &str = "kvm_arch_commit_memory_region";

/// Observed functions. A kernel may lack some of them: others have their names in other versions, or
/// the compiler has inlined them.
const HOOKS: [Hook; 26] = [
    role("kvm_vm_ioctl", Part::Calls, Role::Call),
    role("kvm_handle_guest_abort", Part::Calls, Role::Abort),
    // Its first argument is struct kvm, which begins with mmu_lock.
    hook("kvm_init_stage2_mmu", Part::Entries, Use::Lock(0)),
    // Their first argument is struct kvm_pgtable, whose second word is the root. A kernel that has
    // the first one frees all tables with it.
    hook("kvm_pgtable_stage2_destroy_range", Part::Entries, Use::Free(8)),
    hook("kvm_pgtable_stage2_destroy", Part::Entries, Use::Free(8)),
    old_memory(PREPARE, Role::PrepareMemory, 1),
    old_memory(COMMIT, Role::CommitMemory, 3),
    memory(PREPARE, Role::PrepareMemory, 2),
    memory(COMMIT, Role::CommitMemory, 2),
    Hook {
        versions: BEFORE_5_13,
        ..role("mark_page_dirty", Part::Entries, Role::MarkDirty { argument: 1 })
    },
    Hook {
        versions: SINCE_5_13,
        ..role("mark_page_dirty_in_slot", Part::Entries, Role::MarkDirty { argument: 2 })
    },
    role("hva_to_pfn", Part::Calls, Role::LookUp),
    role("stage2_memcache_zalloc_page", Part::Calls, Role::Allocate { has_size: false }),
    role("kvm_s2_zalloc_pages_exact", Part::Calls, Role::Allocate { has_size: true }),
    role("kvm_host_get_page", Part::Entries, Role::GetTable),
    // Of stage2-fault-count: the references of all entries of a table at once.
    role("kvm_s2_get_page_refs", Part::Entries, Role::GetTableReferences),
    role("kvm_s2_put_page_refs", Part::Entries, Role::PutTableReferences),
    role("kvm_s2_put_page", Part::Entries, Role::PutTable),
    role("kvm_host_put_page", Part::Entries, Role::PutTable),
    // Before struct kvm_pgtable_mm_ops, the functions that count references are inlined.
    Hook { versions: BEFORE_5_13, ..role("free_pages", Part::Entries, Role::FreePage) },
    // mmu_notifier_seq, since 6.0 mmu_invalidate_seq.
    role(SEQUENCE_CHANGES[0], Part::SequenceIncrement, Role::ChangeSequence),
    role(SEQUENCE_CHANGES[1], Part::SequenceIncrement, Role::ChangeSequence),
    role(SEQUENCE_CHANGES[2], Part::SequenceIncrement, Role::ChangeSequence),
    role("kvm_handle_guest_abort", Part::SequenceLoads, Role::ReadSequence),
    role("user_mem_abort", Part::SequenceLoads, Role::ReadSequence),
    // Of notifier-range, unless the compiler has inlined it.
    role("stage2_fault_retries", Part::SequenceLoads, Role::ReadSequence),
];

/// Observed functions if the kernel's own tables are checked. When one of the first group returns, what
/// it has removed or restricted has been invalidated; `set_direct_map_*_noflush()` leave that to their
/// callers, and `vunmap()` delays it.
const KERNEL_HOOKS: [Hook; 11] = [
    role("set_memory_ro", Part::Calls, Role::ChangeKernel),
    role("set_memory_rw", Part::Calls, Role::ChangeKernel),
    role("set_memory_nx", Part::Calls, Role::ChangeKernel),
    role("set_memory_x", Part::Calls, Role::ChangeKernel),
    role("set_memory_valid", Part::Calls, Role::ChangeKernel),
    role("mark_rodata_ro", Part::Calls, Role::ChangeKernel),
    role("free_initmem", Part::Calls, Role::ChangeKernel),
    role("__set_fixmap", Part::Calls, Role::ChangeKernel),
    role("pmd_free_pte_page", Part::Calls, Role::ChangeKernel),
    role("pud_free_pmd_page", Part::Calls, Role::ChangeKernel),
    role("free_pages", Part::Entries, Role::FreePage),
];

/// Checks of a kernel in addition to those of the tables of its guests, and the CPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KernelCheck {
    /// Also the kernel's own tables.
    pub stage1: bool,
    /// The level of FEAT_BBM, 0 to 3, unless it is that of the identification register.
    pub bbm: Option<u8>,
}

/// Functions that increment the invalidation sequence, in different versions. The first one that a
/// kernel has shows the place of the sequence: in newer versions the last one also increments other
/// words.
const SEQUENCE_CHANGES: [&str; 3] =
    ["kvm_mmu_invalidate_end", "kvm_dec_notifier_count", "kvm_mmu_notifier_invalidate_range_end"];

const READS_SEQUENCE: Use = Use::Role(Role::ReadSequence);

/// Instruction that is never executed, of a kernel without loads of the invalidation sequence: with
/// it, the checker reports each fault that does not compare the sequence.
const NO_LOAD: ObservedFunction = ObservedFunction {
    number: 0,
    name: "kvm_handle_guest_abort",
    start: 0,
    end: 0,
    cold: Vec::new(),
    used_for: READS_SEQUENCE,
};

/// An observed function of a kernel, or one of its instructions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedFunction {
    /// Number in the trace.
    pub number: u16,
    pub name: &'static str,
    pub start: u64,
    /// End, or `start` for an instruction.
    pub end: u64,
    /// Parts that the compiler has split off, of a function whose returns are observed.
    pub cold: Vec<Range<u64>>,
    pub used_for: Use,
}

/// KVM of one kernel.
#[derive(Debug)]
pub struct Hypervisor {
    pub generation: &'static Generation,
    pub functions: Vec<ObservedFunction>,
    /// Functions that the kernel lacks.
    pub missing: Vec<&'static str>,
    pub checked: KernelCheck,
}

impl Hypervisor {
    /// Returns KVM of a kernel with this version and code.
    pub fn new(version: LinuxVersion, code: Code<'_>, checked: KernelCheck) -> Self {
        let version = (version.major, version.minor);
        let mut rows = GENERATIONS.iter().rev();
        let generation = rows.find(|row| row.since <= version).unwrap_or(&GENERATIONS[0]);
        let sequence = SEQUENCE_CHANGES.iter().find_map(|name| code.first_increment(name));
        let mut functions: Vec<ObservedFunction> = Vec::new();
        let mut missing: Vec<&Hook> = Vec::new();
        let applies = |hook: &&Hook| (hook.versions.0..hook.versions.1).contains(&version);
        let of_kernel = KERNEL_HOOKS.iter().filter(|_| checked.stage1);
        // Before 5.13 free_pages() has both uses.
        let is_known = |hook: &&Hook| !(version < (5, 13) && hook.symbol == "free_pages");
        for hook in HOOKS.iter().filter(applies).chain(of_kernel.filter(is_known)) {
            if matches!(hook.used_for, Use::Free(_))
                && functions.iter().any(|one| one.used_for == hook.used_for)
            {
                continue;
            }
            let ranges = ranges(hook, code, sequence.map(|increment| increment.offset));
            // Only kernels with a series change several references at once.
            let optional = matches!(
                hook.used_for,
                Use::Role(Role::GetTableReferences | Role::PutTableReferences)
            );
            if ranges.is_empty() && !optional && matches!(hook.part, Part::Calls | Part::Entries) {
                missing.push(hook);
            }
            for (start, end) in ranges {
                let number = u16::try_from(functions.len() + 1).unwrap_or(u16::MAX);
                let (name, used_for) = (hook.symbol, hook.used_for);
                let cold = match hook.part {
                    Part::Calls => code.symbols.cold_parts(name),
                    _ => Vec::new(),
                };
                functions.push(ObservedFunction { number, name, start, end, cold, used_for });
            }
        }
        if sequence.is_some() && !functions.iter().any(|one| one.used_for == READS_SEQUENCE) {
            let number = u16::try_from(functions.len() + 1).unwrap_or(u16::MAX);
            functions.push(ObservedFunction { number, ..NO_LOAD });
        }
        // Another version has the function by another name.
        missing.retain(|hook| functions.iter().all(|found| found.used_for != hook.used_for));
        let missing = missing.into_iter().map(|hook| hook.symbol).collect();
        Self { generation, functions, missing, checked }
    }

    /// Returns the arguments of the plugin that report these functions, each after a comma.
    pub fn plugin_arguments(&self) -> String {
        // SP_EL0 points at the current task.
        let mut arguments = ",threads=on".to_owned();
        if self.checked.stage1 {
            arguments += ",stage1=on";
        }
        for ObservedFunction { number, start, end, cold, used_for, .. } in &self.functions {
            let mut function = format!(",function={number}:{start:x}:{end:x}");
            for Range { start, end } in cold {
                function += &format!(",cold={number}:{start:x}:{end:x}");
            }
            arguments += &match used_for {
                Use::Role(
                    Role::Allocate { .. }
                    | Role::GetTable
                    | Role::GetTableReferences
                    | Role::PutTable
                    | Role::PutTableReferences
                    | Role::FreePage,
                ) => format!("{function},physical={number}"),
                Use::Memory { slot, first_page, .. } => {
                    let offsets = [0, SLOT_WORDS[0], SLOT_WORDS[1]].map(|word| first_page + word);
                    let load = |(argument, offset): (u8, u64)| {
                        format!(",load={number}:{argument}:{slot}:{offset:x}")
                    };
                    let loads: String = (1..).zip(offsets).map(load).collect();
                    format!("{function},physical={number}{loads}")
                }
                Use::Role(_) => function,
                Use::Lock(offset) => format!("{function},lock={number}:{offset:x}"),
                Use::Free(offset) => format!(",free={start:x}:{offset:x}"),
            };
        }
        arguments
    }
}

/// Returns the addresses of the observed part of a function; `sequence` is the offset of the
/// invalidation sequence in its structure.
fn ranges(hook: &Hook, code: Code<'_>, sequence: Option<u64>) -> Vec<(u64, u64)> {
    let range = code.symbols.range(hook.symbol);
    match hook.part {
        Part::Calls => range.iter().map(|range| (range.start, range.end)).collect(),
        Part::Entries => range.iter().map(|range| (range.start, range.start)).collect(),
        Part::SequenceIncrement => {
            let increment = code.first_increment(hook.symbol);
            let increment = increment.filter(|found| Some(found.offset) == sequence);
            increment.iter().map(|found| (found.address, found.address)).collect()
        }
        Part::SequenceLoads => {
            let loads = sequence.map(|offset| code.loads(hook.symbol, offset));
            loads.into_iter().flatten().map(|address| (address, address)).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::symbols::SymbolTable;

    const MAP: &str = "ffff8000100234b0 t kvm_vm_ioctl\nffff800010024000 t next\n\
                       ffff80001002a000 t kvm_vm_ioctl.cold\nffff80001002a010 t next\n\
                       ffff80001002e150 T kvm_init_stage2_mmu\nffff80001002e200 t next\n\
                       ffff800010053f30 T kvm_pgtable_stage2_destroy\n\
                       ffff800010060000 T mark_page_dirty_in_slot\n\
                       ffff800010061000 T kvm_arch_commit_memory_region\n\
                       ffff800010070000 T kvm_host_get_page\n";

    fn hypervisor(version: &str) -> Hypervisor {
        let symbols = SymbolTable::parse(MAP);
        let code = Code { symbols: &symbols, image: &[] };
        Hypervisor::new(version.parse().unwrap(), code, KernelCheck::default())
    }

    #[test]
    fn a_version_between_two_rows_is_described_by_the_older_one() {
        let locked = |text| {
            let locked = hypervisor(text).generation.locked_entry;
            locked.map(|locked| (locked.mask, locked.value))
        };

        assert_eq!(["5.10", "6.1"].map(locked), [None, None]);
        assert_eq!(["6.2", "6.12", "7.0"].map(locked), [Some((u64::MAX, 1 << 10)); 3]);
        assert_eq!(locked("7.3"), Some((0xf000_0000_0000_0001, 1 << 60)));
    }

    #[test]
    fn functions_become_arguments_of_the_plugin() {
        let arguments = hypervisor("6.1").plugin_arguments();

        let expected = ",threads=on\
                        ,function=1:ffff8000100234b0:ffff800010024000\
                        ,cold=1:ffff80001002a000:ffff80001002a010\
                        ,function=2:ffff80001002e150:ffff80001002e150,lock=2:0\
                        ,free=ffff800010053f30:8\
                        ,function=4:ffff800010061000:ffff800010061000,physical=4\
                        ,load=4:1:2:b0,load=4:2:2:b8,load=4:3:2:d0\
                        ,function=5:ffff800010060000:ffff800010060000\
                        ,function=6:ffff800010070000:ffff800010070000,physical=6";
        assert_eq!(arguments, expected);
    }

    #[test]
    fn a_row_of_other_versions_is_not_missing() {
        let old = hypervisor("5.10");

        assert!(old.missing.contains(&"mark_page_dirty") && old.missing.contains(&"hva_to_pfn"));
        assert!(!old.functions.iter().any(|one| one.name == "mark_page_dirty_in_slot"));
        assert!(!hypervisor("6.1").missing.contains(&"mark_page_dirty"));
        assert!(!old.missing.contains(&"kvm_pgtable_stage2_destroy_range"));
    }

    #[test]
    fn an_increment_of_another_word_is_not_that_of_the_sequence() {
        let map = "ffff800010000000 T _text\nffff800010000000 T kvm_mmu_invalidate_end\n\
                   ffff80001000000c T kvm_mmu_notifier_invalidate_range_end\n\
                   ffff800010000018 T next\n";
        let symbols = SymbolTable::parse(map);
        // ldr x1, [x0, #4880]; add x1, x1, #1; str x1, [x0, #4880]; the same at #4888.
        let code =
            [0xf949_8801_u32, 0x9100_0421, 0xf909_8801, 0xf949_8c01, 0x9100_0421, 0xf909_8c01];
        let image: Vec<_> = code.iter().flat_map(|word| word.to_le_bytes()).collect();

        let hypervisor = Hypervisor::new(
            "7.3".parse().unwrap(),
            Code { symbols: &symbols, image: &image },
            KernelCheck::default(),
        );

        let changes = Use::Role(Role::ChangeSequence);
        let found = hypervisor.functions.iter().filter(|one| one.used_for == changes);
        let found: Vec<_> = found.map(|one| one.start).collect();
        assert_eq!(found, [0xffff_8000_1000_0008]);
    }

    #[test]
    fn a_kernel_that_never_loads_the_sequence_compares_no_look_up() {
        let map = "ffff800010000000 T _text\nffff800010000000 T kvm_mmu_invalidate_end\n\
                   ffff80001000000c T kvm_handle_guest_abort\nffff800010000010 T next\n";
        let symbols = SymbolTable::parse(map);
        // ldr x1, [x0, #4880]; add x1, x1, #1; str x1, [x0, #4880]; then the handler.
        for (handler, number) in [(0xf949_8a62_u32, 3), (0xd65f_03c0, 3)] {
            let code = [0xf949_8801, 0x9100_0421, 0xf909_8801, handler];
            let image: Vec<_> = code.iter().flat_map(|word| word.to_le_bytes()).collect();
            let code = Code { symbols: &symbols, image: &image };

            let hypervisor = Hypervisor::new("6.1".parse().unwrap(), code, KernelCheck::default());

            let reads = hypervisor.functions.iter().filter(|one| one.used_for == READS_SEQUENCE);
            let reads: Vec<_> = reads.map(|one| (one.number, one.start)).collect();
            let expected = if handler == 0xd65f_03c0 { 0 } else { 0xffff_8000_1000_000c };
            assert_eq!(reads, [(number, expected)]);
        }
    }
}
