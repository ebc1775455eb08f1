// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Attributes of a leaf, apart from their encoding.

/// Attributes of a leaf: memory type, permissions, and software bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Attributes {
    /// Memory type.
    pub memory: MemoryType,
    /// Read permission, S2AP bit 0.
    pub read: bool,
    /// Write permission, S2AP bit 1.
    pub write: bool,
    /// Execute permission, the inverse of XN.
    pub execute: bool,
    /// Access flag.
    pub is_accessed: bool,
    /// Contiguous hint: the leaf belongs to a contiguous run.
    pub is_contiguous: bool,
    /// Software bits 58:56, 0 to 7.
    pub software: u8,
}

/// Memory type of a leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryType {
    /// Normal write-back cacheable memory, unless stage 1 has stricter attributes.
    Normal,
    /// Normal non-cacheable memory, for devices (Linux: `KVM_PGTABLE_PROT_NORMAL_NC`). No cache of
    /// the host holds a line of it, so it needs no CMO.
    NonCacheable,
    /// Device-nGnRE.
    Device,
}

impl Attributes {
    /// Normal memory, readable, with the access flag set.
    pub const READ: Self = Self {
        memory: MemoryType::Normal,
        read: true,
        write: false,
        execute: false,
        is_accessed: true,
        is_contiguous: false,
        software: 0,
    };
    /// [`Attributes::READ`] with write permission.
    pub const READ_WRITE: Self = Self { write: true, ..Self::READ };

    /// Returns the attributes with the permissions and access flag of `by` added.
    pub const fn relaxed_by(self, by: Self) -> Self {
        Self {
            read: self.read || by.read,
            write: self.write || by.write,
            execute: self.execute || by.execute,
            is_accessed: self.is_accessed || by.is_accessed,
            ..self
        }
    }

    /// Returns the attributes restricted to the permissions of `to`. The access flag stays.
    pub const fn restricted_to(self, to: Self) -> Self {
        Self {
            read: self.read && to.read,
            write: self.write && to.write,
            execute: self.execute && to.execute,
            ..self
        }
    }
}
