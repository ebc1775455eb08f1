// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Properties of a hypervisor that the architecture does not determine.

use alloc::collections::BTreeMap;

use super::lock::LockType;
use crate::descriptor::Descriptor;

/// Meaning of a function's call for the checker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A call by user space: when it returns, restrictions of entries have reached all TLBs.
    Call,
}

/// A hypervisor.
#[derive(Debug, Clone)]
pub struct Hypervisor {
    /// The type of the lock of stage-2 tables.
    pub lock: LockType,
    /// Bits of an invalid entry, and their value if a walker has locked the entry.
    pub locked_entry: Option<(u64, u64)>,
    /// Functions by the numbers of the trace.
    pub functions: BTreeMap<u16, Role>,
}

impl Hypervisor {
    pub(super) fn role(&self, number: u16) -> Option<Role> {
        self.functions.get(&number).copied()
    }

    /// Returns an entry in the model's form: a locked one is [`Descriptor::LOCKED`], and bit 55, which
    /// the engine uses for itself, is clear.
    pub(super) fn normalize(&self, value: u64) -> u64 {
        const VALID: u64 = 1;
        const ENGINE_BIT: u64 = 1 << 55;
        match self.locked_entry {
            _ if value & VALID != 0 => value & !ENGINE_BIT,
            Some((mask, locked)) if value & mask == locked => Descriptor::LOCKED.0,
            _ => value,
        }
    }
}
