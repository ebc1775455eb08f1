// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Looking an address up: as software does, and as a CPU's walker would.

use super::Stage2;
use crate::{
    descriptor::{Attributes, Descriptor},
    geometry::{Geometry, Level},
    operations::{Operations, TableAddress},
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
    pub ipa: u64,
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
    pub phys: u64,
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
    #[inline]
    pub fn translate<O: Operations>(
        &self,
        ops: &O,
        ipa: u64,
        access: Access,
    ) -> Result<Translation, Fault> {
        let fault = |status, level| Fault {
            ipa,
            access,
            status,
            level,
        };
        if ipa >= self.geometry.size() {
            return Err(fault(FaultStatus::Translation, self.geometry.start()));
        }
        let (_, entry, level) = self.find(ops, ipa);
        // Where the walk ends there is no table.
        if !entry.is_valid() {
            return Err(fault(FaultStatus::Translation, level));
        }
        let attributes = entry.attributes();
        if !attributes.accessed {
            return Err(fault(FaultStatus::AccessFlag, level));
        }
        if !attributes.permit(access) {
            return Err(fault(FaultStatus::Permission, level));
        }
        Ok(Translation {
            phys: entry.address() + (ipa & (self.geometry.span(level) - 1)),
            level,
            attributes,
        })
    }

    /// The table that the walk of an address ends in, the entry there, and its level.
    #[inline]
    pub(super) fn find<O: Operations>(
        &self,
        ops: &O,
        ipa: u64,
    ) -> (TableAddress, Descriptor, Level) {
        let granule = self.geometry.granule();
        let mut level = self.geometry.start();
        let mut shift = level.shift(granule);
        let (mut table, mut index) = (self.root, ipa >> shift);
        loop {
            let entry = ops.load(table.entry(index));
            let (true, Some(below)) = (entry.is_table_or_page(), level.down()) else {
                return (table, entry, level);
            };
            table = TableAddress(entry.address());
            level = below;
            shift -= granule.level_bits();
            index = (ipa >> shift) & (granule.entries() - 1);
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
    #[inline]
    pub fn translate<O: Operations>(
        &self,
        ops: &O,
        ipa: u64,
        access: Access,
    ) -> Result<Translation, Fault> {
        self.walker().translate(ops, ipa, access)
    }

    /// The entry that an address's walk ends at, and its level.
    pub fn look_up<O: Operations>(&self, ops: &O, ipa: u64) -> (Descriptor, Level) {
        let (_, entry, level) = self.walker().find(ops, ipa);
        (entry, level)
    }
}
