// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The fault path: what a hypervisor does from the guest's fault to its next attempt.
//!
//! As in Linux (`user_mem_abort()`), in this order, because each step may not be done in a later
//! one: read the invalidation sequence → look the page up (may sleep) → top the memcache up (may
//! sleep) → take the lock → see that the sequence has not moved → make memory ready, if that is
//! done here → relax the leaf or map → mark dirty → release the lock.
//!
//! A race is never an error: the guest just tries again.

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
    policy::{CmoPlacement, Locking, Policy, Reserve, TopUp},
};

/// Host memory in one piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page {
    /// Its first guest address, a multiple of its size.
    pub ipa: Ipa,
    /// Its host address, a multiple of its size.
    pub phys: PhysAddr,
    /// Bytes, a power of two.
    pub size: u64,
    /// Whether the guest may write it.
    pub writable: bool,
}

/// The host's side of the guest's memory.
pub trait Host {
    /// The page behind an address, populated for this access; may sleep.
    fn page(&self, ipa: Ipa, access: Access) -> Option<Page>;

    /// Whether writes are logged there.
    fn logging(&self, ipa: Ipa) -> bool;

    /// Grows whenever pages are taken away; written under the table's lock.
    fn sequence(&self) -> u64;

    /// Notes that the guest may write these bytes.
    fn mark_dirty(&self, ipa: Ipa, size: u64);
}

/// What became of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resolution {
    /// The guest can go on.
    Resolved,
    /// Somebody was faster, or something moved: the guest tries again.
    Retry,
}

/// Why a fault cannot be resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum FaultError {
    /// Nothing is behind the address, or not what the access needs.
    #[error("no memory behind guest address {0:#x} for this access: an emulated device?")]
    NoMemory(Ipa),
    /// No tables are left.
    #[error("no memory for page tables: give the pool more")]
    NoTables,
    /// The host's answer does not fit the table.
    #[error("the page behind the address cannot be mapped")]
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

/// What a fault asks for, before the lock is taken.
struct Plan {
    request: MapRequest,
    relax: bool,
    shared: bool,
}

impl<R: RawRwLock> Mmu<R> {
    /// A table behind a lock of this kind.
    pub const fn new(table: Stage2) -> Self {
        Self {
            geometry: *table.geometry(),
            policy: *table.policy(),
            features: *table.features(),
            walker: table.walker(),
            table: RwLock::new(table),
        }
    }

    /// Does something as the only walker.
    pub fn exclusive<O: Operations, T>(&self, ops: &O, act: impl FnOnce(&mut Stage2) -> T) -> T {
        let mut table = self.table.write();
        ops.note(Note::Lock { exclusive: true });
        let result = act(&mut table);
        ops.note(Note::Unlock);
        result
    }

    /// Does something beside other walkers.
    pub fn shared<O: Operations, T>(&self, ops: &O, act: impl FnOnce(&Stage2) -> T) -> T {
        let table = self.table.read();
        ops.note(Note::Lock { exclusive: false });
        let result = act(&table);
        ops.note(Note::Unlock);
        result
    }

    /// What a CPU walks with, past any lock.
    pub const fn walker(&self) -> &Walker {
        &self.walker
    }

    /// The table's shape.
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Resolves a guest's fault.
    ///
    /// # Errors
    /// [`FaultError`]: trying again does not help.
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
        let policy = self.policy;
        let plan = self.plan(&fault, &page, logging);
        let wanted = plan.request.size;
        let any = self.geometry.depth();
        let (least, most) = match policy.reserve {
            Reserve::Capacity => (any, Memcache::CAPACITY),
            Reserve::Missing => {
                let missing = self.missing(&fault, wanted);
                (missing, missing)
            }
        };

        let builds = match policy.top_up {
            TopUp::Always => {
                fault.status != FaultStatus::Permission
                    || (logging && fault.access == Access::Write)
            }
            TopUp::ByFaultLevel => self.geometry.span(fault.level) > wanted,
        };
        if builds && !memcache.top_up(ops, least, most) {
            return Err(FaultError::NoTables);
        }
        // The level may be out of date under the lock; never draw from a cache that may run dry.
        let mut withheld = Memcache::unavailable();
        let usable = if memcache.len() >= least {
            memcache.may_run_dry(memcache.len() < any);
            &mut *memcache
        } else {
            &mut withheld
        };

        let shared = plan.shared.then(|| {
            self.shared(ops, |table| {
                if host.sequence() != sequence {
                    return Err(MapError::Again);
                }
                table.prepare_in_fault(ops, &fault, &plan.request);
                let done = if plan.relax {
                    table.relax_shared(ops, fault.ipa, plan.request.attributes)
                } else {
                    table.map_shared(ops, usable, &plan.request)
                };
                mark(ops, host, &plan, done)
            })
        });
        let done = match shared {
            Some(done) if done != Err(MapError::Contiguous) => done,
            // Nobody shares, or a run that shared walkers leave alone.
            _ => self.exclusive(ops, |table| {
                if host.sequence() != sequence {
                    return Err(MapError::Again);
                }
                table.prepare_in_fault(ops, &fault, &plan.request);
                let done = if plan.relax {
                    table.relax(ops, fault.ipa, plan.request.attributes)
                } else {
                    table.map(ops, usable, &plan.request)
                };
                mark(ops, host, &plan, done)
            }),
        };
        memcache.may_run_dry(false);
        match done {
            Ok(()) => Ok(Resolution::Resolved),
            Err(MapError::Again) => Ok(Resolution::Retry),
            Err(MapError::NoTable) if memcache.top_up(ops, any, most.max(any)) => {
                Ok(Resolution::Retry)
            }
            Err(MapError::NoTable) => Err(FaultError::NoTables),
            Err(error) => Err(FaultError::Map(error)),
        }
    }

    /// Tables between the entry that faulted and a leaf of this size.
    fn missing(&self, fault: &Fault, wanted: u64) -> usize {
        let below = (fault.level.number() + 1..=3).filter_map(Level::new);
        below
            .filter(|level| self.geometry.span(*level) >= wanted)
            .count()
    }

    fn plan(&self, fault: &Fault, page: &Page, logging: bool) -> Plan {
        let size = if logging {
            self.geometry.granule().size()
        } else {
            largest_leaf(&self.geometry, page.size)
        };
        let ipa = fault.ipa.align_down(size);
        // The log must see every page's first write.
        let write = page.writable && (!logging || fault.access == Access::Write);
        let attributes = Attributes {
            write,
            execute: fault.access == Access::Fetch || self.features.dic,
            ..Attributes::READ
        };
        let relax =
            fault.status == FaultStatus::Permission && self.geometry.span(fault.level) == size;
        Plan {
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

/// Marks dirty what is mapped for writing, before the lock is released.
fn mark<O: Operations, H: Host>(
    ops: &O,
    host: &H,
    plan: &Plan,
    done: Result<(), MapError>,
) -> Result<(), MapError> {
    let MapRequest { ipa, size, .. } = plan.request;
    if done.is_ok() && plan.request.attributes.write {
        ops.note(Note::MarkDirty { ipa, size });
        host.mark_dirty(ipa, size);
    }
    done
}

/// The largest leaf of a geometry that is not larger than a piece of memory.
pub fn largest_leaf(geometry: &Geometry, size: u64) -> u64 {
    (geometry.start().number()..3)
        .filter_map(Level::new)
        .filter(|level| level.can_map(geometry.granule()))
        .map(|level| geometry.span(level))
        .find(|span| *span <= size)
        .unwrap_or_else(|| geometry.granule().size())
}

impl Stage2 {
    /// What 5.10 does in the fault path: every fault that is no permission fault cleans, every
    /// instruction fault invalidates, whatever the map then does.
    fn prepare_in_fault<O: Operations>(&self, ops: &O, fault: &Fault, request: &MapRequest) {
        if self.policy().cmo != CmoPlacement::FaultPath {
            return;
        }
        let attributes = Attributes {
            memory: request.attributes.memory,
            execute: fault.access == Access::Fetch,
            ..Attributes::READ
        };
        let data = fault.status != FaultStatus::Permission;
        self.cmo_in_fault_path(ops, (request.phys, request.size), attributes, data);
    }
}
