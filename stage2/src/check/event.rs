// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The events that the checker processes, in the order in which they occurred.

use alloc::{format, string::String};

use crate::{
    address::{EntryAddress, Ipa, PhysAddr, TableAddress},
    descriptor::Descriptor,
    engine::{Access, FaultStatus, Features},
    geometry::{Geometry, Level},
    operations::{Dsb, Note, Tlbi, Vmid},
};

/// Largest number of CPUs that a checker supports.
pub const MAX_CPUS: u8 = 64;

/// The configuration of a run, set before its first event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    /// The granule and IPA width of the table.
    pub geometry: Geometry,
    /// The features common to all CPUs.
    pub features: Features,
    /// The VMID of the guest.
    pub vmid: Vmid,
    /// The first table of the root.
    pub root: TableAddress,
    /// The number of CPUs, at most [`MAX_CPUS`].
    pub cpus: u8,
}

/// The instruction that wrote an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreKind {
    /// A plain store.
    Plain,
    /// A store-release.
    Release,
    /// An atomic or exclusive store that has succeeded, with release semantics.
    Swap,
    /// An atomic or exclusive store that has succeeded, and orders no earlier store.
    RelaxedSwap,
}

impl StoreKind {
    /// Returns whether the store is ordered after earlier stores of its CPU.
    pub(super) const fn is_release(self) -> bool {
        matches!(self, Self::Release | Self::Swap)
    }

    /// Returns whether the store replaces only the value that its CPU has read.
    pub(super) const fn is_atomic(self) -> bool {
        matches!(self, Self::Swap | Self::RelaxedSwap)
    }
}

/// One step of one CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// The CPU, counted from 0.
    pub cpu: u8,
    /// The step.
    pub action: Action,
}

/// A step of a CPU or of the host software on it. Sizes are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "fields are the first address, the bytes, and the operands of the variant"
)]
pub enum Action {
    /// Changes an entry from `old` to `new`.
    Store {
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
        kind: StoreKind,
    },
    Dsb(Dsb),
    Isb,
    Tlbi(Tlbi),
    /// Writes another VMID to VTTBR_EL2.
    SwitchVmid(Vmid),
    /// Issues `DC CIVAC` over a range.
    CleanInvalidate {
        phys: PhysAddr,
        size: u64,
    },
    /// Issues `IC IVAU` over a range, or `IC IALLUIS`.
    InvalidateICache(Option<(PhysAddr, u64)>),
    /// Allocates a zeroed table.
    Allocate(TableAddress),
    Free(TableAddress),
    Walk {
        begins: bool,
    },
    ChangeReferences(TableAddress, i64),
    Note(Note),
    /// Writes memory as the host.
    HostWrite {
        phys: PhysAddr,
        size: u64,
    },
    /// Adds memory, which the host has just written, or a device to the guest.
    AddMemory {
        ipa: Ipa,
        phys: PhysAddr,
        size: u64,
        is_device: bool,
    },
    /// Removes memory from the guest; the host then reuses it.
    RemoveMemory {
        ipa: Ipa,
        size: u64,
    },
    /// Starts or stops dirty logging for a range.
    SetLogging {
        ipa: Ipa,
        size: u64,
        is_enabled: bool,
    },
    /// Reads and clears the dirty bitmap of a range.
    ReadLog {
        ipa: Ipa,
        size: u64,
    },
    /// Resumes a vCPU after its fault has been handled.
    Resume {
        ipa: Ipa,
        access: Access,
        status: FaultStatus,
        level: Level,
    },
}

/// An event that causes a violation at a later one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cause {
    /// The CPU that caused the event.
    pub cpu: u8,
    /// The number of the event's call stack, if it has one.
    pub stack: Option<u32>,
}

/// Returns the text of a guest address in the details of a violation.
pub(super) fn guest_address(ipa: Ipa) -> String {
    format!("guest address {ipa:#x}")
}

/// Returns the text of a physical address in the details of a violation.
pub(super) fn physical_address(phys: PhysAddr) -> String {
    format!("physical address {phys:#x}")
}
