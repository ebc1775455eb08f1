// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vCPU without a guest.
//!
//! For each access of a task it walks the stage-2 tables like a CPU and passes faults to the
//! engine, until the walk succeeds; then it accesses the memory.

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
    guest::mailbox::RETURN_OFFSET,
    machine::{Kick, MachineError, TestVcpu, VcpuFailure},
    task::{Task, TaskAccess},
};
use granule_types::units::GuestAddress;

/// The "return" instruction that [`TaskAccess::InstallReturn`] writes.
const RETURN_INSTRUCTION: u64 = if cfg!(target_arch = "aarch64") { 0xd65f_03c0 } else { 0xc3 };

enum AccessError {
    Kicked,
    Fault(FaultError),
    /// Value that the vCPU read instead of the expected one.
    Mismatch(u64),
}

/// A vCPU on the stage-2 engine.
#[derive(Debug)]
pub struct SoftwareVcpu {
    index: usize,
    ops: CpuOperations,
    memcache: Memcache,
    is_kicked: Arc<AtomicBool>,
}

impl SoftwareVcpu {
    pub fn new(index: usize, state: &Arc<MachineState>) -> Self {
        let ops = CpuOperations::new(state, index);
        Self { index, ops, memcache: Memcache::new(), is_kicked: Arc::default() }
    }

    /// Returns the output address of an IPA, and handles the faults of the access.
    fn translate(&mut self, ipa: Ipa, access: Access) -> Result<PhysAddr, AccessError> {
        let state = &*self.ops.state;
        loop {
            if self.is_kicked.load(Ordering::Relaxed) {
                return Err(AccessError::Kicked);
            }
            let before = state.freed_table_count.load(Ordering::Acquire);
            let result = state.mmu.walker().translate(&self.ops, ipa, access);
            fence(Ordering::Acquire);
            if state.freed_table_count.load(Ordering::Relaxed) != before {
                // The walk may have read a table that was freed and reused.
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
            if state.reclaim.has_deferred() {
                self.ops.drain();
            }
        }
    }

    fn read(&mut self, address: u64, access: Access) -> Result<u64, AccessError> {
        let phys = self.translate(Ipa(address), access)?;
        Ok(self.ops.state.memory.load(phys))
    }

    /// Reads 8 bytes, which must equal `expected`.
    fn compare(&mut self, address: u64, access: Access, expected: u64) -> Result<(), AccessError> {
        match self.read(address, access)? {
            found if found == expected => Ok(()),
            found => Err(AccessError::Mismatch(found)),
        }
    }

    fn write(&mut self, address: u64, value: u64) -> Result<(), AccessError> {
        let phys = self.translate(Ipa(address), Access::Write)?;
        self.ops.state.memory.store(phys, value);
        Ok(())
    }

    fn access(&mut self, task: &Task, address: u64) -> Result<(), AccessError> {
        let value = Task::value_at(task.seed, GuestAddress(address));
        match task.access {
            // Tasks write at random only on machines with migration operations.
            TaskAccess::Nothing | TaskAccess::WriteAtRandom => Ok(()),
            TaskAccess::Read => self.read(address, Access::Read).map(drop),
            TaskAccess::Write => self.write(address, value),
            TaskAccess::WriteThenRead => {
                self.write(address, value)?;
                let first = address + task.read_offset.0;
                (0..task.read_count).try_for_each(|inner| {
                    self.read(first + inner * task.read_stride.0, Access::Read).map(drop)
                })
            }
            TaskAccess::InstallReturn => self.write(address + RETURN_OFFSET, RETURN_INSTRUCTION),
            TaskAccess::Execute => {
                self.compare(address + RETURN_OFFSET, Access::Fetch, RETURN_INSTRUCTION)
            }
            TaskAccess::Verify => self.compare(address, Access::Read, value),
        }
    }
}

impl TestVcpu for SoftwareVcpu {
    fn bind(&mut self) -> Result<Box<dyn Kick>, MachineError> {
        Ok(Box::new(Arc::clone(&self.is_kicked)))
    }

    fn run(&mut self, task: &Task) -> Result<(), VcpuFailure> {
        for number in 0..task.count {
            let at = task.start.0 + number * task.stride.0;
            let (exit, detail) = match self.access(task, at) {
                Ok(()) => continue,
                Err(AccessError::Mismatch(found)) => {
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
