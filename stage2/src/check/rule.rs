// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The rules, each with name, description and source. `docs/checking.md` lists them, and
//! `docs/checker-tests.md` explains how to add one.

use core::fmt;

macro_rules! rules {
    ($($rule:ident: $name:literal, $description:literal, $source:literal;)*) => {
        /// A rule for changes of stage-2 tables.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Rule {
            $(#[doc = $description] $rule,)*
        }

        impl Rule {
            /// Rules in order of declaration.
            pub const ALL: &[Self] = &[$(Self::$rule,)*];

            /// Returns the rule's name, as printed in reports.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$rule => $name,)* }
            }

            /// Returns a one-sentence description of the violation.
            pub const fn description(self) -> &'static str {
                match self { $(Self::$rule => $description,)* }
            }

            /// Returns the rule's source: a rule or subject of the Arm Architecture Reference Manual
            /// (DDI 0487), or a kernel function. Sections have other numbers in each issue of the
            /// manual; its rules keep their names.
            pub const fn source(self) -> &'static str {
                match self { $(Self::$rule => $source,)* }
            }
        }
    };
}

rules! {
    BreakBeforeMake: "break-before-make",
        "A valid entry replaces another without an invalid one in between.",
        "Arm ARM R_WHZWS, R_DDMVT (break-before-make)";
    BlockSizeChange: "block-size-change",
        "A block or run changes its size without nT: the CPUs may take TLB conflict aborts.",
        "Arm ARM R_WHZWS, R_KFLJB, R_FCPSG (FEAT_BBM)";
    ContiguousRun: "contiguous-run",
        "The entries of a contiguous run differ or are incomplete when the lock is released.",
        "Arm ARM R_NGLXZ (misprogramming of the Contiguous bit)";
    MakeBeforeInvalidated: "make-before-invalidated",
        "An entry is made while a CPU may still hold the old one.",
        "Arm ARM R_DDMVT, R_GPPYH";
    CombinedNotInvalidated: "combined-not-invalidated",
        "Stage-2 entries are invalidated, but entries combined with stage 1 are not.",
        "Arm ARM R_VZZVZ (VMALLE1 after IPAS2E1)";
    VmidNotCurrent: "vmid-not-current",
        "A TLBI has another VMID or no ISB before it, or a VMID changes its guest in the TLBs.",
        "Arm ARM R_VZZVZ (current VMID); context synchronization";
    VmidNotRestored: "vmid-not-restored",
        "An operation ends without restoring the VMID.",
        "Linux: __tlb_switch_to_host()";
    WrongTtl: "wrong-ttl",
        "The TTL hint of a TLBI differs from the level of the leaf, or names another granule.",
        "Arm ARM R_SQXYZ (FEAT_TTL), R_XKMMX";
    TableRemovalSpan: "table-removal-span",
        "A table is removed without a non-leaf invalidation of all addresses that it spans.",
        "Arm ARM R_NSDNR, R_SQXYZ (IPAS2L, TTL)";
    RangeNotEncodable: "range-not-encodable",
        "A range invalidation covers more pages than one instruction encodes.",
        "Arm ARM R_QKRKL (TLBI by range)";
    ReductionNotComplete: "reduction-not-complete",
        "An operation that removes a permission or a mapping ends while a CPU may still hold it.",
        "Arm ARM R_GPPYH, R_PSMWS (DSB completes TLBI)";
    LogReadTooEarly: "log-read-too-early",
        "The dirty bitmap is read and cleared while a CPU can write without a fault.",
        "Linux: kvm_vm_ioctl_get_dirty_log()";
    ReusedWhileReachable: "reused-while-reachable",
        "The host reuses memory that a CPU can still reach.",
        "Arm ARM R_LXHLD; Linux: kvm_unmap_hva_range()";
    NoProgress: "no-progress",
        "A vCPU resumes after a permission fault while its own TLB may hold the old entry.",
        "Arm ARM R_SQBCS (entries that deny a permission may be cached)";
    TableNotPublished: "table-not-published",
        "A table is linked before all CPUs are guaranteed to observe its contents.",
        "Arm ARM R_TGRMW (a table walk is a separate observer)";
    UncleanReachable: "unclean-reachable",
        "Memory that is not clean to the PoC becomes reachable.",
        "Arm ARM, mismatched memory attributes";
    DeviceCmo: "device-cmo",
        "A CMO is issued on a device.",
        "Linux: kvm_is_device_pfn()";
    UnfinishedCmo: "unfinished-cmo",
        "An entry is broken or the lock released while a CMO is not complete.",
        "Arm ARM, completion of cache instructions; Linux: dcache_clean_inval_poc()";
    ReturnedUnclean: "returned-unclean",
        "The host reuses memory without a CMO after the TLB invalidation.",
        "Arm ARM, mismatched memory attributes";
    NeedlessCmo: "needless-cmo",
        "A data cache CMO is issued although FEAT_S2FWB makes it needless.",
        "Arm ARM, FEAT_S2FWB";
    StaleInstructions: "stale-instructions",
        "Memory becomes executable while an I-cache may hold older instructions.",
        "Arm ARM, concurrent modification of instructions (DC, DSB, IC, DSB)";
    FreedWhileWalked: "freed-while-walked",
        "A table is freed while it is linked or a CPU may walk it.",
        "Arm ARM R_SQBCS, R_LXHLD";
    FreedInGracePeriod: "freed-in-grace-period",
        "A table is freed while a shared walker may be in it.",
        "Linux: stage2_free_unlinked_table_rcu_cb()";
    TableNotOwned: "table-not-owned",
        "A table that was freed or never allocated is used.",
        "Linux: kvm_pgtable_mm_ops";
    WrongReferences: "wrong-references",
        "The reference count of a table is not 1 plus its valid entries.",
        "Linux: stage2_pte_is_counted()";
    LockedEntry: "locked-entry",
        "A locked entry is overwritten by another CPU or left locked.",
        "Linux: stage2_pte_is_locked()";
    SharedStore: "shared-store",
        "A shared walker changes an entry by a plain store.",
        "Linux: stage2_try_set_pte()";
    StaleLookUp: "stale-look-up",
        "An entry is made from a page lookup that an mmu_notifier has invalidated.",
        "Linux: mmu_invalidate_retry()";
    NotMarkedDirty: "not-marked-dirty",
        "A writable leaf of logged memory is not marked dirty, or is larger than a page.",
        "Linux: mark_page_dirty_in_slot()";
    SplitRelaxed: "split-relaxed",
        "A split relaxes or remaps entries other than the one that faulted.",
        "Linux: kvm_pgtable_stage2_create_unlinked()";
    SleepUnderLock: "sleep-under-lock",
        "Memory is allocated, which may sleep, under the lock.",
        "Linux: might_sleep()";
    EmptyMemcache: "empty-memcache",
        "A table is taken from an empty memcache.",
        "Linux: kvm_mmu_memory_cache_alloc()";
    LockDiscipline: "lock-discipline",
        "The lock is taken twice, released twice, or not held by a CPU that writes a linked table.",
        "Linux: mmu_lock";
    Misaligned: "misaligned",
        "The output address of a leaf is not aligned to its size.",
        "Arm ARM, VMSAv8-64 block and page descriptors";
    OutsideSlot: "outside-slot",
        "A leaf does not map the memory of the memslot at its address.",
        "Linux: fault_supports_stage2_huge_mapping()";
}

impl Rule {
    /// Returns whether a violation is seen only by the holds on the table's lock.
    pub(super) const fn requires_lock(self) -> bool {
        matches!(
            self,
            // Without a lock, it is unknown which table splits a block and which one follows later.
            Self::SplitRelaxed | Self::LockDiscipline | Self::SharedStore | Self::VmidNotRestored
        )
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
