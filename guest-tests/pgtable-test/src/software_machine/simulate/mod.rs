// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The software machine in virtual time: how long the phases would take on a machine that is not
//! here, with as many CPUs as it has.
//!
//! It is a discrete-event simulation of the same engine in the same phases. Every vCPU is a process
//! with its own clock; it takes the lock and waits for it, meets entries that others hold,
//! and pays for every event out of a table of [`cost`]s. What processes share and only one can have
//! at a time is in `world`; what the host's memory management does in a fault is in `host`.
//! Nothing is behind the memory but the words that were written, so 20G need none.
//!
//! It repeats to the byte: one thread, no randomness but the seed's, integer time.
//!
//! Its results say `simulation`, and name the table with its digest: nobody can take them for a
//! machine's own. What it is good for, and how far off it is, stands in `docs/simulation.md`.

mod clock;
pub mod cost;
mod host;
mod lock;
mod operations;
pub mod published;
mod tables;
#[cfg(test)]
mod tests;
mod vcpu;
mod world;

use granule_types::mix::mix;
use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    time::Duration,
};

use granule_stage2::{
    Features, Ipa, Policy, Stage2,
    geometry::{Geometry, Granule},
    operations::Vmid,
};
use sha2::{Digest, Sha256};
use thiserror::Error;

use super::{ModelConfig, ModelError};
use crate::{
    machine::{Machine, MachineError, Region, Task, Vcpu, VcpuFailure},
    vcpu_threads::RoundTimes,
};
use clock::{ClockError, Picoseconds};
use cost::{CostError, CostTable};
use granule_types::{
    backing::Backing,
    record::{EventCounts, Host, Obtained, Series},
    units::{Bytes, GuestAddress, Nanoseconds},
};
use host::{FaultHost, HostMemory, Kind, SMALL};
use operations::{CpuOperations, Side};
use published::Kernel;
use tables::Tables;
use vcpu::SimulatedVcpu;
use world::{Prices, World};
/// Where the region begins: any place that the largest block is aligned at.
const START: u64 = 1 << 32;
/// The latest start of a vCPU with a seed: about a fault.
const MOST_DELAY: Picoseconds = 2_000_000;

/// A simulated machine to be made.
#[derive(Debug, Clone, PartialEq)]
pub struct SimulationConfig {
    /// As for the software machine in real time.
    pub model: ModelConfig,
    /// The policy that [`ModelConfig::policy`] names.
    pub policy: Policy,
    /// What everything costs.
    pub costs: CostTable,
    /// The table's name and digest, for the records.
    pub costs_name: String,
    /// Whether the host's memory is populated beforehand.
    pub prefault: bool,
}

/// Why there is no such machine.
#[derive(Debug, Error)]
pub enum SimulationError {
    /// The table of costs.
    #[error(transparent)]
    Costs(#[from] CostError),
    /// Anything that the software machine refuses too.
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl SimulationConfig {
    /// A machine with the costs of `cpu`, a table's name or file.
    ///
    /// # Errors
    /// There is no such table, or it is malformed, or no such policy.
    pub fn new(model: ModelConfig, cpu: &str, prefault: bool) -> Result<Self, SimulationError> {
        let name = &model.policy;
        let published = Kernel::ALL.iter().find(|kernel| kernel.name() == name);
        let policy = match published {
            Some(kernel) => kernel.policy(),
            None => name.parse().map_err(|source| ModelError::Policy {
                name: name.clone(),
                source,
            })?,
        };
        let text = cost::text_of(cpu)?;
        let costs = CostTable::parse(cpu, &text)?;
        let digest = Sha256::digest(text.as_bytes());
        let short: String = digest[..8].iter().map(|b| format!("{b:02x}")).collect();
        Ok(Self {
            model,
            policy,
            costs,
            costs_name: format!("{cpu} (costs {short})"),
            prefault,
        })
    }
}

/// A machine in virtual time.
#[derive(Debug)]
pub struct SimulatedMachine {
    world: Rc<World>,
    vcpus: Vec<Rc<RefCell<SimulatedVcpu>>>,
    /// The host's own thread.
    ops: CpuOperations,
    host: Host,
    prefault: bool,
    /// When the next round begins.
    time: Cell<Picoseconds>,
    round: u64,
    /// How far NUMA balancing has come.
    scanned: Rc<Cell<u64>>,
}

fn kind_of(backing: Backing) -> Result<Kind, ModelError> {
    match backing {
        Backing::Anonymous => Ok(Kind::Anonymous),
        Backing::AnonymousThp => Ok(Kind::Transparent),
        Backing::Shmem | Backing::AnonymousHugetlb(_) | Backing::SharedHugetlb => {
            super::page_of(backing).map(Kind::Whole)
        }
    }
}

impl SimulatedMachine {
    /// Makes the machine.
    ///
    /// # Errors
    /// What was asked for cannot be had; the error says what and what to do.
    pub fn new(config: &SimulationConfig) -> Result<Self, ModelError> {
        let model = &config.model;
        model.check()?;
        let kind = kind_of(model.backing)?;
        let too_large = || ModelError::Size { size: model.memory };
        let memory = HostMemory::new(kind, START, super::size_of(model)?);
        let geometry = Geometry::new(Granule::K4, 40).map_err(|_| too_large())?;
        let index = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let (size, cpus) = (memory.size(), index(model.vcpus.into()));
        let root = index(geometry.root_tables());
        let tables = Tables::new(root, root + super::tables_for(size, cpus));
        let prices = Prices::new(&config.costs, model.vcpus);
        let table = Stage2::new(
            geometry,
            Features::default(),
            config.policy,
            Vmid(1),
            tables.root(),
        );
        if config.prefault {
            memory.populate();
        }
        // One more for the host's own thread.
        let world = Rc::new(World::new(prices, table, tables, memory, cpus + 1));
        Ok(Self {
            vcpus: (0..cpus)
                .map(|vcpu| Rc::new(RefCell::new(SimulatedVcpu::new(vcpu, &world))))
                .collect(),
            ops: CpuOperations::new(&world, cpus, Side::Host),
            host: Host {
                arch: "aarch64".to_owned(),
                kernel: concat!(env!("CARGO_PKG_VERSION"), "-granule-simulation").to_owned(),
                // The policy is what differs from one run to another, as a series does.
                series: Some(vec![Series {
                    name: format!("model:{}", model.policy),
                    patches: 0,
                }]),
                image_sha256: None,
                cpu: Some(config.costs_name.clone()),
                features: super::no_features(),
                page_size: Some(Bytes(SMALL)),
                emulator: Some(granule_types::record::SIMULATOR.to_owned()),
            },
            world,
            prefault: config.prefault,
            time: Cell::new(0),
            round: 0,
            scanned: Rc::default(),
        })
    }

    /// What the host's thread does, and how long it takes.
    fn timed<T>(&self, act: impl FnOnce(&World) -> T) -> (T, Nanoseconds) {
        clock::set(self.time.get());
        lock::set_costs(self.world.prices.lock_take, self.world.prices.lock_handoff);
        let result = act(&self.world);
        let spent = clock::now() - self.time.get();
        self.time.set(clock::now());
        (result, Nanoseconds(spent / 1000))
    }

    /// The host's automatic NUMA balancing, in a process of its own.
    fn balancing(&self) -> (Picoseconds, Box<dyn FnOnce()>) {
        let (world, next) = (Rc::clone(&self.world), Rc::clone(&self.scanned));
        let ops = CpuOperations::new(&world, self.vcpus.len(), Side::Host);
        let body = move || FaultHost::new(&world, &ops).balance(&next);
        (0, Box::new(body))
    }

    fn failure(error: &ClockError) -> VcpuFailure {
        VcpuFailure {
            vcpu: match error {
                ClockError::Deadlock(waiting) => waiting.first().copied().unwrap_or(0),
                ClockError::Deadline(_) => 0,
            },
            pc: None,
            exit: "NO END".to_owned(),
            syndrome: None,
            address: None,
            detail: error.to_string(),
        }
    }
}

fn failed(doing: &'static str) -> impl FnOnce(granule_stage2::MapError) -> MachineError {
    move |error| MachineError::new(doing, ModelError::Engine(error))
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
            size: Bytes(self.world.host.size()),
            host_page: Bytes(SMALL),
            backing_page: Bytes(self.world.host.page()),
            host_address: None,
        }
    }

    /// None: it runs rounds itself.
    fn take_vcpus(&mut self) -> Vec<Box<dyn Vcpu>> {
        Vec::new()
    }

    fn run_round(
        &mut self,
        tasks: &[Task],
        seed: u64,
        deadline: Duration,
    ) -> Option<Result<RoundTimes, VcpuFailure>> {
        let prices = &self.world.prices;
        lock::set_costs(prices.lock_take, prices.lock_handoff);
        self.round += 1;
        let outcomes = Rc::new(RefCell::new(Vec::new()));
        let processes = self
            .vcpus
            .iter()
            .zip(tasks)
            .enumerate()
            .map(|(index, (vcpu, &task))| {
                let (vcpu, outcomes) = (Rc::clone(vcpu), Rc::clone(&outcomes));
                let world = Rc::clone(&self.world);
                let body = move || {
                    if let Err(failure) = vcpu.borrow_mut().run(&task) {
                        outcomes.borrow_mut().push(failure);
                    }
                    world.working.set(world.working.get() - 1);
                };
                let delay = match seed {
                    0 => 0,
                    _ => mix(mix(seed) ^ (self.round << 32) ^ index as u64) % MOST_DELAY,
                };
                (delay, Box::new(body) as Box<dyn FnOnce()>)
            })
            .chain(std::iter::once(self.balancing()))
            .collect();
        self.world.working.set(self.vcpus.len());
        let start = self.time.get();
        let times = match clock::run(start, processes, deadline) {
            Ok(times) => times,
            Err(error) => return Some(Err(Self::failure(&error))),
        };
        if let Some(failure) = outcomes.borrow().first() {
            return Some(Err(failure.clone()));
        }
        let times = &times[..self.vcpus.len()];
        let last = times.iter().map(|time| time.1).max().unwrap_or(start);
        self.time.set(last);
        Some(Ok(RoundTimes {
            total: Nanoseconds((last - start) / 1000),
            vcpus: times
                .iter()
                .map(|(from, to)| Nanoseconds((to - from) / 1000))
                .collect(),
        }))
    }

    fn obtained(&self) -> Result<Obtained, MachineError> {
        Ok(Obtained {
            resident: self.world.host.resident(),
        })
    }

    fn set_dirty_logging(&mut self, on: bool) -> Result<Nanoseconds, MachineError> {
        let (result, time) = self.timed(|world| {
            let (start, size) = (world.host.start(), world.host.size());
            world.mmu.exclusive(&self.ops, |table| {
                world.logging.set(on);
                if on {
                    world.dirty.borrow_mut().fill(0);
                    table.write_protect(&self.ops, Ipa(start), size)
                } else if table.policy().recover_blocks {
                    world.host.recover(table, &self.ops)
                } else {
                    Ok(())
                }
            })
        });
        result.map_err(failed("switching dirty logging"))?;
        Ok(time)
    }

    fn dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let doing = "reading the dirty log";
        if !self.world.logging.get() {
            return Err(MachineError::new(doing, ModelError::NoLog));
        }
        let (result, _) = self.timed(|world| {
            let (start, size) = (world.host.start(), world.host.size());
            world.mmu.exclusive(&self.ops, |table| {
                table.write_protect(&self.ops, Ipa(start), size)?;
                let mut dirty = world.dirty.borrow_mut();
                let none = vec![0; dirty.len()];
                Ok(std::mem::replace(&mut *dirty, none))
            })
        });
        result.map_err(failed(doing))
    }

    fn drop_backing(&mut self) -> Result<Nanoseconds, MachineError> {
        let (result, time) = self.timed(|world| {
            self.ops.drain();
            let (start, size) = (world.host.start(), world.host.size());
            let unmap = |table: &mut Stage2| table.unmap(&self.ops, Ipa(start), size);
            let result = world.mmu.exclusive(&self.ops, unmap);
            world.forget();
            result
        });
        result.map_err(failed("dropping the memory under test"))?;
        Ok(time)
    }

    fn restore_backing(&mut self) -> Result<(), MachineError> {
        if self.prefault {
            self.world.host.populate();
        }
        Ok(())
    }

    fn read_u64(&self, address: GuestAddress) -> Result<u64, MachineError> {
        let host = &self.world.host;
        let inside = |at: &u64| *at < host.size() && at.is_multiple_of(8);
        let offset = address.0.checked_sub(host.start()).filter(inside);
        let offset = offset.ok_or_else(|| {
            MachineError::new("reading guest memory", ModelError::Outside(address.0))
        })?;
        Ok(host.phys(offset).map_or(0, |phys| self.world.read(phys)))
    }

    fn events(&mut self) -> Result<EventCounts, MachineError> {
        Ok(self.world.events())
    }

    fn gauges(&mut self) -> Result<EventCounts, MachineError> {
        Ok(EventCounts::new())
    }
}
