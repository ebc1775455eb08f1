// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How the engine and the fault path go about their work, one choice at a time.
//!
//! Each field is one idea that a kernel has or has not; the presets put them together as kernels do.
//! The line numbers behind the presets are in Linux's `arch/arm64/kvm/hyp/pgtable.c` and `mmu.c`.

use core::str::FromStr;

use thiserror::Error;

/// Which lock the fault path takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Locking {
    /// One at a time.
    Exclusive,
    /// Shared where a leaf's permissions grow while the log is on, otherwise exclusive (6.1).
    SharedRelax,
    /// Shared: entries are changed by compare-and-swap.
    Shared,
}

/// Where memory is made ready for the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CmoPlacement {
    /// In the fault path, for every fault, whatever the map then does.
    FaultPath,
    /// Where a leaf is installed, between break and make.
    BetweenBreakAndMake,
    /// Where a leaf is installed, before the break.
    BeforeBreak,
}

/// When a table that a block replaces is taken down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coalesce {
    /// Before the block is installed.
    FreeFirst,
    /// After.
    InstallFirst,
    /// After, and the block's memory is not made ready: the idea as it was first published. Wrong
    /// where a part was never mapped (the checker: `unclean-reachable`); for telling what its figures are made of.
    InstallWithoutCmo,
}

/// What is done with a leaf that is there already and differs in permissions alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExistingLeaf {
    /// It is broken and made anew (5.10).
    Replace,
    /// It is left, and the guest tries again (6.1 on).
    Retry,
    /// It is given the permissions that it lacks.
    Relax,
}

/// When the memcache is topped up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TopUp {
    /// For translation faults, and for writes while the log is on.
    Always,
    /// Where the entry that faulted spans more than what will be mapped.
    ByFaultLevel,
}

/// What the memcache is topped up to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reserve {
    /// All that it holds, once it has fewer tables than any one mapping may need (Linux).
    Capacity,
    /// The tables that are missing between the entry that faulted and what will be mapped. If more
    /// are missing by then, the guest faults again.
    Missing,
}

/// How many leaves unmap takes away with one invalidation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmap {
    /// One; where nothing has to be cleaned and a range can be invalidated (FEAT_S2FWB and
    /// FEAT_TLBIRANGE), as many as the batch holds (Linux from 6.6 on: all).
    Deferred,
    /// This many, at least 1.
    Batch(u8),
    /// Whole tables where they are in the range, otherwise this many.
    Tables(u8),
}

/// All choices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// The fault path's lock.
    pub locking: Locking,
    /// Where memory is made ready.
    pub cmo: CmoPlacement,
    /// When replaced tables go.
    pub coalesce: Coalesce,
    /// What becomes of a leaf that is there.
    pub existing_leaf: ExistingLeaf,
    /// When the memcache is topped up.
    pub top_up: TopUp,
    /// To what.
    pub reserve: Reserve,
    /// Whether a split block's table is filled with its parts, or only where the fault is.
    pub populate_on_split: bool,
    /// Whether blocks are put together again when the log is switched off.
    pub recover_blocks: bool,
    /// Whether parts that are mapped already at the same address are left out of maintenance.
    pub skip_mapped: bool,
    /// How many turns a walker waits for an entry that another has locked, at any level, before the
    /// guest faults again; 0 does not wait. In each turn it calls
    /// [`Operations::pause`](crate::Operations::pause) and reads the entry.
    pub locked_entry_turns: u32,
    /// Whether a permission that grows is invalidated on the faulting CPU alone.
    pub local_relax: bool,
    /// Whether a range is invalidated as one where CPUs can (FEAT_TLBIRANGE), or the whole guest.
    pub range_invalidation: bool,
    /// Unmap's invalidations.
    pub unmap: Unmap,
    /// Lines beyond which the whole I-cache is invalidated.
    pub icache_lines: Option<u64>,
    /// Whether every table counts its valid entries (Linux: the page's references), or is looked
    /// through where it may be empty.
    pub count_references: bool,
    /// Whether pages that fill a contiguous run get the hint, where the only walker maps them.
    pub contiguous: bool,
    /// Whether block sizes change without a break where FEAT_BBM allows it: at splits, when blocks
    /// are recovered, and when a fault puts one together. (A block that the only walker maps over
    /// pages whose memory is ready is broken: that is shorter than looking all of them through.)
    pub use_bbm: bool,
}

/// Why a text names no policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "no such policy: use linux-5.10, linux-5.10+series, linux-6.1, linux-6.12, \
         linux-6.12+wait, linux-6.12+series or granule"
)]
pub struct UnknownPolicy;

impl Policy {
    /// Linux 5.10 as it is.
    pub const LINUX_5_10: Self = Self {
        locking: Locking::Exclusive,
        cmo: CmoPlacement::FaultPath,
        coalesce: Coalesce::FreeFirst,
        existing_leaf: ExistingLeaf::Replace,
        top_up: TopUp::Always,
        reserve: Reserve::Capacity,
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
    /// Linux 5.10 with this repository's series `stage2-fault-path`.
    pub const LINUX_5_10_SERIES: Self = Self {
        cmo: CmoPlacement::BeforeBreak,
        coalesce: Coalesce::InstallFirst,
        existing_leaf: ExistingLeaf::Relax,
        top_up: TopUp::ByFaultLevel,
        local_relax: true,
        icache_lines: Some(512),
        ..Self::LINUX_5_10
    };
    /// Linux 6.1: maintenance in the handlers, but the block comes last.
    pub const LINUX_6_1: Self = Self {
        locking: Locking::SharedRelax,
        cmo: CmoPlacement::BetweenBreakAndMake,
        existing_leaf: ExistingLeaf::Retry,
        ..Self::LINUX_5_10
    };
    /// Linux 6.12: shared walkers, the block first.
    pub const LINUX_6_12: Self = Self {
        locking: Locking::Shared,
        coalesce: Coalesce::InstallFirst,
        local_relax: true,
        range_invalidation: true,
        unmap: Unmap::Deferred,
        icache_lines: Some(512),
        ..Self::LINUX_6_1
    };
    /// Linux 6.12, and waiting for entries that others have locked: so that it can be told what
    /// that alone is worth.
    pub const LINUX_6_12_WAIT: Self = Self {
        locked_entry_turns: 64,
        ..Self::LINUX_6_12
    };
    /// The same with this repository's series `stage2-fault-count`. What the series has one vCPU resolve for all that fault on a page is no
    /// matter of the table, and not in here.
    pub const LINUX_6_12_SERIES: Self = Self {
        top_up: TopUp::ByFaultLevel,
        populate_on_split: true,
        recover_blocks: true,
        skip_mapped: true,
        unmap: Unmap::Batch(64),
        ..Self::LINUX_6_12_WAIT
    };
    /// Everything at once.
    pub const GRANULE: Self = Self {
        cmo: CmoPlacement::BeforeBreak,
        existing_leaf: ExistingLeaf::Relax,
        top_up: TopUp::ByFaultLevel,
        populate_on_split: true,
        recover_blocks: true,
        skip_mapped: true,
        locked_entry_turns: 64,
        unmap: Unmap::Tables(64),
        count_references: false,
        contiguous: true,
        use_bbm: true,
        ..Self::LINUX_6_12
    };
    /// The presets by name.
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
