// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A simulated vCPU: a process that goes through its task, one access after the other.

use std::rc::Rc;

use granule_stage2::{
    Access as Kind, Ipa, Memcache,
    fault::{FaultError, Resolution},
};

use super::{
    clock,
    host::FaultHost,
    operations::{CpuOperations, Side},
    world::World,
};
use crate::{
    arch::cache::RETURN,
    machine::{Access, Task, VcpuFailure},
    software_machine::{shared::Count, vcpu::PLANTED},
};
use granule_types::units::GuestAddress;

/// The translation that was used last. It holds while no entry changes.
#[derive(Debug, Clone, Copy, Default)]
struct Last {
    changes: u64,
    ipa: u64,
    end: u64,
    phys: u64,
    writes: bool,
}

/// A vCPU.
#[derive(Debug)]
pub(super) struct SimulatedVcpu {
    index: usize,
    world: Rc<World>,
    guest: CpuOperations,
    fault: CpuOperations,
    host: CpuOperations,
    memcache: Memcache,
    last: Last,
}

impl SimulatedVcpu {
    pub(super) fn new(index: usize, world: &Rc<World>) -> Self {
        Self {
            index,
            guest: CpuOperations::new(world, index, Side::Guest),
            fault: CpuOperations::new(world, index, Side::Fault),
            host: CpuOperations::new(world, index, Side::Host),
            world: Rc::clone(world),
            memcache: Memcache::new(),
            last: Last::default(),
        }
    }

    /// The host address behind a guest address, once the access is permitted.
    fn reach(&mut self, ipa: u64, kind: Kind) -> Result<u64, FaultError> {
        let world = Rc::clone(&self.world);
        loop {
            clock::spend(world.prices.guest_touch);
            let last = self.last;
            if last.changes == world.changes.get()
                && (last.ipa..last.end).contains(&ipa)
                && kind != Kind::Fetch
                && (last.writes || kind == Kind::Read)
            {
                return Ok(last.phys + (ipa - last.ipa));
            }
            let fault = match world.mmu.walker().translate(&self.guest, Ipa(ipa), kind) {
                Ok(found) => {
                    let span = world.mmu.geometry().span(found.level);
                    let offset = ipa & (span - 1);
                    self.last = Last {
                        changes: world.changes.get(),
                        ipa: ipa - offset,
                        end: ipa - offset + span,
                        phys: found.phys.0 - offset,
                        writes: found.attributes.write,
                    };
                    return Ok(found.phys.0);
                }
                Err(fault) => fault,
            };
            world.count(Count::Faults, 1);
            clock::charge(world.prices.fault_entry);
            let host = FaultHost::new(&world, &self.host);
            let done = world
                .mmu
                .fault(&self.fault, &host, &mut self.memcache, fault)?;
            if done == Resolution::Retry {
                world.count(Count::Retries, 1);
            }
            if world.reclaim.is_waiting() {
                self.host.drain();
            }
            clock::charge(world.prices.fault_exit);
        }
    }

    fn read(&mut self, ipa: u64, kind: Kind) -> Result<u64, FaultError> {
        let phys = self.reach(ipa, kind)?;
        Ok(self.world.read(phys))
    }

    fn write(&mut self, ipa: u64, value: u64) -> Result<(), FaultError> {
        let phys = self.reach(ipa, Kind::Write)?;
        self.world.write(phys, value);
        Ok(())
    }

    /// What a place holds other than it should.
    fn visit(&mut self, task: &Task, at: u64) -> Result<Option<u64>, FaultError> {
        let value = Task::value_at(task.seed, GuestAddress(at));
        let (found, wanted) = match task.access {
            // This machine is not live, so nobody asks it for the latter.
            Access::Nothing | Access::WriteAtRandom => return Ok(None),
            Access::Read => return self.reach(at, Kind::Read).map(|_| None),
            Access::Write => return self.write(at, value).map(|()| None),
            Access::WriteThenRead => {
                self.write(at, value)?;
                for inner in 0..task.inner_count {
                    let behind = task.inner_first.0 + inner * task.inner_stride.0;
                    self.reach(at + behind, Kind::Read)?;
                }
                return Ok(None);
            }
            Access::Plant => return self.write(at + PLANTED, RETURN).map(|()| None),
            Access::Execute => (self.read(at + PLANTED, Kind::Fetch)?, RETURN),
            Access::Verify => (self.read(at, Kind::Read)?, value),
        };
        Ok((found != wanted).then_some(found))
    }

    /// Goes through a task.
    pub(super) fn run(&mut self, task: &Task) -> Result<(), VcpuFailure> {
        for place in 0..task.count {
            let at = task.start.0 + place * task.stride.0;
            let (exit, detail) = match self.visit(task, at) {
                Ok(None) => continue,
                Ok(Some(found)) => ("VERIFY", format!("{found:#x} is there, which nobody wrote")),
                Err(error) => ("FAULT", error.to_string()),
            };
            return Err(VcpuFailure {
                vcpu: self.index,
                pc: None,
                exit: exit.to_owned(),
                syndrome: None,
                address: Some(GuestAddress(at)),
                detail,
            });
        }
        Ok(())
    }
}
