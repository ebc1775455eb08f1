// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The accesses of a task by a vCPU without a guest, in real and in virtual time, and the vCPU that is
//! a thread: it walks the stage-2 tables for each access as a CPU does, handles a
//! fault by the engine, and then accesses the memory.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering, fence},
};

use granule_stage2::{
    Access as Stage2Access, Ipa, Memcache,
    fault::{FaultError, Resolution},
};

use super::{
    Count,
    arch::RETURN,
    operations::{CpuOperations, MachineState},
};
use crate::{
    machine::{Kick, MachineError, Vcpu, VcpuFailure},
    task::{Access, Task},
};
use granule_types::units::GuestAddress;

/// Distance from a visited address to the planted instruction, after its own 8 bytes.
const PLANT_OFFSET: u64 = 8;

/// Memory of a vCPU, accessed through stage-2 translation.
pub(super) trait TranslatedMemory {
    /// Returns the place in memory of a guest address, after handling the faults of the access.
    fn translate(&mut self, ipa: Ipa, access: Stage2Access) -> Result<u64, AccessError>;

    /// Reads 8 bytes.
    fn load(&self, place: u64) -> u64;

    /// Writes 8 bytes.
    fn store(&self, place: u64, value: u64);

    /// Accesses 8 bytes without using their value.
    fn touch(&mut self, ipa: Ipa, access: Stage2Access) -> Result<(), AccessError> {
        self.read(ipa, access).map(drop)
    }

    /// Reads 8 bytes at a guest address.
    fn read(&mut self, ipa: Ipa, access: Stage2Access) -> Result<u64, AccessError> {
        let place = self.translate(ipa, access)?;
        Ok(self.load(place))
    }

    /// Writes 8 bytes at a guest address.
    fn write(&mut self, ipa: Ipa, value: u64) -> Result<(), AccessError> {
        let place = self.translate(ipa, Stage2Access::Write)?;
        self.store(place, value);
        Ok(())
    }
}

/// Error of an access.
pub(super) enum AccessError {
    Kicked,
    Fault(FaultError),
}

/// Performs a task's access at one address. Returns the value found there if it differs from the
/// expected one.
fn visit<M: TranslatedMemory>(
    memory: &mut M,
    task: &Task,
    at: u64,
) -> Result<Option<u64>, AccessError> {
    let value = Task::value_at(task.seed, GuestAddress(at));
    let planted = Ipa(at + PLANT_OFFSET);
    let at = Ipa(at);
    let (found, expected) = match task.access {
        // These machines have no migration operations, so no task writes at random.
        Access::Nothing | Access::WriteAtRandom => return Ok(None),
        Access::Read => return memory.touch(at, Stage2Access::Read).map(|()| None),
        Access::Write => return memory.write(at, value).map(|()| None),
        Access::WriteThenRead => {
            memory.write(at, value)?;
            for inner in 0..task.inner_count {
                let offset = task.inner_first.0 + inner * task.inner_stride.0;
                memory.touch(Ipa(at.0 + offset), Stage2Access::Read)?;
            }
            return Ok(None);
        }
        Access::Plant => return memory.write(planted, RETURN).map(|()| None),
        Access::Execute => (memory.read(planted, Stage2Access::Fetch)?, RETURN),
        Access::Verify => (memory.read(at, Stage2Access::Read)?, value),
    };
    Ok((found != expected).then_some(found))
}

/// Performs a task on a vCPU.
pub(super) fn perform<M: TranslatedMemory>(
    memory: &mut M,
    vcpu: usize,
    task: &Task,
) -> Result<(), VcpuFailure> {
    for number in 0..task.count {
        let at = task.start.0 + number * task.stride.0;
        let (exit, detail) = match visit(memory, task, at) {
            Ok(None) => continue,
            Ok(Some(found)) => {
                let detail = format!("the vCPU read {found:#x}, which no vCPU wrote");
                ("VERIFY", detail)
            }
            Err(AccessError::Kicked) => ("KICKED", "the vCPU was kicked".to_owned()),
            Err(AccessError::Fault(error)) => ("FAULT", error.to_string()),
        };
        return Err(VcpuFailure {
            address: Some(GuestAddress(at)),
            ..VcpuFailure::new(vcpu, exit, detail)
        });
    }
    Ok(())
}

pub(super) struct SoftwareVcpu {
    index: usize,
    ops: CpuOperations,
    memcache: Memcache,
    kicked: Arc<AtomicBool>,
}

impl SoftwareVcpu {
    pub(super) fn new(index: usize, state: Arc<MachineState>) -> Self {
        Self {
            index,
            ops: CpuOperations::new(state, index),
            memcache: Memcache::new(),
            kicked: Arc::default(),
        }
    }
}

impl TranslatedMemory for SoftwareVcpu {
    fn translate(&mut self, ipa: Ipa, access: Stage2Access) -> Result<u64, AccessError> {
        loop {
            if self.kicked.load(Ordering::Relaxed) {
                return Err(AccessError::Kicked);
            }
            let state = &self.ops.state;
            let before = state.frees.load(Ordering::Acquire);
            let result = state.mmu.walker().translate(&self.ops, ipa, access);
            fence(Ordering::Acquire);
            if state.frees.load(Ordering::Relaxed) != before {
                // The walk may have read a table that was freed and reused meanwhile.
                continue;
            }
            let fault = match result {
                Ok(translation) => return Ok(translation.phys.0),
                Err(fault) => fault,
            };
            state.count(Count::Faults, 1);
            let resolution = state
                .mmu
                .fault(&self.ops, &**state, &mut self.memcache, fault)
                .map_err(AccessError::Fault)?;
            if resolution == Resolution::Retry {
                state.count(Count::Retries, 1);
                std::thread::yield_now();
            }
            if state.reclaim.is_waiting() {
                self.ops.drain();
            }
        }
    }

    fn load(&self, place: u64) -> u64 {
        let state = &self.ops.state;
        state.memory.word(state.offset(place)).load(Ordering::Relaxed)
    }

    fn store(&self, place: u64, value: u64) {
        let state = &self.ops.state;
        state.memory.word(state.offset(place)).store(value, Ordering::Relaxed);
    }
}

impl Vcpu for SoftwareVcpu {
    fn bind(&mut self) -> Result<Box<dyn Kick>, MachineError> {
        Ok(Box::new(Arc::clone(&self.kicked)))
    }

    fn run(&mut self, task: &Task) -> Result<(), VcpuFailure> {
        let vcpu = self.index;
        perform(self, vcpu, task)
    }
}

impl Drop for SoftwareVcpu {
    fn drop(&mut self) {
        self.memcache.drain(&self.ops);
    }
}
