// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vCPU without a guest, in real and in virtual time: it walks the stage-2 tables for each access
//! of a task as a CPU does, handles a fault by the engine, and then accesses the memory.

use std::{
    cell::Cell,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering, fence},
    },
};

use granule_stage2::{
    Access, Ipa, Memcache, PhysAddr,
    fault::{FaultError, Host, Page, Resolution},
};

use super::{
    CountedEvent, PAGE, START,
    operations::{CpuOperations, Initiator, MachineState, Platform, PlatformEvent},
};
use crate::{
    guest::mailbox::PLANT_OFFSET,
    machine::{Kick, MachineError, Vcpu, VcpuFailure},
    task::{Task, TaskAccess},
};
use granule_types::units::GuestAddress;

/// The "return" instruction that [`TaskAccess::Plant`](crate::task::TaskAccess::Plant) writes.
#[cfg(target_arch = "aarch64")]
pub(super) const RETURN: u64 = 0xd65f_03c0;
/// The "return" instruction that [`TaskAccess::Plant`](crate::task::TaskAccess::Plant) writes.
#[cfg(target_arch = "x86_64")]
pub(super) const RETURN: u64 = 0xc3;

/// Error of an access.
enum AccessError {
    Kicked,
    Fault(FaultError),
    /// The vCPU found this value in place of the expected one.
    Differs(u64),
}

/// The host's memory management in one stage-2 fault.
struct FaultHost<'a, P: Platform> {
    ops: &'a CpuOperations<P>,
    /// `true` once the fault path has read the invalidation sequence.
    sampled: Cell<bool>,
}

impl<P: Platform> Host for FaultHost<'_, P> {
    fn page(&self, ipa: Ipa, access: Access) -> Option<Page> {
        let inside = |at: &u64| *at < self.ops.state.size;
        let offset = ipa.0.checked_sub(START).filter(inside)?;
        Some(P::page(self.ops, offset, access))
    }

    fn logging(&self, _: Ipa) -> bool {
        self.ops.state.logging.load(Ordering::Acquire)
    }

    /// Returns the invalidation sequence. The second read, under the lock, returns a number that
    /// never matches while an invalidation is in progress.
    fn sequence(&self) -> u64 {
        let state = &self.ops.state;
        if self.sampled.replace(true) && state.invalidating.load(Ordering::Acquire) > 0 {
            return u64::MAX;
        }
        state.sequence.load(Ordering::Acquire)
    }

    fn mark_dirty(&self, ipa: Ipa, size: u64) {
        if !self.logging(ipa) {
            return;
        }
        let first = (ipa - Ipa(START)) / PAGE;
        for page in first..first + size / PAGE {
            let word = usize::try_from(page / 64).ok();
            if let Some(word) = word.and_then(|at| self.ops.state.dirty.get(at)) {
                word.fetch_or(1 << (page % 64), Ordering::Relaxed);
            }
        }
    }
}

/// A vCPU on the stage-2 engine.
#[derive(Debug)]
pub struct SoftwareVcpu<P: Platform> {
    index: usize,
    guest: CpuOperations<P>,
    fault_path: CpuOperations<P>,
    host: CpuOperations<P>,
    memcache: Memcache,
    kicked: Arc<AtomicBool>,
}

impl<P: Platform> SoftwareVcpu<P> {
    pub(super) fn new(index: usize, state: &Arc<MachineState<P>>) -> Self {
        Self {
            index,
            guest: CpuOperations::new(state, index, Initiator::Guest),
            fault_path: CpuOperations::new(state, index, Initiator::FaultPath),
            host: CpuOperations::new(state, index, Initiator::Host),
            memcache: Memcache::new(),
            kicked: Arc::default(),
        }
    }

    /// Returns the host address of a guest address, after handling the faults of the access.
    fn translate(&mut self, ipa: Ipa, access: Access) -> Result<PhysAddr, AccessError> {
        let state = &*self.guest.state;
        loop {
            if self.kicked.load(Ordering::Relaxed) {
                return Err(AccessError::Kicked);
            }
            self.guest.perform(PlatformEvent::Access);
            let before = state.frees.load(Ordering::Acquire);
            let result = state.mmu.walker().translate(&self.guest, ipa, access);
            fence(Ordering::Acquire);
            if state.frees.load(Ordering::Relaxed) != before {
                // The walk may have read a table that was freed and reused meanwhile.
                continue;
            }
            let fault = match result {
                Ok(translation) => return Ok(translation.phys),
                Err(fault) => fault,
            };
            state.count(CountedEvent::Faults, 1);
            self.guest.perform(PlatformEvent::FaultEntry);
            let host = FaultHost { ops: &self.host, sampled: Cell::new(false) };
            let resolution = state
                .mmu
                .fault(&self.fault_path, &host, &mut self.memcache, fault)
                .map_err(AccessError::Fault)?;
            if resolution == Resolution::Retry {
                state.count(CountedEvent::Retries, 1);
                self.guest.perform(PlatformEvent::Retry);
            }
            if state.reclaim.is_waiting() {
                self.host.drain();
            }
            self.guest.perform(PlatformEvent::FaultExit);
        }
    }

    /// Reads 8 bytes without using their value.
    fn touch(&mut self, at: u64) -> Result<(), AccessError> {
        let phys = self.translate(Ipa(at), Access::Read)?;
        self.guest.state.platform.touch(phys);
        Ok(())
    }

    /// Reads 8 bytes, which must equal `expected`.
    fn compare(&mut self, at: u64, access: Access, expected: u64) -> Result<(), AccessError> {
        let phys = self.translate(Ipa(at), access)?;
        match self.guest.state.platform.load(phys) {
            found if found == expected => Ok(()),
            found => Err(AccessError::Differs(found)),
        }
    }

    /// Writes 8 bytes.
    fn write(&mut self, at: u64, value: u64) -> Result<(), AccessError> {
        let phys = self.translate(Ipa(at), Access::Write)?;
        self.guest.state.platform.store(phys, value);
        Ok(())
    }

    /// Performs a task's access at one address.
    fn visit(&mut self, task: &Task, at: u64) -> Result<(), AccessError> {
        let value = Task::value_at(task.seed, GuestAddress(at));
        match task.access {
            // These machines have no migration operations, so no task writes at random.
            TaskAccess::Nothing | TaskAccess::WriteAtRandom => Ok(()),
            TaskAccess::Read => self.touch(at),
            TaskAccess::Write => self.write(at, value),
            TaskAccess::WriteThenRead => {
                self.write(at, value)?;
                let first = at + task.inner_first.0;
                (0..task.inner_count)
                    .try_for_each(|inner| self.touch(first + inner * task.inner_stride.0))
            }
            TaskAccess::Plant => self.write(at + PLANT_OFFSET, RETURN),
            TaskAccess::Execute => self.compare(at + PLANT_OFFSET, Access::Fetch, RETURN),
            TaskAccess::Verify => self.compare(at, Access::Read, value),
        }
    }

    /// Executes a task.
    pub(super) fn execute(&mut self, task: &Task) -> Result<(), VcpuFailure> {
        for number in 0..task.count {
            let at = task.start.0 + number * task.stride.0;
            let (exit, detail) = match self.visit(task, at) {
                Ok(()) => continue,
                Err(AccessError::Differs(found)) => {
                    ("VERIFY", format!("the vCPU read {found:#x}, which no vCPU wrote"))
                }
                Err(AccessError::Kicked) => ("KICKED", "the vCPU was kicked".to_owned()),
                Err(AccessError::Fault(error)) => ("FAULT", error.to_string()),
            };
            return Err(VcpuFailure {
                address: Some(GuestAddress(at)),
                ..VcpuFailure::new(self.index, exit, detail)
            });
        }
        Ok(())
    }
}

impl<P: Platform> Vcpu for SoftwareVcpu<P>
where
    Self: Send,
{
    fn bind(&mut self) -> Result<Box<dyn Kick>, MachineError> {
        Ok(Box::new(Arc::clone(&self.kicked)))
    }

    fn run(&mut self, task: &Task) -> Result<(), VcpuFailure> {
        self.execute(task)
    }
}

impl<P: Platform> Drop for SoftwareVcpu<P> {
    fn drop(&mut self) {
        self.memcache.drain(&self.host);
    }
}
