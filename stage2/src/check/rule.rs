// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The rules, each with its name and its source.
//!
//! Of the list that the numbers are from, two permit something and so cannot be broken: that an
//! invalid entry takes no invalidation before it becomes valid (7), and that a cleared access flag
//! may stay in TLBs (10). Two have parts that no table shows: how long the host keeps a page (19),
//! and what a hypervisor returns to its user (21); the fault path (`fault`) keeps them by its shape.

use core::fmt;

macro_rules! rules {
    ($($(#[$doc:meta])* $rule:ident, $number:literal, $name:literal, $source:literal;)*) => {
        /// A rule that a change of stage-2 tables must keep.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Rule {
            $($(#[$doc])* $rule,)*
        }

        impl Rule {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$rule,)*];

            /// Its name.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$rule => $name,)* }
            }

            /// Its number in the project's list of what a checker must enforce.
            pub const fn number(self) -> u8 {
                match self { $(Self::$rule => $number,)* }
            }

            /// Where it comes from: section of the Arm manual (DDI 0487), or the kernel's function.
            pub const fn source(self) -> &'static str {
                match self { $(Self::$rule => $source,)* }
            }
        }
    };
}

rules! {
    /// A valid entry takes another's place without an invalid one between.
    BreakBeforeMake, 1, "break-before-make", "D8.16.1";
    /// A block changes its size in a way that the CPUs' FEAT_BBM level does not cover.
    BlockSizeChange, 2, "block-size-change", "D8.16.2 (FEAT_BBM)";
    /// Entries of a contiguous run do not agree, or are not all there, when the lock is released.
    ContiguousRun, 1, "contiguous-run", "D8.7.1 (misprogramming of the Contiguous bit)";
    /// An entry is made while a CPU may still hold the old one.
    MakeBeforeInvalidated, 3, "make-before-invalidated", "D8.16.1, D8.14.4";
    /// Stage 2 was invalidated, what was combined with stage 1 was not.
    CombinedNotInvalidated, 3, "combined-not-invalidated", "D8.14.4 (VMALLE1 behind IPAS2E1)";
    /// A TLB invalidation issues while the VMID is another's, or was switched without an ISB.
    VmidNotCurrent, 4, "vmid-not-current", "D8.14.4; K1.2.4 (context synchronization)";
    /// An operation ends with another VMID in place than it began with.
    VmidNotRestored, 4, "vmid-not-restored", "Linux: __tlb_switch_to_host()";
    /// A TTL hint names another level than the leaf's.
    WrongTtl, 5, "wrong-ttl", "D8.14.5 (FEAT_TTL)";
    /// A table is removed without a non-leaf invalidation over all that it spans.
    TableRemovalSpan, 5, "table-removal-span", "D8.14.4";
    /// A range invalidation covers what one instruction cannot.
    RangeNotEncodable, 6, "range-not-encodable", "C5.5 (TLBI RIPAS2E1IS)";
    /// An operation that takes a permission or a mapping away ends before every CPU has lost it.
    ReductionNotComplete, 8, "reduction-not-complete", "D8.14.4; B2.3.12";
    /// The log reads clean while a CPU can write unseen.
    LogReadTooEarly, 8, "log-read-too-early", "Linux: kvm_vm_ioctl_get_dirty_log()";
    /// Memory returns to the host while a CPU can reach it.
    ReusedWhileReachable, 8, "reused-while-reachable", "D8.14.4; Linux: kvm_unmap_hva_range()";
    /// A vCPU goes on after a permission fault while its own TLB may still hold the old entry.
    NoProgress, 9, "no-progress", "D8.14.1 (permission faults may be cached)";
    /// A table is linked before its contents are sure to be seen.
    TableNotPublished, 11, "table-not-published", "B2.3.7; D8.2.6";
    /// Memory becomes reachable that is not clean to the point of coherency.
    UncleanReachable, 12, "unclean-reachable", "B2.8 (mismatched attributes), D7.5.9.3";
    /// Memory that is no normal memory of the host's is maintained.
    DeviceMaintained, 12, "device-maintained", "Linux: kvm_is_device_pfn()";
    /// An entry is broken, or the lock released, while maintenance is not complete: a window that
    /// was to be short has it inside.
    UnfinishedMaintenance, 12, "unfinished-maintenance", "D7.5.9.3; Linux: dcache_clean_inval_poc() ends with DSB";
    /// Memory returns to the host without maintenance behind the invalidation.
    ReturnedUnclean, 13, "returned-unclean", "B2.8 (mismatched attributes)";
    /// The D-side is maintained although FEAT_S2FWB makes it needless.
    NeedlessMaintenance, 14, "needless-maintenance", "D8.6.6 (FEAT_S2FWB)";
    /// Memory becomes executable with stale instructions possible.
    StaleInstructions, 15, "stale-instructions", "B2.4.4; D7.5.9.4 (IC after DC, then DSB)";
    /// A table is freed while it is linked, or a CPU may walk it.
    FreedWhileWalked, 16, "freed-while-walked", "D8.2.6; D8.14.4";
    /// A table is freed under a shared walker.
    FreedInGracePeriod, 16, "freed-in-grace-period", "Linux: stage2_free_unlinked_table_rcu_cb()";
    /// A table that was freed, or never allocated, is used.
    TableNotOwned, 16, "table-not-owned", "Linux: kvm_pgtable_mm_ops";
    /// A table's count is not 1 and its valid entries.
    WrongReferences, 17, "wrong-references", "Linux: stage2_pte_is_counted()";
    /// A locked entry is met, stolen, or left behind.
    LockedEntry, 18, "locked-entry", "Linux: stage2_pte_is_locked()";
    /// A shared walker changes an entry by a plain store.
    SharedStore, 18, "shared-store", "Linux: stage2_try_set_pte()";
    /// Something is installed from a page lookup that is void.
    StaleLookUp, 19, "stale-look-up", "Linux: mmu_invalidate_retry()";
    /// A writable leaf was not marked dirty when the log reads clean, or is too large for the log.
    NotMarkedDirty, 20, "not-marked-dirty", "Linux: mark_page_dirty_in_slot()";
    /// The parts that a block is split into permit more than the block did, not only the one that
    /// was asked for.
    SplitWidened, 20, "split-widened", "Linux: kvm_pgtable_stage2_create_unlinked()";
    /// Memory is allocated under the lock.
    SleepUnderLock, 21, "sleep-under-lock", "Linux: might_sleep()";
    /// A table is drawn from an empty memcache.
    EmptyMemcache, 21, "empty-memcache", "Linux: kvm_mmu_memory_cache_alloc()";
    /// The lock is taken twice, released twice, or kept.
    LockDiscipline, 21, "lock-discipline", "Linux: mmu_lock";
    /// A leaf's address is not aligned to its level.
    Misaligned, 22, "misaligned", "D8.3.1";
    /// A leaf maps other memory than what is the guest's at that address.
    OutsideSlot, 22, "outside-slot", "Linux: fault_supports_stage2_huge_mapping()";
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
