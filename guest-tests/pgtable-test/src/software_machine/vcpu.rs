// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vCPU without a guest.
//!
//! For each access of a task it walks the stage-2 tables as a CPU does, and passes faults to the
//! engine until the walk succeeds; then it accesses the memory.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering, fence},
    },
    thread,
};

use granule_stage2::{
    Access, Ipa, Memcache, PhysAddr,
    fault::{FaultError, Resolution},
};

use super::{
    operations::CpuOperations,
    state::{CountedEvent, MachineState},
};
use crate::{
    guest::mailbox::PLANT_OFFSET,
    machine::{Kick, MachineError, Vcpu, VcpuFailure},
    task::{Task, TaskAccess},
};
use granule_types::units::GuestAddress;

/// The "return" instruction that [`TaskAccess::Plant`] writes.
#[cfg(target_arch = "aarch64")]
const RETURN: u64 = 0xd65f_03c0;
/// The "return" instruction that [`TaskAccess::Plant`] writes.
#[cfg(target_arch = "x86_64")]
const RETURN: u64 = 0xc3;

/// Error of an access.
enum AccessError {
    Kicked,
    Fault(FaultError),
    /// The vCPU found this value in place of the expected one.
    Differs(u64),
}

/// A vCPU on the stage-2 engine.
#[derive(Debug)]
pub struct SoftwareVcpu {
    index: usize,
    ops: CpuOperations,
    memcache: Memcache,
    kicked: Arc<AtomicBool>,
}

impl SoftwareVcpu {
    pub fn new(index: usize, state: &Arc<MachineState>) -> Self {
        let ops = CpuOperations::new(state, index);
        Self { index, ops, memcache: Memcache::new(), kicked: Arc::default() }
    }

    /// Returns the host address of a guest address, after handling the access's faults.
    fn translate(&mut self, ipa: Ipa, access: Access) -> Result<PhysAddr, AccessError> {
        let state = &*self.ops.state;
        loop {
            if self.kicked.load(Ordering::Relaxed) {
                return Err(AccessError::Kicked);
            }
            let before = state.frees.load(Ordering::Acquire);
            let result = state.mmu.walker().translate(&self.ops, ipa, access);
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
            let resolved = state.mmu.fault(&self.ops, state, &mut self.memcache, fault);
            if resolved.map_err(AccessError::Fault)? == Resolution::Retry {
                state.count(CountedEvent::Retries, 1);
                // The host may have fewer CPUs than vCPUs.
                thread::yield_now();
            }
            if state.reclaim.is_waiting() {
                self.ops.drain();
            }
        }
    }

    /// Reads 8 bytes.
    fn read(&mut self, at: u64, access: Access) -> Result<u64, AccessError> {
        let phys = self.translate(Ipa(at), access)?;
        Ok(self.ops.state.memory.load(phys))
    }

    /// Reads 8 bytes, which must equal `expected`.
    fn compare(&mut self, at: u64, access: Access, expected: u64) -> Result<(), AccessError> {
        match self.read(at, access)? {
            found if found == expected => Ok(()),
            found => Err(AccessError::Differs(found)),
        }
    }

    /// Writes 8 bytes.
    fn write(&mut self, at: u64, value: u64) -> Result<(), AccessError> {
        let phys = self.translate(Ipa(at), Access::Write)?;
        self.ops.state.memory.store(phys, value);
        Ok(())
    }

    /// Performs a task's access at one address.
    fn visit(&mut self, task: &Task, at: u64) -> Result<(), AccessError> {
        let value = Task::value_at(task.seed, GuestAddress(at));
        match task.access {
            // The machine has no migration operations, so no task writes at random.
            TaskAccess::Nothing | TaskAccess::WriteAtRandom => Ok(()),
            TaskAccess::Read => self.read(at, Access::Read).map(drop),
            TaskAccess::Write => self.write(at, value),
            TaskAccess::WriteThenRead => {
                self.write(at, value)?;
                let first = at + task.inner_first.0;
                (0..task.inner_count).try_for_each(|inner| {
                    self.read(first + inner * task.inner_stride.0, Access::Read).map(drop)
                })
            }
            TaskAccess::Plant => self.write(at + PLANT_OFFSET, RETURN),
            TaskAccess::Execute => self.compare(at + PLANT_OFFSET, Access::Fetch, RETURN),
            TaskAccess::Verify => self.compare(at, Access::Read, value),
        }
    }
}

impl Vcpu for SoftwareVcpu {
    fn bind(&mut self) -> Result<Box<dyn Kick>, MachineError> {
        Ok(Box::new(Arc::clone(&self.kicked)))
    }

    fn run(&mut self, task: &Task) -> Result<(), VcpuFailure> {
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

impl Drop for SoftwareVcpu {
    fn drop(&mut self) {
        self.memcache.drain(&self.ops);
    }
}
