// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Policies of the engine and the fault path.
//!
//! Each field of [`Policy`] is one technique that a kernel may use; the presets combine them as
//! kernels do (Linux: `arch/arm64/kvm/hyp/pgtable.c` and `arch/arm64/kvm/mmu.c`).

use core::str::FromStr;

use thiserror::Error;

/// Lock mode of the fault path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Locking {
    /// Exclusive lock: one fault at a time.
    Exclusive,
    /// Shared lock to relax permissions under dirty logging, otherwise exclusive lock (6.1).
    SharedRelax,
    /// Shared lock: walkers change entries by compare-and-swap.
    Shared,
}

/// Placement of the CMOs for memory that a fault maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CmoPlacement {
    /// CMOs in the fault path, for every fault, even if the map changes nothing.
    FaultPath,
    /// CMOs in the map walker, between break and make.
    BetweenBreakAndMake,
    /// CMOs in the map walker, before the break.
    BeforeBreak,
}

/// Order of making a block and freeing the table that it replaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoalesceOrder {
    /// Free before make.
    FreeFirst,
    /// Make before free.
    MakeFirst,
}

/// Handling of an existing leaf that differs only in permissions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExistingLeaf {
    /// Replaces the leaf by break-before-make (5.10).
    Replace,
    /// Keeps the leaf; the guest retries (from 6.1).
    Retry,
    /// Relaxes the leaf's permissions.
    Relax,
}

/// Condition for topping up the memcache in the fault path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TopUpCondition {
    /// Translation faults, and writes under dirty logging.
    ByFaultStatus,
    /// Faults at an entry whose span exceeds the size of the leaf to be mapped.
    ByFaultLevel,
}

/// Number of entries that one invalidation of an unmap covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnmapBatching {
    /// One entry, or a full batch with FEAT_S2FWB and FEAT_TLBIRANGE (Linux from 6.6: whole range).
    Deferred,
    /// The entries up to this number, at least 1.
    Batch(u8),
    /// Whole tables that lie in the range; otherwise the entries up to this number.
    WholeTables(u8),
}

/// The wait limit of the Linux series `stage2-fault-count`: 65,536 reads of a locked entry.
const LOCKED_ENTRY_READS: u32 = 1 << 16;

/// Policy of the engine and the fault path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Lock mode of the fault path.
    pub locking: Locking,
    /// Placement of the CMOs.
    pub cmo_placement: CmoPlacement,
    /// Order of making a block and freeing the table that it replaces.
    pub coalesce_order: CoalesceOrder,
    /// Handling of an existing leaf.
    pub existing_leaf: ExistingLeaf,
    /// Condition for topping up the memcache.
    pub top_up_condition: TopUpCondition,
    /// Indicates that a split fills the new table with all parts of the block, not only with the
    /// part that faulted.
    pub populates_on_split: bool,
    /// Indicates that block mappings are recovered when dirty logging stops.
    pub recovers_blocks: bool,
    /// Indicates that CMOs for a block skip parts that are mapped at the same address.
    pub skips_mapped_cmos: bool,
    /// Maximum number of reads of an entry that another walker has locked, the first included,
    /// before the guest refaults (`STAGE2_LOCKED_TURNS` of the Linux series). With 0 or 1, walkers
    /// do not wait. Between reads they call [`Operations::pause`](crate::Operations::pause).
    pub locked_entry_reads: u32,
    /// Indicates that the TLB entry of a relaxed leaf is invalidated only on the faulting CPU.
    pub relaxes_locally: bool,
    /// Indicates that range TLBIs (FEAT_TLBIRANGE) invalidate ranges; otherwise all entries of the
    /// VMID are invalidated.
    pub uses_range_tlbi: bool,
    /// Number of entries that one invalidation of an unmap covers.
    pub unmap_batching: UnmapBatching,
    /// Number of cache lines (64 bytes) above which the whole I-cache is invalidated.
    pub max_icache_lines: Option<u64>,
    /// Indicates that each table counts its valid entries (Linux: page references); otherwise the
    /// engine reads a table's entries to determine whether it is empty.
    pub counts_references: bool,
    /// Indicates that exclusive walks set the contiguous hint on pages that fill a run.
    pub sets_contiguous: bool,
    /// Indicates that mapping sizes change without a break where FEAT_BBM allows it. Before a block
    /// replaces a table, the engine then reads all entries of the table.
    pub uses_bbm: bool,
}

/// Error returned for an unknown preset name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "unknown policy; expected one of linux-5.10, linux-5.10+series, linux-6.1, linux-6.12, \
     linux-6.12+wait, linux-6.12+series, granule"
)]
pub struct UnknownPolicy;

impl Policy {
    /// Linux 5.10.
    pub const LINUX_5_10: Self = Self {
        locking: Locking::Exclusive,
        cmo_placement: CmoPlacement::FaultPath,
        coalesce_order: CoalesceOrder::FreeFirst,
        existing_leaf: ExistingLeaf::Replace,
        top_up_condition: TopUpCondition::ByFaultStatus,
        populates_on_split: false,
        recovers_blocks: false,
        skips_mapped_cmos: false,
        locked_entry_reads: 0,
        relaxes_locally: false,
        uses_range_tlbi: false,
        unmap_batching: UnmapBatching::Batch(1),
        max_icache_lines: None,
        counts_references: true,
        sets_contiguous: false,
        uses_bbm: false,
    };
    /// Linux 5.10 with the series `stage2-fault-path`.
    pub const LINUX_5_10_SERIES: Self = Self {
        cmo_placement: CmoPlacement::BeforeBreak,
        coalesce_order: CoalesceOrder::MakeFirst,
        existing_leaf: ExistingLeaf::Relax,
        top_up_condition: TopUpCondition::ByFaultLevel,
        relaxes_locally: true,
        max_icache_lines: Some(512),
        ..Self::LINUX_5_10
    };
    /// Linux 6.1: CMOs in the map walkers, tables freed before the block is made.
    pub const LINUX_6_1: Self = Self {
        locking: Locking::SharedRelax,
        cmo_placement: CmoPlacement::BetweenBreakAndMake,
        existing_leaf: ExistingLeaf::Retry,
        ..Self::LINUX_5_10
    };
    /// Linux 6.12: shared walkers, the block made before the table is freed.
    pub const LINUX_6_12: Self = Self {
        locking: Locking::Shared,
        coalesce_order: CoalesceOrder::MakeFirst,
        relaxes_locally: true,
        uses_range_tlbi: true,
        unmap_batching: UnmapBatching::Deferred,
        max_icache_lines: Some(512),
        ..Self::LINUX_6_1
    };
    /// Linux 6.12 with the first patch of `stage2-fault-count`, which waits for locked entries.
    pub const LINUX_6_12_WAIT: Self =
        Self { locked_entry_reads: LOCKED_ENTRY_READS, ..Self::LINUX_6_12 };
    /// Linux 6.12 with the series `stage2-fault-count`, without the patches outside the page-table
    /// code.
    pub const LINUX_6_12_SERIES: Self = Self {
        populates_on_split: true,
        recovers_blocks: true,
        skips_mapped_cmos: true,
        unmap_batching: UnmapBatching::Batch(64),
        ..Self::LINUX_6_12_WAIT
    };
    /// Combination of every technique.
    pub const GRANULE: Self = Self {
        cmo_placement: CmoPlacement::BeforeBreak,
        existing_leaf: ExistingLeaf::Relax,
        top_up_condition: TopUpCondition::ByFaultLevel,
        populates_on_split: true,
        recovers_blocks: true,
        skips_mapped_cmos: true,
        locked_entry_reads: LOCKED_ENTRY_READS,
        unmap_batching: UnmapBatching::WholeTables(64),
        counts_references: false,
        sets_contiguous: true,
        uses_bbm: true,
        ..Self::LINUX_6_12
    };
    /// Presets by name.
    pub const PRESETS: [(&'static str, Self); 7] = [
        ("linux-5.10", Self::LINUX_5_10),
        ("linux-5.10+series", Self::LINUX_5_10_SERIES),
        ("linux-6.1", Self::LINUX_6_1),
        ("linux-6.12", Self::LINUX_6_12),
        ("linux-6.12+wait", Self::LINUX_6_12_WAIT),
        ("linux-6.12+series", Self::LINUX_6_12_SERIES),
        ("granule", Self::GRANULE),
    ];
}

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Self::PRESETS
            .into_iter()
            .find(|(preset, _)| *preset == name)
            .map(|(_, policy)| policy)
            .ok_or(UnknownPolicy)
    }
}
