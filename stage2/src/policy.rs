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
    /// Exclusive: one fault at a time.
    Exclusive,
    /// Shared for relaxing permissions under dirty logging, otherwise exclusive (6.1).
    SharedRelax,
    /// Shared: entries are changed by compare-and-swap.
    Shared,
}

/// Place of the CMOs for memory that the guest is about to access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CmoPlacement {
    /// In the fault path, for every fault, independent of what the map changes.
    FaultPath,
    /// In the map handler, between break and make.
    BetweenBreakAndMake,
    /// In the map handler, before the break.
    BeforeBreak,
}

/// Order of installing a block and freeing the table that it replaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coalesce {
    /// Free the table, then install the block.
    FreeFirst,
    /// Install the block, then free the table.
    InstallFirst,
}

/// Handling of an existing leaf that differs only in permissions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExistingLeaf {
    /// Replace the leaf by break-before-make (5.10).
    Replace,
    /// Keep the leaf; the guest retries (from 6.1).
    Retry,
    /// Relax the leaf's permissions.
    Relax,
}

/// Condition for topping up the memcache in the fault path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TopUp {
    /// Translation faults, and writes under dirty logging.
    Always,
    /// Faults at an entry whose span exceeds the size of the leaf to be mapped.
    ByFaultLevel,
}

/// Number of entries that one invalidation of an unmap covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmap {
    /// One entry, or a full batch with FEAT_S2FWB and FEAT_TLBIRANGE (Linux from 6.6: whole range).
    Deferred,
    /// Up to this many entries, at least 1.
    Batch(u8),
    /// Whole tables that lie in the range; otherwise up to this many entries.
    Tables(u8),
}

/// The wait limit of the Linux series `stage2-fault-count`: 65,536 reads of a locked entry, about
/// 100us.
const LOCKED_ENTRY_TURNS: u32 = 1 << 16;

/// Policy of the engine and the fault path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Lock mode of the fault path.
    pub locking: Locking,
    /// Place of the CMOs.
    pub cmo: CmoPlacement,
    /// Order of installing a block and freeing the table that it replaces.
    pub coalesce: Coalesce,
    /// Handling of an existing leaf.
    pub existing_leaf: ExistingLeaf,
    /// Condition for topping up the memcache.
    pub top_up: TopUp,
    /// Set if a split fills the new table with all parts of the block; otherwise it fills only the
    /// part that faulted.
    pub populate_on_split: bool,
    /// Set if block mappings are recovered when dirty logging stops.
    pub recover_blocks: bool,
    /// Set if CMOs for a block skip parts that are mapped at the same address.
    pub skip_mapped: bool,
    /// Maximum number of reads of an entry that another walker has locked, the first included,
    /// before the guest refaults (`STAGE2_LOCKED_TURNS` of the Linux series). With 0 or 1, walkers
    /// do not wait. Between reads they call [`Operations::pause`](crate::Operations::pause).
    pub locked_entry_turns: u32,
    /// Set if the TLB entry of a relaxed leaf is invalidated only on the faulting CPU.
    pub local_relax: bool,
    /// Set if range TLBIs (FEAT_TLBIRANGE) invalidate ranges; otherwise all entries of the VMID are
    /// invalidated.
    pub range_invalidation: bool,
    /// Number of entries that one invalidation of an unmap covers.
    pub unmap: Unmap,
    /// Number of cache lines (64 bytes) above which the whole I-cache is invalidated.
    pub icache_lines: Option<u64>,
    /// Set if each table counts its valid entries (Linux: page references); otherwise the engine
    /// reads a table's entries to determine whether it is empty.
    pub count_references: bool,
    /// Set if exclusive walks set the contiguous hint on pages that fill a run.
    pub contiguous: bool,
    /// Set if mapping sizes change without a break where FEAT_BBM allows it. Before a block
    /// replaces a table, the engine then reads all entries of the table.
    pub use_bbm: bool,
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
        cmo: CmoPlacement::FaultPath,
        coalesce: Coalesce::FreeFirst,
        existing_leaf: ExistingLeaf::Replace,
        top_up: TopUp::Always,
        populate_on_split: false,
        recover_blocks: false,
        skip_mapped: false,
        locked_entry_turns: 0,
        local_relax: false,
        range_invalidation: false,
        unmap: Unmap::Batch(1),
        icache_lines: None,
        count_references: true,
        contiguous: false,
        use_bbm: false,
    };
    /// Linux 5.10 with the series `stage2-fault-path`.
    pub const LINUX_5_10_SERIES: Self = Self {
        cmo: CmoPlacement::BeforeBreak,
        coalesce: Coalesce::InstallFirst,
        existing_leaf: ExistingLeaf::Relax,
        top_up: TopUp::ByFaultLevel,
        local_relax: true,
        icache_lines: Some(512),
        ..Self::LINUX_5_10
    };
    /// Linux 6.1: CMOs in the map walkers, tables freed before the block is installed.
    pub const LINUX_6_1: Self = Self {
        locking: Locking::SharedRelax,
        cmo: CmoPlacement::BetweenBreakAndMake,
        existing_leaf: ExistingLeaf::Retry,
        ..Self::LINUX_5_10
    };
    /// Linux 6.12: shared walkers, the block installed before the table is freed.
    pub const LINUX_6_12: Self = Self {
        locking: Locking::Shared,
        coalesce: Coalesce::InstallFirst,
        local_relax: true,
        range_invalidation: true,
        unmap: Unmap::Deferred,
        icache_lines: Some(512),
        ..Self::LINUX_6_1
    };
    /// Linux 6.12 with only the first patch of `stage2-fault-count`: it waits for locked entries.
    pub const LINUX_6_12_WAIT: Self =
        Self { locked_entry_turns: LOCKED_ENTRY_TURNS, ..Self::LINUX_6_12 };
    /// Linux 6.12 with the series `stage2-fault-count`, without the patches outside the page-table
    /// code.
    pub const LINUX_6_12_SERIES: Self = Self {
        populate_on_split: true,
        recover_blocks: true,
        skip_mapped: true,
        unmap: Unmap::Batch(64),
        ..Self::LINUX_6_12_WAIT
    };
    /// Combination of all techniques.
    pub const GRANULE: Self = Self {
        cmo: CmoPlacement::BeforeBreak,
        existing_leaf: ExistingLeaf::Relax,
        top_up: TopUp::ByFaultLevel,
        populate_on_split: true,
        recover_blocks: true,
        skip_mapped: true,
        locked_entry_turns: LOCKED_ENTRY_TURNS,
        unmap: Unmap::Tables(64),
        count_references: false,
        contiguous: true,
        use_bbm: true,
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
