// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vCPU that is a thread: it walks the stage-2 table for each access as a CPU does, takes the
//! fault to the engine where there is one, and then accesses the memory for real.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering, fence},
};

use granule_stage2::{
    Access as Kind, Ipa, Memcache,
    fault::{FaultError, Resolution},
};

use super::{
    operations::CpuOperations,
    shared::{Count, Shared},
};
use crate::{
    arch::cache::RETURN,
    machine::{Access, Kick, MachineError, Task, Vcpu, VcpuFailure},
};
use granule_types::units::GuestAddress;

/// Where an instruction is planted, behind a place's own 8 bytes.
pub(super) const PLANTED: u64 = 8;

pub(super) struct ModelVcpu {
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

/// Why an access came to nothing.
enum Stop {
    Kicked,
    Fault(FaultError),
}

impl ModelVcpu {
    pub(super) fn new(index: usize, shared: Arc<Shared>) -> Self {
        Self {
            index,
            ops: CpuOperations::new(shared, index),
            memcache: Memcache::new(),
            kicked: Arc::default(),
        }
    }

    /// The offset of the memory behind a guest address, once the access is permitted.
    fn reach(&mut self, ipa: u64, kind: Kind) -> Result<usize, Stop> {
        loop {
            if self.kicked.load(Ordering::Relaxed) {
                return Err(Stop::Kicked);
            }
            let shared = &self.ops.shared;
            let before = shared.frees.load(Ordering::Acquire);
            let seen = shared.mmu.walker().translate(&self.ops, Ipa(ipa), kind);
            fence(Ordering::Acquire);
            if shared.frees.load(Ordering::Relaxed) != before {
                // A table may have become another one under the walk.
                continue;
            }
            let fault = match seen {
                Ok(translation) => return Ok(shared.offset(translation.phys.0)),
                Err(fault) => fault,
            };
            shared.count(Count::Faults, 1);
            let done = shared
                .mmu
                .fault(&self.ops, &**shared, &mut self.memcache, fault)
                .map_err(Stop::Fault)?;
            if done == Resolution::Retry {
                shared.count(Count::Retries, 1);
                std::thread::yield_now();
            }
            if shared.reclaim.is_waiting() {
                self.ops.drain();
            }
        }
    }

    fn read(&mut self, ipa: u64, kind: Kind) -> Result<u64, Stop> {
        let offset = self.reach(ipa, kind)?;
        Ok(self.ops.shared.memory.word(offset).load(Ordering::Relaxed))
    }

    fn write(&mut self, ipa: u64, value: u64) -> Result<(), Stop> {
        let offset = self.reach(ipa, Kind::Write)?;
        self.ops
            .shared
            .memory
            .word(offset)
            .store(value, Ordering::Relaxed);
        Ok(())
    }

    /// What a place holds other than it should.
    fn visit(&mut self, task: &Task, at: u64) -> Result<Option<u64>, Stop> {
        let value = Task::value_at(task.seed, GuestAddress(at));
        let found = match task.access {
            // This machine is not live, so nobody asks it for the latter.
            Access::Nothing | Access::WriteAtRandom => return Ok(None),
            Access::Read => {
                self.read(at, Kind::Read)?;
                return Ok(None);
            }
            Access::Write => {
                self.write(at, value)?;
                return Ok(None);
            }
            Access::WriteThenRead => {
                self.write(at, value)?;
                for inner in 0..task.inner_count {
                    let behind = task.inner_first.0 + inner * task.inner_stride.0;
                    self.read(at + behind, Kind::Read)?;
                }
                return Ok(None);
            }
            Access::Plant => {
                self.write(at + PLANTED, RETURN)?;
                return Ok(None);
            }
            Access::Execute => (self.read(at + PLANTED, Kind::Fetch)?, RETURN),
            Access::Verify => (self.read(at, Kind::Read)?, value),
        };
        Ok((found.0 != found.1).then_some(found.0))
    }

    fn failure(&self, exit: &str, address: u64, detail: String) -> VcpuFailure {
        VcpuFailure {
            vcpu: self.index,
            pc: None,
            exit: exit.to_owned(),
            syndrome: None,
            address: Some(GuestAddress(address)),
            detail,
        }
    }
}

impl Vcpu for ModelVcpu {
    fn bind(&mut self) -> Result<Box<dyn Kick>, MachineError> {
        Ok(Box::new(KickFlag(Arc::clone(&self.kicked))))
    }

    fn run(&mut self, task: &Task) -> Result<(), VcpuFailure> {
        for place in 0..task.count {
            let at = task.start.0 + place * task.stride.0;
            match self.visit(task, at) {
                Ok(None) => {}
                Ok(Some(found)) => {
                    let detail = format!("{found:#x} is there, which nobody wrote");
                    return Err(self.failure("VERIFY", at, detail));
                }
                Err(Stop::Kicked) => {
                    return Err(self.failure("KICKED", at, "it was told to stop".to_owned()));
                }
                Err(Stop::Fault(error)) => {
                    return Err(self.failure("FAULT", at, error.to_string()));
                }
            }
        }
        Ok(())
    }
}

impl Drop for ModelVcpu {
    fn drop(&mut self) {
        self.memcache.drain(&self.ops);
    }
}
