// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vCPU that is a thread: it walks the stage-2 tables for each access as a CPU does, handles a
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
    access::{TranslatedMemory, failure, unexpected_value, visit},
    counters::Count,
    operations::CpuOperations,
    state::MachineState,
};
use crate::{
    machine::{Kick, MachineError, Vcpu, VcpuFailure},
    task::Task,
};

pub(super) struct SoftwareVcpu {
    index: usize,
    ops: CpuOperations,
    memcache: Memcache,
    kicked: Arc<AtomicBool>,
}

struct KickFlag(Arc<AtomicBool>);

impl Kick for KickFlag {
    fn kick(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Error of an access.
pub(super) enum AccessError {
    Kicked,
    Fault(FaultError),
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

    /// Returns the offset of a guest address in the memory, after handling the faults of the access.
    fn translate(&mut self, ipa: Ipa, access: Stage2Access) -> Result<usize, AccessError> {
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
                Ok(translation) => return Ok(state.offset(translation.phys.0)),
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
}

impl TranslatedMemory for SoftwareVcpu {
    type Error = AccessError;

    fn touch(&mut self, ipa: Ipa, access: Stage2Access) -> Result<(), AccessError> {
        self.read(ipa, access).map(drop)
    }

    fn read(&mut self, ipa: Ipa, access: Stage2Access) -> Result<u64, AccessError> {
        let offset = self.translate(ipa, access)?;
        Ok(self.ops.state.memory.word(offset).load(Ordering::Relaxed))
    }

    fn write(&mut self, ipa: Ipa, value: u64) -> Result<(), AccessError> {
        let offset = self.translate(ipa, Stage2Access::Write)?;
        let word = self.ops.state.memory.word(offset);
        word.store(value, Ordering::Relaxed);
        Ok(())
    }
}

impl Vcpu for SoftwareVcpu {
    fn bind(&mut self) -> Result<Box<dyn Kick>, MachineError> {
        Ok(Box::new(KickFlag(Arc::clone(&self.kicked))))
    }

    fn run(&mut self, task: &Task) -> Result<(), VcpuFailure> {
        let vcpu = self.index;
        for number in 0..task.count {
            let at = task.start.0 + number * task.stride.0;
            match visit(self, task, at) {
                Ok(None) => {}
                Ok(Some(found)) => return Err(unexpected_value(vcpu, at, found)),
                Err(AccessError::Kicked) => {
                    let detail = "the vCPU was kicked".to_owned();
                    return Err(failure(vcpu, "KICKED", at, detail));
                }
                Err(AccessError::Fault(error)) => {
                    return Err(failure(vcpu, "FAULT", at, error.to_string()));
                }
            }
        }
        Ok(())
    }
}

impl Drop for SoftwareVcpu {
    fn drop(&mut self) {
        self.memcache.drain(&self.ops);
    }
}
