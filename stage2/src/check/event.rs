// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What happened, in the order in which it happened.

use crate::{
    address::{EntryAddress, Ipa, PhysAddr, TableAddress},
    descriptor::Descriptor,
    engine::{Access, FaultStatus, Features},
    geometry::{Geometry, Level},
    operations::{Dsb, Note, Tlbi, Vmid},
};

/// What is fixed from the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    /// The table's shape.
    pub geometry: Geometry,
    /// What the CPUs can do.
    pub features: Features,
    /// The guest's number.
    pub vmid: Vmid,
    /// The first table of the root.
    pub root: TableAddress,
    /// How many CPUs, up to 64.
    pub cpus: u8,
}

/// How an entry was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
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
    /// Which CPU.
    pub cpu: u8,
    /// What it did.
    pub action: Action,
}

/// What a CPU, or the host on it, can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// An entry was written.
    Store {
        /// Which.
        entry: EntryAddress,
        /// What it was.
        old: Descriptor,
        /// What it is.
        new: Descriptor,
        /// By which kind of store.
        how: How,
    },
    /// A data synchronisation barrier.
    Dsb(Dsb),
    /// An instruction synchronisation barrier.
    Isb,
    /// A TLB invalidation was issued.
    Tlbi(Tlbi),
    /// The VMID was switched.
    Vmid(Vmid),
    /// `DC CIVAC` over a range was issued.
    Clean {
        /// Host address.
        phys: PhysAddr,
        /// Bytes.
        size: u64,
    },
    /// `IC IVAU` over a range (address and bytes), or `IC IALLUIS`, was issued.
    Instructions(Option<(PhysAddr, u64)>),
    /// A zeroed table was allocated.
    Allocate(TableAddress),
    /// A table was freed.
    Free(TableAddress),
    /// A shared walk began.
    BeginWalk,
    /// It ended.
    EndWalk,
    /// A table's count changed.
    References(TableAddress, i64),
    /// What the engine notes.
    Note(Note),
    /// The host wrote memory through its own mapping.
    HostWrite {
        /// Host address.
        phys: PhysAddr,
        /// Bytes.
        size: u64,
    },
    /// Memory became the guest's at an address; the host has just written it.
    Give {
        /// Guest address.
        ipa: Ipa,
        /// Host address.
        phys: PhysAddr,
        /// Bytes.
        size: u64,
        /// Whether it is no memory but a device.
        device: bool,
    },
    /// Memory was taken back: the host uses it for something else.
    TakeBack {
        /// Guest address.
        ipa: Ipa,
        /// Bytes.
        size: u64,
    },
    /// Writes are logged in a range from now on, or no more.
    Logging {
        /// Guest address.
        ipa: Ipa,
        /// Bytes.
        size: u64,
        /// Whether they are.
        on: bool,
    },
    /// The log of a range was read, and reads clean from here on.
    ReadLog {
        /// Guest address.
        ipa: Ipa,
        /// Bytes.
        size: u64,
    },
    /// A guest accesses memory; what it may see is counted ([`Checker::outcomes`](super::Checker::outcomes)).
    Access {
        /// The address.
        ipa: Ipa,
        /// How.
        access: Access,
        /// Whether it goes around the caches: its MMU is off, or its own attributes say so.
        uncached: bool,
    },
    /// A vCPU goes on after a fault was handled.
    Resume {
        /// The address.
        ipa: Ipa,
        /// What was tried.
        access: Access,
        /// What was missing.
        status: FaultStatus,
        /// The level of the entry at fault.
        level: Level,
    },
}
