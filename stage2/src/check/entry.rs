// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Properties of an entry of either stage, as far as the models of tables and TLBs depend on them.

use core::{
    fmt::Debug,
    ops::{Add, Sub},
};

use super::held_entries::Removed;
use crate::{
    address::{Ipa, PhysAddr},
    descriptor::{Descriptor, EntryKind, MemoryType},
    geometry::Level,
    operations::{Scope, Tlbi},
};

/// FnXS of a stage-2 leaf: accesses have no XS attribute, whatever stage 1 selects (FEAT_XS).
const FNXS: u64 = 1 << 11;

/// The input address of a translation.
pub(super) trait InputAddress:
    Copy + Ord + Debug + Add<u64, Output = Self> + Sub<Output = u64>
{
    /// The lowest address.
    const LOWEST: Self;

    /// Rounds down to a multiple of `size`, a power of two.
    fn align_down(self, size: u64) -> Self;
}

impl InputAddress for Ipa {
    const LOWEST: Self = Self(0);

    fn align_down(self, size: u64) -> Self {
        Self::align_down(self, size)
    }
}

/// An entry of a table.
pub(super) trait TableEntry: Copy + Eq + Debug {
    /// The addresses that the table translates.
    type Input: InputAddress;
    /// An entry whose bits are all 0.
    const EMPTY: Self;

    /// Returns the type of the entry at a level.
    fn kind(self, level: Level) -> EntryKind;

    /// Returns the address of the memory or of the next table.
    fn address(self) -> PhysAddr;

    /// Returns whether the entry is valid and has the Contiguous bit.
    fn is_contiguous(self) -> bool;

    /// Returns whether two entries may belong to one contiguous run.
    fn may_share_run(self, other: Self) -> bool;

    /// Returns whether accesses by the leaf may have the XS attribute.
    fn has_xs(self) -> bool;

    /// Returns whether the entry is valid.
    fn is_valid(self) -> bool {
        !matches!(self.kind(Level::PAGE), EntryKind::Invalid | EntryKind::Locked)
    }

    /// Returns whether the entry is a valid leaf at `level`.
    fn is_leaf(self, level: Level) -> bool {
        matches!(self.kind(level), EntryKind::Leaf(_))
    }
}

impl TableEntry for Descriptor {
    type Input = Ipa;
    const EMPTY: Self = Self::EMPTY;

    fn kind(self, level: Level) -> EntryKind {
        Self::kind(self, level)
    }

    fn address(self) -> PhysAddr {
        Self::address(self)
    }

    fn is_contiguous(self) -> bool {
        Self::is_contiguous(self)
    }

    fn may_share_run(self, other: Self) -> bool {
        Self::may_share_run(self, other)
    }

    fn has_xs(self) -> bool {
        // Stage 1 may also select a device on normal memory: an invalidation nXS is then accepted
        // although it may not suffice.
        self.attributes().memory != MemoryType::Normal && self.0 & FNXS == 0
    }
}

/// A TLB invalidation, as the models see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Invalidation<A> {
    /// The addresses to which it applies; `None` for all.
    pub(super) range: Option<InvalidatedRange<A>>,
    pub(super) removed: Removed,
    pub(super) scope: Scope,
    /// Indicates the qualifier nXS.
    pub(super) is_nxs: bool,
}

/// The TTL hint of an invalidation (FEAT_TTL): the level of the leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TtlHint {
    /// No hint: leaves of all levels are removed.
    Unknown,
    Level(Level),
    /// A hint, or a range, of another granule: no entry needs to be removed (Arm ARM R_SQXYZ, R_XKMMX).
    Wrong,
}

impl From<Option<Level>> for TtlHint {
    fn from(level: Option<Level>) -> Self {
        level.map_or(Self::Unknown, Self::Level)
    }
}

/// The addresses and entries to which an invalidation applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct InvalidatedRange<A> {
    pub(super) first: A,
    /// The bytes; 1 for a single address.
    pub(super) size: u64,
    pub(super) ttl: TtlHint,
    /// Indicates that entries of tables are not removed.
    pub(super) leaf_only: bool,
}

impl<A> InvalidatedRange<A> {
    /// Returns whether leaves of a level are removed.
    pub(super) fn removes_leaf(&self, level: Level) -> bool {
        match self.ttl {
            TtlHint::Unknown => true,
            TtlHint::Level(hint) => hint == level,
            TtlHint::Wrong => false,
        }
    }

    /// Returns whether the entries of a level that point at tables are removed. With a hint, those
    /// above its level are removed from a range (Arm ARM C5.5, TLBI RIPAS2E1: non-leaf entries up to
    /// but not including the level of TTL), and none of a single address.
    pub(super) fn removes_table(&self, level: Level) -> bool {
        let is_covered = match self.ttl {
            TtlHint::Unknown => true,
            TtlHint::Level(hint) => self.size > 1 && level < hint,
            TtlHint::Wrong => false,
        };
        is_covered && !self.leaf_only
    }
}

impl Invalidation<Ipa> {
    /// Returns an invalidation of stage 2, or of entries combined with it.
    pub(super) fn of_stage2(kind: Tlbi) -> Self {
        let range = |first, size, ttl: Option<Level>, leaf_only| {
            Some(InvalidatedRange { first, size, ttl: ttl.into(), leaf_only })
        };
        let (range, removed) = match kind {
            Tlbi::Ipa { ipa, ttl, leaf_only, .. } => {
                (range(ipa, 1, ttl, leaf_only), Removed::Stage2)
            }
            Tlbi::Range { ipa, size, ttl, leaf_only, .. } => {
                (range(ipa, size, ttl, leaf_only), Removed::Stage2)
            }
            Tlbi::Stage1 { .. } => (None, Removed::Combined),
            Tlbi::All { .. } => (None, Removed::Everything),
        };
        Self { range, removed, scope: kind.scope(), is_nxs: false }
    }
}
