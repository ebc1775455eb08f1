// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Table walks of a CPU, and lookups of entries by software.

use super::Stage2;
use crate::{
    address::{Ipa, PhysAddr, TableAddress},
    descriptor::{Attributes, Descriptor},
    geometry::{Geometry, Granule, Level},
    operations::Operations,
};

/// Type of a guest's memory access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// A load.
    Read,
    /// A store.
    Write,
    /// An instruction fetch.
    Fetch,
}

/// Cause of a stage-2 fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FaultStatus {
    /// Translation fault: no valid entry.
    Translation,
    /// Access flag fault: the leaf's access flag is clear.
    AccessFlag,
    /// Permission fault: the leaf does not permit the access.
    Permission,
}

/// A stage-2 fault, as ESR_EL2 and HPFAR_EL2 report it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Guest address.
    pub ipa: Ipa,
    /// Access that faulted.
    pub access: Access,
    /// Cause.
    pub status: FaultStatus,
    /// Level of the entry that caused the fault.
    pub level: Level,
}

/// Translation of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Translation {
    /// Host address.
    pub phys: PhysAddr,
    /// Level of the leaf.
    pub level: Level,
    /// Attributes of the leaf.
    pub attributes: Attributes,
}

impl Attributes {
    /// Returns whether the attributes permit the access.
    pub const fn permits(&self, access: Access) -> bool {
        match access {
            Access::Read => self.read,
            Access::Write => self.write,
            Access::Fetch => self.read && self.execute,
        }
    }
}

/// A CPU's table walker. It needs neither the policy nor the lock.
#[derive(Debug, Clone, Copy)]
pub struct Walker {
    geometry: Geometry,
    root: TableAddress,
}

impl Walker {
    /// Walks the table as a CPU does for an access (Arm ARM, translation process).
    ///
    /// # Errors
    /// The [`Fault`] that the CPU would take. Outside the IPA space, it is a translation fault.
    #[inline(always)]
    pub fn translate<O: Operations>(
        &self,
        ops: &O,
        ipa: Ipa,
        access: Access,
    ) -> Result<Translation, Fault> {
        if self.geometry.is_common_and_contains(ipa) {
            walk(ops, self.root, Geometry::COMMON_GRANULE_AND_START, ipa, access)
        } else {
            let shape = (self.geometry.granule_and_start(), self.geometry.size());
            walk_general(ops, self.root, shape, ipa, access)
        }
    }

    /// Returns the leaf or invalid entry for an address in the IPA space, with its table and level.
    pub(super) fn find_entry<O: Operations>(
        &self,
        ops: &O,
        ipa: Ipa,
    ) -> (TableAddress, Descriptor, Level) {
        walk_to_entry(ops, self.root, self.geometry.granule_and_start(), ipa)
    }
}

/// Walks tables of any geometry; accepts addresses outside the IPA space. Takes its arguments by
/// value, so that a walker can stay in registers.
#[inline(never)]
fn walk_general<O: Operations>(
    ops: &O,
    root: TableAddress,
    (shape, size): ((Granule, Level), u64),
    ipa: Ipa,
    access: Access,
) -> Result<Translation, Fault> {
    if ipa.0 < size {
        return walk(ops, root, shape, ipa, access);
    }
    Err(Fault { ipa, access, status: FaultStatus::Translation, level: shape.1 })
}

#[inline(always)]
fn walk<O: Operations>(
    ops: &O,
    root: TableAddress,
    (granule, start): (Granule, Level),
    ipa: Ipa,
    access: Access,
) -> Result<Translation, Fault> {
    let (_, entry, level) = walk_to_entry(ops, root, (granule, start), ipa);
    if let Some(status) = entry.fault_status(access) {
        return Err(Fault { ipa, access, status, level });
    }
    Ok(Translation {
        // Most walks end at a page, which needs no shift.
        phys: if level == Level::PAGE {
            entry.page_address() + ipa.offset_in(granule.size())
        } else {
            entry.address() + ipa.offset_in(level.span(granule))
        },
        level,
        attributes: entry.attributes(),
    })
}

/// Walks from the root to the leaf or invalid entry for an address.
#[inline(always)]
fn walk_to_entry<O: Operations>(
    ops: &O,
    root: TableAddress,
    (granule, start): (Granule, Level),
    ipa: Ipa,
) -> (TableAddress, Descriptor, Level) {
    let mut level = start;
    let (mut table, mut index) = (root, ipa.0 >> level.shift(granule));
    loop {
        let entry = ops.load(table.entry(index));
        let (Some(below), Some(next)) = (level.child(), entry.next_table()) else {
            return (table, entry, level);
        };
        table = next;
        level = below;
        index = (ipa.0 >> level.shift(granule)) & (granule.entries() - 1);
    }
}

impl Descriptor {
    /// Returns the fault that an access takes at this entry, which is not a table entry.
    #[inline(always)]
    fn fault_status(self, access: Access) -> Option<FaultStatus> {
        if !self.is_valid() {
            Some(FaultStatus::Translation)
        } else if !self.attributes().is_accessed {
            Some(FaultStatus::AccessFlag)
        } else if !self.attributes().permits(access) {
            Some(FaultStatus::Permission)
        } else {
            None
        }
    }
}

impl Stage2 {
    /// Returns the table walker of a CPU.
    pub const fn walker(&self) -> Walker {
        Walker { geometry: self.geometry, root: self.root }
    }

    /// Returns the leaf or invalid entry for an address, and its level. Outside the IPA space,
    /// returns an empty entry.
    pub fn look_up<O: Operations>(&self, ops: &O, ipa: Ipa) -> (Descriptor, Level) {
        if ipa.0 >= self.geometry.size() {
            return (Descriptor::EMPTY, self.geometry.start_level());
        }
        let (_, entry, level) = self.walker().find_entry(ops, ipa);
        (entry, level)
    }
}
