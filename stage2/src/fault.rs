// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The fault path of a hypervisor, from a stage-2 abort until the guest retries the access.
//!
//! The steps follow Linux (`user_mem_abort()`): read the invalidation sequence → look up the page
//! (may sleep) → top up the memcache (may sleep) → take the lock → check that the sequence has not
//! changed → CMOs, if the policy does them here → relax the leaf or map → mark the page dirty →
//! release the lock.
//!
//! A race is not an error: the guest retries.

use core::fmt;

use lock_api::{RawRwLock, RwLock};
use thiserror::Error;

use crate::{
    address::{Ipa, PhysAddr},
    descriptor::Attributes,
    engine::{Access, Fault, FaultStatus, Features, MapError, MapRequest, Stage2, Walker},
    geometry::{Geometry, Level},
    memcache::Memcache,
    operations::{Note, Operations},
    policy::{Locking, Policy, TopUp},
};

/// Contiguous host memory that backs a guest range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page {
    /// First guest address, a multiple of `size`.
    pub ipa: Ipa,
    /// First host address, a multiple of `size`.
    pub phys: PhysAddr,
    /// Size in bytes, a power of two.
    pub size: u64,
    /// Set if the guest may write to the memory.
    pub writable: bool,
}

/// Interface of the fault path to the host's memory management.
pub trait Host {
    /// Looks up the page that backs an address, populated for the access. May sleep.
    fn page(&self, ipa: Ipa, access: Access) -> Option<Page>;

    /// Returns whether dirty logging is enabled for an address.
    fn logging(&self, ipa: Ipa) -> bool;

    /// Returns the invalidation sequence, which increases under the table's lock whenever pages are
    /// unmapped (Linux: `mmu_invalidate_seq`).
    fn sequence(&self) -> u64;

    /// Marks bytes dirty before the guest can write them.
    fn mark_dirty(&self, ipa: Ipa, size: u64);
}

/// Result of handling a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resolution {
    /// A mapping that permits the access exists.
    Resolved,
    /// Another CPU or the host has changed the mapping: the guest retries.
    Retry,
}

/// Error returned for a fault that retrying cannot resolve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum FaultError {
    /// No memory backs the address, or none that permits the access.
    #[error("no memory behind guest address {0} for this access; emulate a device?")]
    NoMemory(Ipa),
    /// No free table is left.
    #[error("page tables exhausted: enlarge the pool")]
    NoTables,
    /// The host page cannot be mapped.
    #[error("host page cannot be mapped")]
    Map(#[source] MapError),
}

/// A table and its lock.
pub struct Mmu<R: RawRwLock> {
    table: RwLock<R, Stage2>,
    geometry: Geometry,
    policy: Policy,
    features: Features,
    walker: Walker,
}

impl<R: RawRwLock> fmt::Debug for Mmu<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mmu")
            .field("geometry", &self.geometry)
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}

/// Request derived from a fault before the lock is taken.
struct FaultRequest {
    fault: Fault,
    /// Invalidation sequence before the page lookup.
    sequence: u64,
    request: MapRequest,
    relax: bool,
    shared: bool,
}

impl<R: RawRwLock> Mmu<R> {
    /// Creates an MMU: a table with a lock of type `R`.
    pub const fn new(table: Stage2) -> Self {
        Self {
            geometry: *table.geometry(),
            policy: *table.policy(),
            features: *table.features(),
            walker: table.walker(),
            table: RwLock::new(table),
        }
    }

    /// Runs `act` with the lock held exclusive.
    pub fn exclusive<O: Operations, T>(&self, ops: &O, act: impl FnOnce(&mut Stage2) -> T) -> T {
        let mut table = self.table.write();
        ops.note(Note::Lock { exclusive: true });
        let result = act(&mut table);
        ops.note(Note::Unlock);
        result
    }

    /// Runs `act` with the lock held shared.
    pub fn shared<O: Operations, T>(&self, ops: &O, act: impl FnOnce(&Stage2) -> T) -> T {
        let table = self.table.read();
        ops.note(Note::Lock { exclusive: false });
        let result = act(&table);
        ops.note(Note::Unlock);
        result
    }

    /// Returns the walker that a CPU uses, without the lock.
    pub const fn walker(&self) -> &Walker {
        &self.walker
    }

    /// Returns the geometry of the IPA space.
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Resolves a stage-2 abort.
    ///
    /// # Errors
    /// [`FaultError`] if retrying cannot resolve the fault.
    pub fn fault<O: Operations, H: Host>(
        &self,
        ops: &O,
        host: &H,
        memcache: &mut Memcache,
        fault: Fault,
    ) -> Result<Resolution, FaultError> {
        if fault.status == FaultStatus::AccessFlag {
            self.exclusive(ops, |table| table.mark_accessed(ops, fault.ipa));
            return Ok(Resolution::Resolved);
        }
        let sequence = host.sequence();
        ops.note(Note::LookUp);
        let page = host
            .page(fault.ipa, fault.access)
            .filter(|page| page.writable || fault.access != Access::Write)
            .ok_or(FaultError::NoMemory(fault.ipa))?;
        let logging = host.logging(fault.ipa);
        let plan = self.plan(fault, sequence, &page, logging);
        let least = self.geometry.depth();
        if self.may_need_tables(&plan, logging) && !memcache.top_up(ops, least, Memcache::CAPACITY)
        {
            return Err(FaultError::NoTables);
        }
        // The map may need more tables under the lock than at the fault.
        let done = if memcache.len() >= least {
            self.apply(ops, host, memcache, &plan)
        } else {
            self.apply(ops, host, &mut Memcache::unavailable(), &plan)
        };
        match done {
            Ok(()) => Ok(Resolution::Resolved),
            Err(MapError::Again) => Ok(Resolution::Retry),
            Err(MapError::NoTable) if memcache.top_up(ops, least, Memcache::CAPACITY) => {
                Ok(Resolution::Retry)
            }
            Err(MapError::NoTable) => Err(FaultError::NoTables),
            Err(error) => Err(FaultError::Map(error)),
        }
    }

    /// Relaxes a leaf or maps as planned, with the lock mode of the policy.
    fn apply<O: Operations, H: Host>(
        &self,
        ops: &O,
        host: &H,
        memcache: &mut Memcache,
        plan: &FaultRequest,
    ) -> Result<(), MapError> {
        let FaultRequest { fault, request, .. } = plan;
        if plan.shared {
            let done = self.shared(ops, |table| {
                plan.prepare(ops, host, table)?;
                if plan.relax {
                    table.relax_shared(ops, fault.ipa, request.attributes)?;
                } else {
                    table.map_shared(ops, memcache, request)?;
                }
                plan.mark_dirty(ops, host);
                Ok(())
            });
            // Only an exclusive walk changes a contiguous run.
            if done != Err(MapError::Contiguous) {
                return done;
            }
        }
        self.exclusive(ops, |table| {
            plan.prepare(ops, host, table)?;
            if plan.relax {
                table.relax(ops, fault.ipa, request.attributes)?;
            } else {
                table.map(ops, memcache, request)?;
            }
            plan.mark_dirty(ops, host);
            Ok(())
        })
    }

    /// Returns whether the policy tops up the memcache for a fault.
    fn may_need_tables(&self, plan: &FaultRequest, logging: bool) -> bool {
        let fault = &plan.fault;
        match self.policy.top_up {
            TopUp::Always => {
                fault.status != FaultStatus::Permission
                    || (logging && fault.access == Access::Write)
            }
            TopUp::ByFaultLevel => self.geometry.span(fault.level) > plan.request.size,
        }
    }

    fn plan(&self, fault: Fault, sequence: u64, page: &Page, logging: bool) -> FaultRequest {
        let size = if logging {
            self.geometry.granule().size()
        } else {
            largest_leaf(&self.geometry, page.size)
        };
        let ipa = fault.ipa.align_down(size);
        // Dirty logging requires a fault at the first write to each page.
        let write = page.writable && (!logging || fault.access == Access::Write);
        let attributes = Attributes {
            write,
            execute: fault.access == Access::Fetch || self.features.dic,
            ..Attributes::READ
        };
        let relax =
            fault.status == FaultStatus::Permission && self.geometry.span(fault.level) == size;
        FaultRequest {
            fault,
            sequence,
            request: MapRequest::new(ipa, page.phys + (ipa - page.ipa), size, attributes),
            relax,
            shared: match self.policy.locking {
                Locking::Exclusive => false,
                Locking::SharedRelax => relax && logging,
                Locking::Shared => true,
            },
        }
    }
}

impl FaultRequest {
    /// Checks under the lock that the page lookup is still valid, and performs the CMOs if the
    /// policy does them in the fault path.
    fn prepare<O: Operations, H: Host>(
        &self,
        ops: &O,
        host: &H,
        table: &Stage2,
    ) -> Result<(), MapError> {
        if host.sequence() != self.sequence {
            return Err(MapError::Again);
        }
        table.cmo_in_fault_path(ops, &self.fault, &self.request);
        Ok(())
    }

    /// Marks writable memory dirty while the lock is held.
    fn mark_dirty<O: Operations, H: Host>(&self, ops: &O, host: &H) {
        let MapRequest { ipa, size, attributes, .. } = self.request;
        if attributes.write {
            ops.note(Note::MarkDirty { ipa, size });
            host.mark_dirty(ipa, size);
        }
    }
}

/// Returns the size of the largest leaf that fits in `size` bytes.
pub fn largest_leaf(geometry: &Geometry, size: u64) -> u64 {
    (geometry.start().number()..3)
        .filter_map(Level::new)
        .filter(|level| level.can_map(geometry.granule()))
        .map(|level| geometry.span(level))
        .find(|span| *span <= size)
        .unwrap_or_else(|| geometry.granule().size())
}
