// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Looking an address up: as software does, and as a CPU's walker would.

use super::table::Stage2;
use crate::{
    address::{Ipa, PhysAddr, TableAddress},
    descriptor::{Attributes, Descriptor},
    geometry::{Geometry, Granule, Level},
    operations::Operations,
};

/// How a guest accesses memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// A load.
    Read,
    /// A store.
    Write,
    /// An instruction fetch.
    Fetch,
}

/// Why a walk gives no translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FaultStatus {
    /// No valid entry.
    Translation,
    /// The leaf has no access flag.
    AccessFlag,
    /// The leaf does not allow this access.
    Permission,
}

/// A stage-2 fault, as the syndrome tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// The guest address.
    pub ipa: Ipa,
    /// What was tried.
    pub access: Access,
    /// What was missing.
    pub status: FaultStatus,
    /// The level of the entry that was at fault.
    pub level: Level,
}

/// Where an address leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Translation {
    /// The host address.
    pub phys: PhysAddr,
    /// The leaf's level.
    pub level: Level,
    /// The leaf's attributes.
    pub attributes: Attributes,
}

impl Attributes {
    /// Whether the access is permitted.
    pub const fn permit(&self, access: Access) -> bool {
        match access {
            Access::Read => self.read,
            Access::Write => self.write,
            Access::Fetch => self.read && self.execute,
        }
    }
}

/// What a CPU needs to walk a table: neither policy nor lock.
#[derive(Debug, Clone, Copy)]
pub struct Walker {
    geometry: Geometry,
    root: TableAddress,
}

impl Walker {
    /// Walks the table as a CPU does for an access (Arm ARM D8.2).
    ///
    /// # Errors
    /// The fault that the CPU would take; an address outside the IPA space is a translation fault.
    #[inline(always)]
    pub fn translate<O: Operations>(
        &self,
        ops: &O,
        ipa: Ipa,
        access: Access,
    ) -> Result<Translation, Fault> {
        if self.geometry.is_common(ipa) {
            walk(ops, self.root, Geometry::COMMON, ipa, access)
        } else {
            let shape = (self.geometry.shape(), self.geometry.size());
            walk_rare(ops, self.root, shape, ipa, access)
        }
    }

    /// The table that the walk of an address ends in, the entry there, and its level. The address is
    /// in the IPA space.
    pub(super) fn find<O: Operations>(
        &self,
        ops: &O,
        ipa: Ipa,
    ) -> (TableAddress, Descriptor, Level) {
        find_in(ops, self.root, self.geometry.shape(), ipa)
    }
}

/// The same for other shapes and addresses. All it gets are values: a walker that nothing points at
/// can be held in registers.
#[inline(never)]
fn walk_rare<O: Operations>(
    ops: &O,
    root: TableAddress,
    (shape, size): ((Granule, Level), u64),
    ipa: Ipa,
    access: Access,
) -> Result<Translation, Fault> {
    if ipa.0 < size {
        return walk(ops, root, shape, ipa, access);
    }
    Err(Fault {
        ipa,
        access,
        status: FaultStatus::Translation,
        level: shape.1,
    })
}

#[inline(always)]
fn walk<O: Operations>(
    ops: &O,
    root: TableAddress,
    (granule, start): (Granule, Level),
    ipa: Ipa,
    access: Access,
) -> Result<Translation, Fault> {
    let (_, entry, level) = find_in(ops, root, (granule, start), ipa);
    if let Some(status) = entry.missing(access) {
        return Err(Fault {
            ipa,
            access,
            status,
            level,
        });
    }
    Ok(Translation {
        // Where most walks end, without a shift.
        phys: if level == Level::PAGE {
            entry.page_address() + ipa.offset_in(granule.size())
        } else {
            entry.address() + ipa.offset_in(level.span(granule))
        },
        level,
        attributes: entry.attributes(),
    })
}

/// Goes down from the root to where an address's walk ends.
#[inline(always)]
fn find_in<O: Operations>(
    ops: &O,
    root: TableAddress,
    (granule, start): (Granule, Level),
    ipa: Ipa,
) -> (TableAddress, Descriptor, Level) {
    let mut level = start;
    let (mut table, mut index) = (root, ipa.0 >> level.shift(granule));
    loop {
        let entry = ops.load(table.entry(index));
        let (Some(below), Some(next)) = (level.down(), entry.next_table()) else {
            return (table, entry, level);
        };
        table = next;
        level = below;
        index = (ipa.0 >> level.shift(granule)) & (granule.entries() - 1);
    }
}

impl Descriptor {
    /// What a walk that ends here lacks for an access: where it ends there is no table.
    #[inline(always)]
    fn missing(self, access: Access) -> Option<FaultStatus> {
        if !self.is_valid() {
            Some(FaultStatus::Translation)
        } else if !self.attributes().accessed {
            Some(FaultStatus::AccessFlag)
        } else if !self.attributes().permit(access) {
            Some(FaultStatus::Permission)
        } else {
            None
        }
    }
}

impl Stage2 {
    /// What a CPU walks it with.
    pub const fn walker(&self) -> Walker {
        Walker {
            geometry: self.geometry,
            root: self.root,
        }
    }

    /// Walks the table as a CPU does: [`Walker::translate`].
    ///
    /// # Errors
    /// The fault that the CPU would take.
    #[inline(always)]
    pub fn translate<O: Operations>(
        &self,
        ops: &O,
        ipa: Ipa,
        access: Access,
    ) -> Result<Translation, Fault> {
        self.walker().translate(ops, ipa, access)
    }

    /// The entry that an address's walk ends at, and its level. Outside the IPA space nothing is.
    pub fn look_up<O: Operations>(&self, ops: &O, ipa: Ipa) -> (Descriptor, Level) {
        if ipa.0 >= self.geometry.size() {
            return (Descriptor::EMPTY, self.geometry.start());
        }
        let (_, entry, level) = self.walker().find(ops, ipa);
        (entry, level)
    }
}
