// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A simulated vCPU: a process that executes a task, one access after the other.

use std::rc::Rc;

use granule_stage2::{Access as Stage2Access, Ipa, Memcache, fault::Resolution};

use super::{
    host_faults::HostFaults,
    operations::{CpuOperations, Initiator},
    state::SimState,
    virtual_time,
};
use crate::{
    machine::VcpuFailure,
    software_machine::{
        Count,
        vcpu::{AccessError, TranslatedMemory, perform},
    },
    task::Task,
};

/// The translation used last, which is valid while no entry changes.
#[derive(Debug, Clone, Copy, Default)]
struct CachedTranslation {
    changes: u64,
    ipa: u64,
    end: u64,
    phys: u64,
    writes: bool,
}

/// A simulated vCPU.
#[derive(Debug)]
pub(super) struct SimulatedVcpu {
    index: usize,
    state: Rc<SimState>,
    guest: CpuOperations,
    fault_path: CpuOperations,
    host: CpuOperations,
    memcache: Memcache,
    cached: CachedTranslation,
}

impl SimulatedVcpu {
    pub(super) fn new(index: usize, state: &Rc<SimState>) -> Self {
        Self {
            index,
            guest: CpuOperations::new(state, index, Initiator::Guest),
            fault_path: CpuOperations::new(state, index, Initiator::FaultPath),
            host: CpuOperations::new(state, index, Initiator::Host),
            state: Rc::clone(state),
            memcache: Memcache::new(),
            cached: CachedTranslation::default(),
        }
    }

    /// Executes a task.
    pub(super) fn run(&mut self, task: &Task) -> Result<(), VcpuFailure> {
        let vcpu = self.index;
        perform(self, vcpu, task)
    }
}

impl TranslatedMemory for SimulatedVcpu {
    fn translate(&mut self, ipa: Ipa, access: Stage2Access) -> Result<u64, AccessError> {
        let state = Rc::clone(&self.state);
        loop {
            virtual_time::spend(state.prices.guest_touch);
            let cached = self.cached;
            if cached.changes == state.changes.get()
                && (cached.ipa..cached.end).contains(&ipa.0)
                && access != Stage2Access::Fetch
                && (cached.writes || access == Stage2Access::Read)
            {
                return Ok(cached.phys + (ipa.0 - cached.ipa));
            }
            let fault = match state.mmu.walker().translate(&self.guest, ipa, access) {
                Ok(found) => {
                    let span = state.mmu.geometry().span(found.level);
                    let offset = ipa.0 & (span - 1);
                    self.cached = CachedTranslation {
                        changes: state.changes.get(),
                        ipa: ipa.0 - offset,
                        end: ipa.0 - offset + span,
                        phys: found.phys.0 - offset,
                        writes: found.attributes.write,
                    };
                    return Ok(found.phys.0);
                }
                Err(fault) => fault,
            };
            state.count(Count::Faults, 1);
            virtual_time::charge(state.prices.fault_entry);
            let host = HostFaults::new(&state, &self.host);
            let resolution = state
                .mmu
                .fault(&self.fault_path, &host, &mut self.memcache, fault)
                .map_err(AccessError::Fault)?;
            if resolution == Resolution::Retry {
                state.count(Count::Retries, 1);
            }
            if state.reclaim.is_waiting() {
                self.host.drain();
            }
            virtual_time::charge(state.prices.fault_exit);
        }
    }

    fn load(&self, place: u64) -> u64 {
        self.state.read(place)
    }

    fn store(&self, place: u64, value: u64) {
        self.state.write(place, value);
    }

    fn touch(&mut self, ipa: Ipa, access: Stage2Access) -> Result<(), AccessError> {
        self.translate(ipa, access).map(drop)
    }
}
