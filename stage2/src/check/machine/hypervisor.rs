// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Properties of a hypervisor that the architecture does not determine.

use alloc::{collections::BTreeMap, vec::Vec};

use super::lock::LockType;
use crate::{check::Rule, descriptor::Descriptor, geometry::Granule};

/// Meaning of a function for the checker. A function may be a single instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A call by user space: when it returns, restrictions of entries have reached all TLBs.
    Call,
    /// Handles an abort of a guest.
    Abort,
    /// Prepares to change the memory of the guest whose lock is at the first argument: of the page
    /// with the number of the second argument, the third one's number of pages, and the flags of
    /// the fourth one. The lowest one logs dirty pages.
    PrepareMemory,
    /// Ends such a change: all later faults observe it. The same arguments.
    CommitMemory,
    /// Marks a page dirty.
    MarkDirty {
        /// The argument with the number of the guest's page, counted from 0.
        argument: u8,
    },
    /// Looks up the host's page for an abort.
    LookUp,
    /// Reads the number of mmu_notifier invalidations, to compare it with the one before the look-up.
    ReadSequence,
    /// Increments the number of mmu_notifier invalidations.
    ChangeSequence,
    /// Allocates tables, and returns the physical address of the first one.
    Allocate {
        /// Indicates that the first argument is the number of bytes; otherwise it is one table.
        has_size: bool,
    },
    /// Takes a reference to the table that contains the physical address of the first argument.
    GetTable,
    /// Takes as many references to that table as the lower half of the second argument says.
    GetTableReferences,
    /// Drops a reference to the table that contains the physical address of the first argument.
    PutTable,
    /// Drops as many references to that table as the lower half of the second argument says.
    PutTableReferences,
    /// Changes the kernel's own tables: when it returns, what it has removed or restricted has been
    /// invalidated.
    ChangeKernel,
    /// Frees the page at the physical address of the first argument, a table or another page.
    FreePage,
}

/// Form of an invalid entry that a walker has locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LockedEntry {
    /// The bits that determine whether the entry is locked.
    pub mask: u64,
    /// The value of these bits in a locked entry.
    pub value: u64,
}

/// A hypervisor.
#[derive(Debug, Clone)]
pub struct Hypervisor {
    /// The type of the lock of stage-2 tables.
    pub lock: LockType,
    /// The entries that a walker has locked. In a hypervisor without locked entries, walkers that share
    /// the lock may only relax permissions.
    pub locked_entry: Option<LockedEntry>,
    /// Size of a page and of a table, until the registers of a guest show it: tables are allocated,
    /// and memory is logged, before that.
    pub granule: Granule,
    /// Functions by the numbers of the trace.
    pub functions: BTreeMap<u16, Role>,
}

impl Hypervisor {
    pub(super) fn role(&self, number: u16) -> Option<Role> {
        self.functions.get(&number).copied()
    }

    pub(super) fn has(&self, role: Role) -> bool {
        self.functions.values().any(|other| *other == role)
    }

    /// Returns the rules that cannot be checked, as no function has the roles that they need, and the
    /// reasons.
    pub fn unchecked_rules(&self) -> Vec<(Rule, &'static str)> {
        let has = |test: fn(&Role) -> bool| self.functions.values().any(test);
        let mut unchecked = Vec::from([
            (Rule::RangeNotEncodable, "an operand cannot express such a range"),
            (Rule::SleepUnderLock, "the trace has no allocations of other memory"),
            (Rule::EmptyMemcache, "the trace has no memcaches"),
            (Rule::DeviceCmo, "the trace has no memslots"),
            (Rule::OutsideSlot, "the trace has no memslots"),
            (Rule::ReusedWhileReachable, "the trace has no memslots"),
            (Rule::LogReadTooEarly, "the trace has no dirty bitmaps"),
        ]);
        if !self.has(Role::Abort) {
            unchecked.push((Rule::NoProgress, "no function that handles aborts is known"));
        }
        let is_mark = |role: &Role| matches!(role, Role::MarkDirty { .. });
        if !(self.has(Role::Abort) && has(is_mark)) {
            unchecked.push((Rule::NotMarkedDirty, "no function that marks pages is known"));
        }
        let sees_sequence = self.has(Role::ReadSequence) || self.has(Role::ChangeSequence);
        if !(self.has(Role::Abort) && self.has(Role::LookUp) && sees_sequence) {
            unchecked.push((Rule::StaleLookUp, "no access to the invalidation sequence is known"));
        }
        let allocates = has(|role| matches!(role, Role::Allocate { .. }));
        if !(allocates && self.has(Role::GetTable) && self.has(Role::PutTable)) {
            let reason = "no function that counts references to tables is known";
            unchecked.push((Rule::WrongReferences, reason));
        }
        if !(self.has(Role::FreePage) || (allocates && self.has(Role::PutTable))) {
            let reason = "no function that frees tables is known";
            unchecked.push((Rule::FreedWhileWalked, reason));
            unchecked.push((Rule::FreedInGracePeriod, reason));
        }
        unchecked
    }

    /// Returns an entry in the model's form: a locked one is [`Descriptor::LOCKED`]; bit 55, which the
    /// engine uses for itself, is clear; and memory that can be executed at EL1 or EL0 (FEAT_XNX) is
    /// executable.
    pub(super) fn normalize(&self, value: u64) -> u64 {
        const VALID: u64 = 1;
        const ENGINE_BIT: u64 = 1 << 55;
        const EXECUTE_NEVER: u64 = 3 << 53;
        const NEVER_AT_ALL: u64 = 2 << 53;
        match self.locked_entry {
            _ if value & VALID != 0 => {
                let is_never = value & EXECUTE_NEVER == NEVER_AT_ALL;
                value & !(ENGINE_BIT | EXECUTE_NEVER) | if is_never { NEVER_AT_ALL } else { 0 }
            }
            Some(locked) if value & locked.mask == locked.value => Descriptor::LOCKED.0,
            _ => value,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_the_form_of_the_model() {
        let hypervisor = Hypervisor {
            lock: LockType::ReaderWriter,
            locked_entry: Some(LockedEntry { mask: 0xf << 60 | 1, value: 1 << 60 }),
            granule: Granule::K4,
            functions: BTreeMap::new(),
        };

        for (value, expected) in [
            (0x0080_0000_0000_07ff, 0x7ff),
            (0x0040_0000_0000_07ff, 0x0040_0000_0000_07ff),
            (0x0020_0000_0000_07ff, 0x7ff),
            (0x0060_0000_0000_07ff, 0x7ff),
            (0x1000_0000_0000_0000, Descriptor::LOCKED.0),
            (0x2000_0000_0000_0000, 0x2000_0000_0000_0000),
        ] {
            assert_eq!(hypervisor.normalize(value), expected, "{value:#x}");
        }
    }
}
