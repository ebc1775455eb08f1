// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The software machine in virtual time: a discrete-event simulation of the stage-2 engine on a
//! machine with one CPU for each vCPU.
//!
//! Every vCPU is a process with its own clock (`virtual_time`). It waits for the lock and for
//! entries that other vCPUs hold, and each event takes the time that a table of [`cost`]s states.
//! Resources that one CPU at a time can use are in `state`; the host's memory management is in
//! `host_faults`. Memory holds written words only, so 20G need memory for their tables alone.
//!
//! Results repeat to the byte: the simulation has one thread, integer time, and no randomness
//! except the seed. Records name `simulation` as their engine and the cost table with its digest as
//! their CPU. `docs/simulation.md` describes its accuracy.

pub mod cost;
mod host_faults;
pub mod published;
mod state;
mod virtual_time;

use std::{cell::RefCell, collections::BTreeMap, io, mem, rc::Rc, sync::Arc, time::Duration};

use granule_stage2::{
    Access, CmoPlacement, Coalesce, ExistingLeaf, MapError, PhysAddr, Policy, Stage2, fault::Page,
    operations::Scope,
};
use sha2::{Digest, Sha256};

use super::{
    SoftwareMachineConfig, SoftwareMachineError,
    machine::{EngineMachine, TimedPlatform},
    operations::{CpuOperations, Initiator, MachineState, Platform, PlatformEvent},
    vcpu::SoftwareVcpu,
};
use crate::{
    machine::{TaskTimes, Vcpu, VcpuFailure},
    task::Task,
};
use cost::{CostTable, Prices};
use granule_types::{
    mix,
    record::{EventCounts, Host, SIMULATOR},
    units::{HostVirtAddr, Nanoseconds},
};
use state::{HostMemory, PageAllocation, VirtualTime};
use virtual_time::{ClockError, VirtualLock, charge, spend};

/// Exclusive limit of a vCPU's seeded delay: about the time of a fault.
const DELAY_LIMIT: virtual_time::Picoseconds = 2_000_000;

/// Size of a cache line.
const LINE: u64 = 64;

/// Configuration of a simulated machine.
#[derive(Debug, Clone, PartialEq)]
pub struct SimulationConfig {
    /// Memory, vCPUs and policy, as for the software machine in real time.
    pub machine: SoftwareMachineConfig,
    /// The policy that [`SoftwareMachineConfig::policy`] names.
    pub policy: Policy,
    /// The cost of each event.
    pub costs: CostTable,
    /// Name and digest of the cost table, for the records.
    pub costs_name: String,
    /// Population of the memory by the host before the test.
    pub prefault: bool,
}

impl SimulationConfig {
    /// Returns a configuration with the costs of `cpu`, which is the name or the file of a table.
    ///
    /// # Errors
    /// The cost table or the policy does not exist, or the table is malformed.
    pub fn new(
        machine: SoftwareMachineConfig,
        cpu: &str,
        prefault: bool,
    ) -> Result<Self, SoftwareMachineError> {
        let mut published = PublishedKernel::ALL.iter();
        let policy = match published.find(|kernel| kernel.name() == machine.policy) {
            Some(kernel) => kernel.policy(),
            None => machine.parse_policy()?,
        };
        let text = cost::text_of(cpu)?;
        let costs = CostTable::parse(cpu, &text)?;
        let digest = Sha256::digest(text.as_bytes());
        let short: String = digest[..8].iter().map(|b| format!("{b:02x}")).collect();
        Ok(Self { machine, policy, costs, costs_name: format!("{cpu} (costs {short})"), prefault })
    }
}

/// A kernel of the published figures, as a policy of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PublishedKernel {
    /// Linux 5.12-rc2: 5.10, except that a leaf that differs in permissions only is kept.
    Base,
    /// With cache maintenance in the map handlers.
    Handlers,
    /// With cache maintenance in the map handlers, and the block installed before the tables are
    /// freed; as published, without cleaning the block's memory.
    InstallFirst,
}

impl PublishedKernel {
    /// The kernels, in the order of their changes.
    pub const ALL: [Self; 3] = [Self::Base, Self::Handlers, Self::InstallFirst];

    /// Returns the name that `--policy` takes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Base => "linux-5.12",
            Self::Handlers => "linux-5.12+handlers",
            Self::InstallFirst => "linux-5.12+handlers+install-first",
        }
    }

    /// Returns the policy of the kernel's fault path.
    pub const fn policy(self) -> Policy {
        let base = Policy { existing_leaf: ExistingLeaf::Retry, ..Policy::LINUX_5_10 };
        match self {
            Self::Base => base,
            Self::Handlers => Policy { cmo: CmoPlacement::BetweenBreakAndMake, ..base },
            Self::InstallFirst => Policy {
                cmo: CmoPlacement::BetweenBreakAndMake,
                coalesce: Coalesce::InstallWithoutCmo,
                ..base
            },
        }
    }
}

/// A machine in virtual time, which executes tasks itself.
pub type SimulatedMachine = EngineMachine<VirtualTime>;

impl SimulatedMachine {
    /// Creates the machine.
    ///
    /// # Errors
    /// The configuration is not supported.
    pub fn new(config: &SimulationConfig) -> Result<Self, SoftwareMachineError> {
        let machine = &config.machine;
        machine.check()?;
        let allocation = PageAllocation::of(machine.backing)?;
        let prices = Prices::new(&config.costs, machine.vcpus);
        let memory = HostMemory::new(allocation, machine.size()?);
        let platform = VirtualTime::new(prices, memory, config.prefault);
        if config.prefault {
            platform.host.populate();
        }
        let host = Host {
            arch: "aarch64".to_owned(),
            kernel: concat!(env!("CARGO_PKG_VERSION"), "-granule-simulation").to_owned(),
            cpu: Some(config.costs_name.clone()),
            emulator: Some(SIMULATOR.to_owned()),
            ..Host::default()
        };
        Self::on(platform, machine, config.policy, host)
    }
}

/// Operations without effect on other processes only [`charge`] their time.
impl Platform for VirtualTime {
    type Lock = VirtualLock;

    fn line(&self) -> u64 {
        LINE
    }

    fn perform(&self, initiator: Initiator, event: PlatformEvent) {
        let prices = &self.prices;
        match event {
            PlatformEvent::Access => spend(prices.guest_touch),
            PlatformEvent::FaultEntry => charge(prices.fault_entry),
            PlatformEvent::FaultExit => charge(prices.fault_exit),
            PlatformEvent::LoadEntry if initiator != Initiator::Guest => charge(prices.entry_load),
            PlatformEvent::StoreEntry => spend(prices.entry_store),
            PlatformEvent::ExchangeEntry => spend(prices.entry_exchange),
            PlatformEvent::AllocateTable => charge(prices.table_allocate),
            PlatformEvent::FreeTables(count) => charge(prices.table_free * count),
            PlatformEvent::ChangeReferences(count) => {
                charge(prices.table_reference * u64::from(count))
            }
            PlatformEvent::Locked if initiator == Initiator::FaultPath => {
                charge(prices.fault_locked)
            }
            PlatformEvent::Locked if initiator == Initiator::Host => charge(prices.host_locked),
            PlatformEvent::Pause => spend(prices.locked_wait),
            PlatformEvent::Tlbi(Scope::Local) => spend(prices.tlbi_local),
            PlatformEvent::Tlbi(Scope::Broadcast) => spend(prices.tlbi_broadcast),
            PlatformEvent::CleanInvalidate(_, size) => {
                let lines = size / LINE;
                self.transfer(lines * LINE, prices.clean(lines));
            }
            PlatformEvent::InvalidateInstructions(Some((_, size))) => {
                spend(prices.icache_line * (size / LINE));
            }
            PlatformEvent::InvalidateInstructions(None) => spend(prices.icache_all),
            // The time of a barrier is included in that of the operation that it completes.
            PlatformEvent::LoadEntry
            | PlatformEvent::Locked
            | PlatformEvent::Retry
            | PlatformEvent::Dsb(_) => {}
        }
    }

    fn page(ops: &CpuOperations<Self>, offset: u64, access: Access) -> Page {
        host_faults::page(ops, offset, access == Access::Write)
    }

    fn load(&self, phys: PhysAddr) -> u64 {
        self.contents.borrow().get(&phys.0).copied().unwrap_or(0)
    }

    fn store(&self, phys: PhysAddr, value: u64) {
        self.contents.borrow_mut().insert(phys.0, value);
    }

    fn touch(&self, _: PhysAddr) {}
}

impl TimedPlatform for VirtualTime {
    const ENGINE: &'static str = "simulation";

    fn host_address(&self) -> Option<HostVirtAddr> {
        None
    }

    fn resident(state: &MachineState<Self>) -> BTreeMap<u64, u64> {
        state.platform.host.resident()
    }

    fn read(state: &MachineState<Self>, offset: u64) -> u64 {
        let platform = &state.platform;
        platform.host.phys(offset).map_or(0, |phys| platform.load(phys))
    }

    fn timed<T>(&self, act: impl FnOnce() -> T) -> (T, Nanoseconds) {
        let start = self.time.get();
        virtual_time::set(start);
        virtual_time::set_lock_costs(self.prices.lock_take, self.prices.lock_handoff);
        let result = act();
        self.time.set(virtual_time::now());
        (result, Nanoseconds((virtual_time::now() - start) / 1000))
    }

    fn recover_blocks(ops: &CpuOperations<Self>, table: &mut Stage2) -> Result<(), MapError> {
        host_faults::recover_blocks(ops, table)
    }

    fn discard(&self) -> io::Result<()> {
        self.contents.borrow_mut().clear();
        self.host.forget();
        Ok(())
    }

    fn restore(&self) -> io::Result<()> {
        if self.prefault {
            self.host.populate();
        }
        Ok(())
    }

    fn add_events(&self, events: &mut EventCounts) {
        events.insert("model_host_invalidations".to_owned(), self.invalidations.get());
    }

    fn take_vcpus(_: &mut Vec<SoftwareVcpu<Self>>) -> Vec<Box<dyn Vcpu>> {
        Vec::new()
    }

    fn run_tasks(
        machine: &mut SimulatedMachine,
        tasks: &[Task],
        seed: u64,
        deadline: Duration,
    ) -> Option<Result<TaskTimes, VcpuFailure>> {
        let state = &machine.ops.state;
        let platform = &state.platform;
        virtual_time::set_lock_costs(platform.prices.lock_take, platform.prices.lock_handoff);
        platform.runs.set(platform.runs.get() + 1);
        let count = machine.vcpus.len();
        platform.working.set(count);
        let done = Rc::new(RefCell::new(Vec::new()));
        let mut processes: Vec<_> = Vec::with_capacity(count + 1);
        for ((index, mut vcpu), task) in
            mem::take(&mut machine.vcpus).into_iter().enumerate().zip(tasks)
        {
            let (state, done, task) = (Arc::clone(state), Rc::clone(&done), *task);
            let body = move || {
                let result = vcpu.execute(&task);
                done.borrow_mut().push((index, vcpu, result));
                let working = &state.platform.working;
                working.set(working.get() - 1);
            };
            let delay = match seed {
                0 => 0,
                _ => mix(mix(seed) ^ (platform.runs.get() << 32) ^ index as u64) % DELAY_LIMIT,
            };
            processes.push((delay, Box::new(body) as Box<dyn FnOnce()>));
        }
        let host = CpuOperations::new(state, count, Initiator::Host);
        processes.push((0, Box::new(move || host_faults::balance(&host))));
        let start = platform.time.get();
        let times = match virtual_time::run(start, processes, deadline) {
            Ok(times) => times,
            Err(error) => return Some(Err(failure(&error))),
        };
        let mut done = done.take();
        let failed = done.iter_mut().find_map(|(_, _, result)| mem::replace(result, Ok(())).err());
        done.sort_unstable_by_key(|(index, ..)| *index);
        machine.vcpus = done.into_iter().map(|(_, vcpu, _)| vcpu).collect();
        if let Some(failure) = failed {
            return Some(Err(failure));
        }
        let times = &times[..count];
        let last = times.iter().map(|time| time.1).max().unwrap_or(start);
        machine.ops.state.platform.time.set(last);
        Some(Ok(TaskTimes {
            total: Nanoseconds((last - start) / 1000),
            vcpus: times.iter().map(|(from, to)| Nanoseconds((to - from) / 1000)).collect(),
        }))
    }
}

fn failure(error: &ClockError) -> VcpuFailure {
    let vcpu = match error {
        ClockError::Deadlock(waiting) => waiting.first().copied().unwrap_or(0),
        ClockError::Deadline(_) => 0,
    };
    VcpuFailure::new(vcpu, "NO END", error.to_string())
}
