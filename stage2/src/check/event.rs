// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The events that the checker takes, in the order in which they happened.

use crate::{
    address::{EntryAddress, Ipa, PhysAddr, TableAddress},
    descriptor::Descriptor,
    engine::{Access, FaultStatus, Features},
    geometry::{Geometry, Level},
    operations::{Dsb, Note, Tlbi, Vmid},
};

/// The configuration of a run, fixed before its first event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    /// The granule and IPA width of the table.
    pub geometry: Geometry,
    /// The features that all CPUs have.
    pub features: Features,
    /// The VMID of the guest.
    pub vmid: Vmid,
    /// The first table of the root.
    pub root: TableAddress,
    /// The number of CPUs, up to 64.
    pub cpus: u8,
}

/// The instruction that wrote an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreKind {
    /// A plain store.
    Plain,
    /// A store-release.
    Release,
    /// A compare-and-swap that succeeded.
    Swap,
}

/// One step of one CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// The CPU, counted from 0.
    pub cpu: u8,
    /// The step.
    pub action: Action,
}

/// A step of a CPU or of the host that runs on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Writes an entry.
    Store {
        /// The address of the entry.
        entry: EntryAddress,
        /// The value before.
        old: Descriptor,
        /// The value after.
        new: Descriptor,
        /// The instruction.
        kind: StoreKind,
    },
    /// Executes a data synchronization barrier.
    Dsb(Dsb),
    /// Executes an instruction synchronization barrier.
    Isb,
    /// Issues a TLB invalidation.
    Tlbi(Tlbi),
    /// Writes another VMID to VTTBR_EL2.
    Vmid(Vmid),
    /// Issues `DC CIVAC` over a range.
    Clean {
        /// The first address.
        phys: PhysAddr,
        /// Bytes.
        size: u64,
    },
    /// Issues `IC IVAU` over a range (address and bytes), or `IC IALLUIS`.
    Instructions(Option<(PhysAddr, u64)>),
    /// Allocates a zeroed table.
    Allocate(TableAddress),
    /// Frees a table.
    Free(TableAddress),
    /// Begins a shared walk.
    BeginWalk,
    /// Ends the innermost shared walk.
    EndWalk,
    /// Changes the reference count of a table.
    References(TableAddress, i64),
    /// Passes a note of the engine.
    Note(Note),
    /// Writes memory through the host's own mapping.
    HostWrite {
        /// The first address.
        phys: PhysAddr,
        /// Bytes.
        size: u64,
    },
    /// Adds memory to the guest, which the host has just written.
    AddMemory {
        /// The guest's first address.
        ipa: Ipa,
        /// The host's first address.
        phys: PhysAddr,
        /// Bytes.
        size: u64,
        /// Set for a device, which is not memory.
        device: bool,
    },
    /// Removes memory from the guest; the host reuses it.
    RemoveMemory {
        /// The guest's first address.
        ipa: Ipa,
        /// Bytes.
        size: u64,
    },
    /// Starts or stops dirty logging of a range.
    Logging {
        /// The first address.
        ipa: Ipa,
        /// Bytes.
        size: u64,
        /// Set if logging starts.
        on: bool,
    },
    /// Reads and clears the dirty bitmap of a range.
    ReadLog {
        /// The first address.
        ipa: Ipa,
        /// Bytes.
        size: u64,
    },
    /// Accesses memory as the guest; the possible [outcomes](super::Checker::outcomes) are counted.
    Access {
        /// The address.
        ipa: Ipa,
        /// The kind of access.
        access: Access,
        /// Set if the access bypasses the caches: stage 1 is off, or its attributes say so.
        uncached: bool,
    },
    /// Resumes a vCPU after its fault was handled.
    Resume {
        /// The faulting address.
        ipa: Ipa,
        /// The faulting access.
        access: Access,
        /// The kind of fault.
        status: FaultStatus,
        /// The level of the fault.
        level: Level,
    },
}
