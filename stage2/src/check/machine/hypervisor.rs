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
    /// Bits of an invalid entry, and their value if a walker has locked the entry. In a hypervisor
    /// without locked entries, walkers that share the lock may only relax permissions.
    pub locked_entry: Option<(u64, u64)>,
    /// Functions by the numbers of the trace.
    pub functions: BTreeMap<u16, Role>,
}

impl Hypervisor {
    pub(super) fn role(&self, number: u16) -> Option<Role> {
        self.functions.get(&number).copied()
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
            Some((mask, locked)) if value & mask == locked => Descriptor::LOCKED.0,
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
            locked_entry: Some((0xf << 60 | 1, 1 << 60)),
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
