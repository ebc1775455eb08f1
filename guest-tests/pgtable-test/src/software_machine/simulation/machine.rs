// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The machine in virtual time, as the harness uses it.

use std::{
    cell::{Cell, RefCell},
    iter,
    rc::Rc,
    time::Duration,
};

use granule_stage2::{
    Features, Ipa, MapError, Stage2,
    geometry::{Geometry, Granule},
    operations::Vmid,
};

use super::{
    SimulationConfig,
    cost::Prices,
    host_faults::{HostFaults, recover_blocks},
    host_memory::{HostMemory, PageAllocation},
    lock,
    operations::{CpuOperations, Initiator},
    state::{SimState, Tables},
    vcpu::SimulatedVcpu,
    virtual_time::{self, ClockError, Picoseconds},
};
use crate::{
    machine::{Machine, MachineError, Region, TaskTimes, Vcpu, VcpuFailure},
    software_machine::{PAGE, START, SoftwareMachineError, cpu_features, most_tables},
    task::Task,
};
use granule_types::{
    mix,
    record::{EventCounts, Host, ResidentPages, SIMULATOR},
    units::{Bytes, GuestAddress, Nanoseconds},
};

/// Exclusive limit of a vCPU's seeded delay: about the time of a fault.
const DELAY_LIMIT: Picoseconds = 2_000_000;

/// A machine in virtual time.
#[derive(Debug)]
pub struct SimulatedMachine {
    state: Rc<SimState>,
    vcpus: Vec<Rc<RefCell<SimulatedVcpu>>>,
    /// Operations of the host's thread.
    ops: CpuOperations,
    host: Host,
    prefault: bool,
    /// Time at which the next tasks start.
    time: Cell<Picoseconds>,
    /// Number of executions of tasks.
    runs: u64,
    /// Offset of the next scan of NUMA balancing.
    scanned: Rc<Cell<u64>>,
}

impl SimulatedMachine {
    /// Makes the machine.
    ///
    /// # Errors
    /// The configuration is not supported.
    pub fn new(config: &SimulationConfig) -> Result<Self, SoftwareMachineError> {
        let machine = &config.machine;
        machine.check()?;
        let allocation = PageAllocation::of(machine.backing)?;
        let memory = HostMemory::new(allocation, START, machine.size()?);
        let geometry = Geometry::new(Granule::K4, 40).map_err(|_| machine.too_large())?;
        let index = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let (size, vcpus) = (memory.size(), index(machine.vcpus.into()));
        let root = index(geometry.root_tables());
        let tables = Tables::new(root, root + most_tables(size, vcpus));
        let prices = Prices::new(&config.costs, machine.vcpus);
        let features = Features::default();
        let table = Stage2::new(geometry, features, config.policy, Vmid(1), tables.root());
        if config.prefault {
            memory.populate();
        }
        // One more for the host's thread.
        let state = Rc::new(SimState::new(prices, table, tables, memory, vcpus + 1));
        Ok(Self {
            vcpus: (0..vcpus)
                .map(|vcpu| Rc::new(RefCell::new(SimulatedVcpu::new(vcpu, &state))))
                .collect(),
            ops: CpuOperations::new(&state, vcpus, Initiator::Host),
            host: Host {
                arch: "aarch64".to_owned(),
                kernel: concat!(env!("CARGO_PKG_VERSION"), "-granule-simulation").to_owned(),
                series: Some(machine.series()),
                image_sha256: None,
                cpu: Some(config.costs_name.clone()),
                features: cpu_features(),
                page_size: Some(Bytes(PAGE)),
                emulator: Some(SIMULATOR.to_owned()),
            },
            state,
            prefault: config.prefault,
            time: Cell::new(0),
            runs: 0,
            scanned: Rc::default(),
        })
    }

    /// Runs an operation of the host's thread and measures its time.
    fn timed<T>(&self, act: impl FnOnce(&SimState) -> T) -> (T, Nanoseconds) {
        virtual_time::set(self.time.get());
        lock::set_costs(self.state.prices.lock_take, self.state.prices.lock_handoff);
        let result = act(&self.state);
        let spent = virtual_time::now() - self.time.get();
        self.time.set(virtual_time::now());
        (result, Nanoseconds(spent / 1000))
    }

    /// Returns the process of the host's automatic NUMA balancing.
    fn numa_balancing(&self) -> (Picoseconds, Box<dyn FnOnce()>) {
        let (state, next) = (Rc::clone(&self.state), Rc::clone(&self.scanned));
        let ops = CpuOperations::new(&state, self.vcpus.len(), Initiator::Host);
        let body = move || HostFaults::new(&state, &ops).balance(&next);
        (0, Box::new(body))
    }

    fn failure(error: &ClockError) -> VcpuFailure {
        let vcpu = match error {
            ClockError::Deadlock(waiting) => waiting.first().copied().unwrap_or(0),
            ClockError::Deadline(_) => 0,
        };
        VcpuFailure::new(vcpu, "NO END", error.to_string())
    }
}

fn failed(doing: &'static str) -> impl FnOnce(MapError) -> MachineError {
    move |error| MachineError::new(doing, SoftwareMachineError::Engine(error))
}

impl Machine for SimulatedMachine {
    fn host(&self) -> &Host {
        &self.host
    }

    fn engine(&self) -> &'static str {
        "simulation"
    }

    fn region(&self) -> Region {
        Region {
            start: GuestAddress(START),
            size: Bytes(self.state.host.size()),
            host_page: Bytes(PAGE),
            backing_page: Bytes(self.state.host.page()),
            host_address: None,
        }
    }

    /// Returns no vCPUs: the machine executes tasks itself.
    fn take_vcpus(&mut self) -> Vec<Box<dyn Vcpu>> {
        Vec::new()
    }

    fn run_tasks(
        &mut self,
        tasks: &[Task],
        seed: u64,
        deadline: Duration,
    ) -> Option<Result<TaskTimes, VcpuFailure>> {
        let prices = &self.state.prices;
        lock::set_costs(prices.lock_take, prices.lock_handoff);
        self.runs += 1;
        let failures = Rc::new(RefCell::new(Vec::new()));
        let process = |(index, (vcpu, &task)): (usize, (&Rc<RefCell<SimulatedVcpu>>, &Task))| {
            let (vcpu, failures) = (Rc::clone(vcpu), Rc::clone(&failures));
            let state = Rc::clone(&self.state);
            let body = move || {
                if let Err(failure) = vcpu.borrow_mut().run(&task) {
                    failures.borrow_mut().push(failure);
                }
                state.working.set(state.working.get() - 1);
            };
            let delay = match seed {
                0 => 0,
                _ => mix(mix(seed) ^ (self.runs << 32) ^ index as u64) % DELAY_LIMIT,
            };
            (delay, Box::new(body) as Box<dyn FnOnce()>)
        };
        let vcpus = self.vcpus.iter().zip(tasks).enumerate().map(process);
        let processes = vcpus.chain(iter::once(self.numa_balancing())).collect();
        self.state.working.set(self.vcpus.len());
        let start = self.time.get();
        let times = match virtual_time::run(start, processes, deadline) {
            Ok(times) => times,
            Err(error) => return Some(Err(Self::failure(&error))),
        };
        if let Some(failure) = failures.borrow().first() {
            return Some(Err(failure.clone()));
        }
        let times = &times[..self.vcpus.len()];
        let last = times.iter().map(|time| time.1).max().unwrap_or(start);
        self.time.set(last);
        Some(Ok(TaskTimes {
            total: Nanoseconds((last - start) / 1000),
            vcpus: times.iter().map(|(from, to)| Nanoseconds((to - from) / 1000)).collect(),
        }))
    }

    fn obtained(&self) -> Result<ResidentPages, MachineError> {
        Ok(ResidentPages { resident: self.state.host.resident() })
    }

    fn set_dirty_logging(&mut self, on: bool) -> Result<Nanoseconds, MachineError> {
        let (result, time) = self.timed(|state| {
            let (start, size) = (state.host.start(), state.host.size());
            state.mmu.exclusive(&self.ops, |table| {
                state.logging.set(on);
                if on {
                    state.dirty.borrow_mut().fill(0);
                    table.write_protect(&self.ops, Ipa(start), size)
                } else if table.policy().recover_blocks {
                    recover_blocks(state, table, &self.ops)
                } else {
                    Ok(())
                }
            })
        });
        result.map_err(failed("switching dirty logging"))?;
        Ok(time)
    }

    fn dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let doing = "reading the dirty bitmap";
        if !self.state.logging.get() {
            return Err(MachineError::new(doing, SoftwareMachineError::LoggingOff));
        }
        let (result, _) = self.timed(|state| {
            let (start, size) = (state.host.start(), state.host.size());
            state.mmu.exclusive(&self.ops, |table| {
                table.write_protect(&self.ops, Ipa(start), size)?;
                let mut dirty = state.dirty.borrow_mut();
                let none = vec![0; dirty.len()];
                Ok(std::mem::replace(&mut *dirty, none))
            })
        });
        result.map_err(failed(doing))
    }

    fn drop_backing(&mut self) -> Result<Nanoseconds, MachineError> {
        let (result, time) = self.timed(|state| {
            self.ops.drain();
            let (start, size) = (state.host.start(), state.host.size());
            let unmap = |table: &mut Stage2| table.unmap(&self.ops, Ipa(start), size);
            let result = state.mmu.exclusive(&self.ops, unmap);
            state.forget();
            result
        });
        result.map_err(failed("dropping the memory under test"))?;
        Ok(time)
    }

    fn restore_backing(&mut self) -> Result<(), MachineError> {
        if self.prefault {
            self.state.host.populate();
        }
        Ok(())
    }

    fn read_u64(&self, address: GuestAddress) -> Result<u64, MachineError> {
        let host = &self.state.host;
        let inside = |at: &u64| *at < host.size() && at.is_multiple_of(8);
        let offset = address.0.checked_sub(host.start()).filter(inside);
        let offset = offset.ok_or_else(|| {
            MachineError::new("reading guest memory", SoftwareMachineError::Outside(address.0))
        })?;
        Ok(host.phys(offset).map_or(0, |phys| self.state.read(phys)))
    }

    fn events(&mut self) -> Result<EventCounts, MachineError> {
        Ok(self.state.events())
    }
}
