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
    policy::{Locking, Policy, TopUpCondition},
};

/// Contiguous host memory that backs a guest range, at least as large as the granule of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostPage {
    /// First guest address, a multiple of `size`.
    pub ipa: Ipa,
    /// First host address, a multiple of `size`.
    pub phys: PhysAddr,
    /// Size in bytes, a power of two.
    pub size: u64,
    /// Indicates that the guest may write to the memory.
    pub is_writable: bool,
}

impl HostPage {
    /// Returns whether the page is aligned to its size, a power of two, and contains an address.
    const fn contains(&self, ipa: Ipa) -> bool {
        self.size.is_power_of_two()
            && self.phys.is_aligned(self.size)
            && ipa.align_down(self.size).0 == self.ipa.0
    }
}

/// Interface of the fault path to the host's memory management.
pub trait HostMemory {
    /// Looks up the page that backs an address, and populates it for the access. May sleep. The page
    /// contains the address.
    fn look_up_page(&self, ipa: Ipa, access: Access) -> Option<HostPage>;

    /// Returns whether dirty logging is enabled for an address. A host that enables it returns `true`
    /// before the section of the table's lock in which it write-protects the memory: a fault reads this
    /// again under the lock, so it maps writable memory only before that section.
    fn is_logging(&self, ipa: Ipa) -> bool;

    /// Returns the invalidation sequence, which increases whenever pages are unmapped: after look-ups
    /// return the new result, and before the section of the table's lock ends in which the pages are
    /// unmapped (Linux: `mmu_invalidate_seq`). An earlier increase lets a fault that reads the new
    /// sequence map the page that is about to be freed.
    ///
    /// If look-ups change only after that section, [`HostMemory::is_invalidating`] covers the time in
    /// between, and the sequence increases in the section that ends it.
    fn invalidation_sequence(&self) -> u64;

    /// Returns whether pages of a range are being unmapped while look-ups may still return them
    /// (Linux: `mmu_invalidate_in_progress`): the fault is retried. Changes under the table's lock
    /// only. A host whose look-ups change within one section of the lock needs no such time.
    fn is_invalidating(&self, _ipa: Ipa, _size: u64) -> bool {
        false
    }

    /// Marks a range dirty, before the lock is released under which the guest was permitted to write it.
    fn mark_dirty(&self, ipa: Ipa, size: u64);
}

/// Result of handling a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resolution {
    /// Presence of a mapping that permits the access.
    Resolved,
    /// Change of the mapping by another CPU or the host: the guest retries.
    Retry,
}

/// Error returned for a fault that retrying cannot resolve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum FaultError {
    /// Error returned when no memory backs the address, or none that permits the access.
    #[error("no memory backs guest address {0} for this access; emulate a device?")]
    NoMemory(Ipa),
    /// Error returned when no free table is left.
    #[error("page tables exhausted: enlarge the pool")]
    NoTables,
    /// Error returned for a host page that does not contain the address, is smaller than the granule,
    /// or is not a power of two in size or not aligned to it.
    #[error(
        "host page at guest address {ipa}, host address {phys}, {size:#x} bytes: not an aligned page \
         that contains guest address {fault}"
    )]
    #[allow(missing_docs, reason = "fields are the fault's address and those of the page")]
    HostPage { fault: Ipa, ipa: Ipa, phys: PhysAddr, size: u64 },
    /// Error returned when the host page cannot be mapped.
    #[error("host page cannot be mapped")]
    Map(#[source] MapError),
}

/// A stage-2 table with its lock.
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

/// Request to relax or map, derived from a fault before the lock is taken.
struct FaultRequest {
    fault: Fault,
    /// Invalidation sequence before the page lookup.
    sequence: u64,
    request: MapRequest,
    is_logging: bool,
    relaxes_leaf: bool,
    is_shared: bool,
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

    /// Runs `f` under the exclusive lock.
    pub fn with_exclusive<O: Operations, T>(&self, ops: &O, f: impl FnOnce(&mut Stage2) -> T) -> T {
        let mut table = self.table.write();
        ops.note(Note::Lock { is_exclusive: true });
        let result = f(&mut table);
        ops.note(Note::Unlock);
        result
    }

    /// Runs `f` under the shared lock.
    pub fn with_shared<O: Operations, T>(&self, ops: &O, f: impl FnOnce(&Stage2) -> T) -> T {
        let table = self.table.read();
        ops.note(Note::Lock { is_exclusive: false });
        let result = f(&table);
        ops.note(Note::Unlock);
        result
    }

    /// Returns the table walker of a CPU, which needs no lock.
    pub const fn walker(&self) -> &Walker {
        &self.walker
    }

    /// Resolves a stage-2 abort.
    ///
    /// # Errors
    /// [`FaultError`] if retrying cannot resolve the fault.
    pub fn fault<O: Operations, H: HostMemory>(
        &self,
        ops: &O,
        host: &H,
        memcache: &mut Memcache,
        fault: Fault,
    ) -> Result<Resolution, FaultError> {
        if fault.status == FaultStatus::AccessFlag {
            self.with_exclusive(ops, |table| table.mark_accessed(ops, fault.ipa));
            return Ok(Resolution::Resolved);
        }
        let sequence = host.invalidation_sequence();
        ops.note(Note::LookUp);
        let page = host
            .look_up_page(fault.ipa, fault.access)
            .filter(|page| page.is_writable || fault.access != Access::Write)
            .ok_or(FaultError::NoMemory(fault.ipa))?;
        let logging = host.is_logging(fault.ipa);
        let plan = self.fault_request(fault, sequence, &page, logging)?;
        let needed = self.geometry.tables_below_root();
        if self.needs_top_up(&plan, logging) && !memcache.top_up(ops, needed, Memcache::CAPACITY) {
            return Err(FaultError::NoTables);
        }
        // The table may have changed since the fault. A map with too few tables takes none.
        let done = if memcache.len() >= needed {
            self.apply(ops, host, memcache, &plan)
        } else {
            self.apply(ops, host, &mut Memcache::new_unavailable(), &plan)
        };
        match done {
            Ok(()) => Ok(Resolution::Resolved),
            Err(MapError::Again) => Ok(Resolution::Retry),
            Err(MapError::NoTable) if memcache.top_up(ops, needed, Memcache::CAPACITY) => {
                Ok(Resolution::Retry)
            }
            Err(MapError::NoTable) => Err(FaultError::NoTables),
            Err(error) => Err(FaultError::Map(error)),
        }
    }

    /// Relaxes a leaf or maps, in the lock mode of the policy.
    fn apply<O: Operations, H: HostMemory>(
        &self,
        ops: &O,
        host: &H,
        memcache: &mut Memcache,
        plan: &FaultRequest,
    ) -> Result<(), MapError> {
        let FaultRequest { fault, request, .. } = plan;
        if plan.is_shared {
            let done = self.with_shared(ops, |table| {
                plan.validate_and_clean(ops, host, table)?;
                if plan.relaxes_leaf {
                    table.relax_shared(ops, fault.ipa, fault.level, request.attributes)?;
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
        self.with_exclusive(ops, |table| {
            plan.validate_and_clean(ops, host, table)?;
            if plan.relaxes_leaf {
                table.relax(ops, fault.ipa, fault.level, request.attributes)?;
            } else {
                table.map(ops, memcache, request)?;
            }
            plan.mark_dirty(ops, host);
            Ok(())
        })
    }

    /// Returns whether the policy tops up the memcache for a fault.
    fn needs_top_up(&self, plan: &FaultRequest, logging: bool) -> bool {
        let fault = &plan.fault;
        match self.policy.top_up_condition {
            TopUpCondition::ByFaultStatus => {
                fault.status != FaultStatus::Permission
                    || (logging && fault.access == Access::Write)
            }
            TopUpCondition::ByFaultLevel => self.geometry.span(fault.level) > plan.request.size,
        }
    }

    fn fault_request(
        &self,
        fault: Fault,
        sequence: u64,
        page: &HostPage,
        logging: bool,
    ) -> Result<FaultRequest, FaultError> {
        let HostPage { ipa, phys, size, .. } = *page;
        let geometry = &self.geometry;
        let largest = geometry
            .largest_leaf_within(size)
            .filter(|_| page.contains(fault.ipa))
            .ok_or(FaultError::HostPage { fault: fault.ipa, ipa, phys, size })?;
        let level = if logging { Level::PAGE } else { largest };
        let size = geometry.span(level);
        let ipa = fault.ipa.align_down(size);
        // Dirty logging requires a fault at the first write to each page.
        let write = page.is_writable && (!logging || fault.access == Access::Write);
        let attributes = Attributes {
            write,
            execute: fault.access == Access::Fetch || self.features.dic,
            ..Attributes::READ
        };
        let relax = fault.status == FaultStatus::Permission && fault.level == level;
        Ok(FaultRequest {
            fault,
            sequence,
            request: MapRequest::new(ipa, page.phys + (ipa - page.ipa), size, attributes),
            is_logging: logging,
            relaxes_leaf: relax,
            is_shared: match self.policy.locking {
                Locking::Exclusive => false,
                Locking::SharedRelax => relax && logging,
                Locking::Shared => true,
            },
        })
    }
}

impl FaultRequest {
    /// Checks under the lock that the page lookup is still valid and that logging was not enabled since,
    /// and performs the CMOs if the policy places them in the fault path.
    fn validate_and_clean<O: Operations, H: HostMemory>(
        &self,
        ops: &O,
        host: &H,
        table: &Stage2,
    ) -> Result<(), MapError> {
        let MapRequest { ipa, size, .. } = self.request;
        let is_logging = || !self.is_logging && host.is_logging(self.fault.ipa);
        if host.is_invalidating(ipa, size)
            || host.invalidation_sequence() != self.sequence
            || is_logging()
        {
            return Err(MapError::Again);
        }
        table.cmo_in_fault_path(ops, &self.fault, &self.request);
        Ok(())
    }

    /// Marks writable memory dirty under the lock.
    fn mark_dirty<O: Operations, H: HostMemory>(&self, ops: &O, host: &H) {
        let MapRequest { ipa, size, attributes, .. } = self.request;
        if attributes.write {
            ops.note(Note::MarkDirty { ipa, size });
            host.mark_dirty(ipa, size);
        }
    }
}
